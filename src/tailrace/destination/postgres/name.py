"""Where a table is in the database, and the names that tailrace uses next to it."""

from __future__ import annotations

import hashlib

from tailrace.model.schema import TableName

BOOK_SCHEMA = "_tailrace"
NAME_BYTES = 63
"""Postgres cuts longer names."""


def place_of(table: TableName, schema: str) -> TableName:
    """The schema and name of the table there, by the pattern `schema`."""
    return TableName(schema.replace("{schema}", table.schema), table.name)


def shadow_of(place: TableName) -> TableName:
    """The table of a copy that will replace the one at a place. Its name is short, whatever that one's is."""
    return TableName(place.schema, f"_tailrace copy {hashlib.sha256(str(place).encode()).hexdigest()[:16]}")


def is_reserved(name: str) -> bool:
    return name.startswith("_tailrace")


def is_too_long(name: str) -> bool:
    return len(name.encode()) > NAME_BYTES
