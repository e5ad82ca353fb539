"""SQLite and Turso files: their capture table is a durable log that can be read again, so it is read in place."""

from __future__ import annotations
