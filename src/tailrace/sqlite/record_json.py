"""Turso's two SQL helpers for looking at records, here for any file and for every value."""

from __future__ import annotations

import json

from tailrace.sqlite.layout import CaptureConnection, read_table_shape
from tailrace.sqlite.record import Value, decode


def table_columns_json_array(connection: CaptureConnection, table: str) -> str:
    """The names of the table's columns as a JSON array. Raises PreflightError if there is no such table."""
    names = [field.name for field in read_table_shape(connection, table).fields]
    return json.dumps(names, ensure_ascii=False, separators=(",", ":"))


def bin_record_json_object(columns: str, record: bytes | None) -> str | None:
    """A record as a JSON object under the names of `columns`, a JSON array; None for none.

    Bytes are hex digits, as SQLite's hex() prints them; numbers that JSON lacks are text. A record may be shorter than
    `columns`. Raises MalformedRecordError for bytes that are no record or hold more values.
    """
    if record is None:
        return None
    names, values = json.loads(columns), decode(record)
    if len(values) > len(names):
        raise ValueError(f"a record of {len(values)} values for {len(names)} columns")
    held = {name: _plain(value) for name, value in zip(names, values, strict=False)}
    return json.dumps(held, ensure_ascii=False, separators=(",", ":"))


def _plain(value: Value) -> Value:
    if isinstance(value, bytes):
        return value.hex().upper()
    if isinstance(value, float) and abs(value) == float("inf"):
        return "Infinity" if value > 0 else "-Infinity"
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace") if isinstance(value, str) else value
