"""The file of a pipeline, and the types that it may name."""
