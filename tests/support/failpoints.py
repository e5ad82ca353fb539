"""Failpoints that several tests order."""

from __future__ import annotations

COMMIT = "delta.before_commit"
