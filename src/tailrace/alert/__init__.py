"""Tells people, through a webhook or a command, that a pipeline needs them, and when it no longer does."""
