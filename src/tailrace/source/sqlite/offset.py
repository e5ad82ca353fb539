"""How far a stream of an SQLite file is: one position on the tape, and every table that is not yet at it.

    {"log": "<position>", "witness": {…}, "tables": {"orders": {"phase": "copy", "x": "<position>", …}, …}}

A position is (change_id, ordinal). Ordinals 0 and 1 are a change and, where its key was changed, the second half of it;
higher ones stand for schema changes after that change, found by comparing schemas. `witness` identifies the rows up to
`log`. A table waits (`init`), copies in chunks of rowids while its changes stay on the tape, then catches up from x,
the end of the tape when its copy began, and is ready once it meets the common position. Pure values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tailrace.model.change import START, Position
from tailrace.source import offset

FIRST_HALF, SECOND_HALF = 0, 1


def after_change(change_id: int) -> Position:
    """The position after a change, before any schema change that the tape does not record."""
    return Position(change_id, SECOND_HALF)


@dataclass(frozen=True)
class SqliteTableOffset(offset.TableOffset[Position]):
    """One table. `bounds` are the last rowids of its chunks."""

    snapshot_position: Position = START
    bounds: tuple[int, ...] = ()

    @property
    def chunks(self) -> int:
        return len(self.bounds)

    def position(self, log: Position) -> Position:
        return self.place(log)

    def begin(self, snapshot_position: Position, bounds: tuple[int, ...]) -> SqliteTableOffset:
        """A new copy, with no chunk read yet."""
        return SqliteTableOffset(
            "copy", snapshot_position=snapshot_position, bounds=bounds, request=self.request, copy=self.copy + 1
        )

    def join(self) -> SqliteTableOffset:
        return replace(super().join(), bounds=(), next=0)

    def to_json(self) -> dict[str, Any]:
        raw: dict[str, Any] = {"phase": self.phase}
        numbers = {"next": self.next, "request": self.request, "copy": self.copy}
        raw |= {name: number for name, number in numbers.items() if number}
        if self.snapshot_position != START:
            raw["x"] = str(self.snapshot_position)
        if self.bounds:
            raw["bounds"] = list(self.bounds)
        if self.skips:
            raw["skips"] = [str(position) for position in self.skips]
        return raw if self.at is None else {**raw, "at": str(self.at)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> SqliteTableOffset:
        at, x = raw.get("at"), raw.get("x")
        return cls(
            raw["phase"],
            raw.get("copy", 0),
            raw.get("next", 0),
            Position.parse(at) if at else None,
            raw.get("request", 0),
            tuple(map(Position.parse, raw.get("skips", ()))),
            Position.parse(x) if x else START,
            tuple(raw.get("bounds", ())),
        )


@dataclass(frozen=True)
class SqliteOffset(offset.LogOffset[str, SqliteTableOffset, Position]):
    """The whole offset; `tables` is keyed by name, the only thing that distinguishes the tables of a file."""

    witness: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> SqliteOffset:
        tables = {name: SqliteTableOffset.from_json(entry) for name, entry in raw["tables"].items()}
        return cls(Position.parse(raw["log"]), tables, raw["witness"])

    def to_json(self) -> dict[str, Any]:
        tables = {name: self.tables[name].to_json() for name in sorted(self.tables)}
        return {"log": str(self.log), "witness": dict(self.witness), "tables": tables}
