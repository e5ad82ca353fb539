"""How far a stream of an SQLite file is: one position on the tape, and every table that is not yet at it.

    {"log": "<position>", "witness": {…}, "tables": {"orders": {"phase": "copy", "x": "<position>", …}, …}}

A position is (change_id, ordinal). Ordinals 0 and 1 are a change and, where its key was changed, the second half of it;
higher ones stand for schema changes after that change, found by comparing schemas. `witness` identifies the rows up to
`log`. A table waits (`init`), copies in chunks of rowids while its changes stay on the tape, then catches up from x,
the end of the tape when its copy began, and is ready once it meets the common position. Pure values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tailrace.model.change import Position
from tailrace.source import offset

FIRST_HALF, SECOND_HALF = 0, 1


def after_change(change_id: int) -> Position:
    """The position after a change, before any schema change that the tape does not record."""
    return Position(change_id, SECOND_HALF)


@dataclass(frozen=True)
class SqliteOffset(offset.LogOffset[str, offset.ChunkedTableOffset, Position]):
    """The whole offset; `tables` is keyed by name, the only thing that distinguishes the tables of a file."""

    witness: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> SqliteOffset:
        tables = {name: offset.ChunkedTableOffset.from_json(entry) for name, entry in raw["tables"].items()}
        return cls(Position.parse(raw["log"]), tables, raw["witness"])

    def to_json(self) -> dict[str, Any]:
        tables = {name: self.tables[name].to_json() for name in sorted(self.tables)}
        return {"log": str(self.log), "witness": dict(self.witness), "tables": tables}
