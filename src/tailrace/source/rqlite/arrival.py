"""The first events of tables of which nothing was known: where they begin, and what their values show."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tailrace.change import Position, just_before
from tailrace.journal import FrameRef, JournalReader
from tailrace.schema import TableSchema
from tailrace.source.rqlite import catalog
from tailrace.source.rqlite.catalog import Kinds
from tailrace.source.rqlite.image import position_of, read_lines
from tailrace.source.rqlite.split import summaries


@dataclass(frozen=True)
class Arrival:
    """One table. `x` lies right before its first event; `kinds` are those of its first columns, None without images."""

    name: str
    snapshot_position: Position
    kinds: Kinds | None
    has_rowid: bool

    def infer(self, service: str, kinds: Kinds) -> TableSchema:
        return catalog.infer(None, service, self.name, kinds, has_rowid=self.has_rowid)


def arrivals(
    journal: JournalReader, refs: Sequence[FrameRef], names: Collection[str], after: Position
) -> dict[str, Arrival]:
    """The tables as these frames show them behind a position. Only frames that hold them are read."""
    firsts: dict[str, Position] = {}
    named: set[str] = set()
    for ref in refs:
        here = [name for name in summaries(ref.meta) if name in names and name not in named]
        if not here:
            continue
        for event in read_lines(journal.read(ref).payload).events:
            position = position_of(event)
            if event["table"] in here and position > after:
                firsts.setdefault(event["table"], position)
                # A row with rowid 0 comes without it too, but hardly alone.
                if "new_row_id" in event or "old_row_id" in event:
                    named.add(event["table"])
    return {name: Arrival(name, just_before(at), _kinds(refs, name), name in named) for name, at in firsts.items()}


def _kinds(refs: Sequence[FrameRef], name: str) -> Kinds | None:
    """The table's first columns with the kinds of all their values, up to the first event with other columns."""
    found: dict[str, set[str]] | None = None
    for ref in refs:
        for shape in summaries(ref.meta)[name].shapes if name in summaries(ref.meta) else ():
            if found is None:
                found = {column: set() for column in shape.kinds}
            if found.keys() != shape.kinds.keys():
                return _joined(found)
            for column, letters in shape.kinds.items():
                found[column].update(letters)
    return _joined(found) if found is not None else None


def _joined(kinds: Mapping[str, set[str]]) -> Kinds:
    return {column: "".join(sorted(letters)) for column, letters in kinds.items()}
