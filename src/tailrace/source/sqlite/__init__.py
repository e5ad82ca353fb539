"""SQLite and Turso files: their capture table is a durable, re-readable log, and is read where it is."""

from __future__ import annotations
