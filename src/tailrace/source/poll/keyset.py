"""Marks in the order of a table's rows, and the stretches between them.

Rows are ordered by some columns: (updated_at, key…) or the key alone. A mark with a value for each of them is right
after that row. A shorter one is before all rows that begin with its values, and the empty one before all rows. So a
mark is always between rows, and two stretches that share a mark neither overlap nor leave out a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

KeyValue = int | float | str | bytes
"""A value as its connector writes it into SQL: Postgres takes text for every type, SQLite its own classes."""
Keyset = tuple[KeyValue, ...]
START: Keyset = ()


class Stretch(NamedTuple):
    """The rows between two marks; without `upto`, all after `after`."""

    after: Keyset = START
    upto: Keyset | None = None


def to_json(mark: Keyset) -> list[Any]:
    """The mark as JSON values; bytes are the only class that JSON does not have."""
    return [{"hex": value.hex()} if isinstance(value, bytes) else value for value in mark]


def from_json(raw: object) -> Keyset:
    """The inverse. Raises ValueError for anything `to_json` does not make."""
    if not isinstance(raw, list):
        raise ValueError("a mark is a list")  # noqa: TRY004 - a damaged value, not a wrong call
    return tuple(_value(each) for each in raw)


def _value(raw: object) -> KeyValue:
    if isinstance(raw, dict) and isinstance(raw.get("hex"), str):
        return bytes.fromhex(raw["hex"])
    if isinstance(raw, int | float | str) and not isinstance(raw, bool):
        return raw
    raise ValueError("not a value of a mark")
