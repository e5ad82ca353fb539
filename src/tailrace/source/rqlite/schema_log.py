"""Follows the tables' versions along a cluster's journal.

rqlite never sends DDL. A schema change shows only in events that have other columns than before, or that come without
their row because the sender did not know its columns yet; the catalog then gives the current table. If the table has
changed again since, the version in between is built from the previous and the current one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tailrace.capture.layout import Field
from tailrace.errors import TableError
from tailrace.journal import FrameRef, JournalReader
from tailrace.model.change import Position, just_before
from tailrace.model.schema import TableSchema
from tailrace.source.follower import SchemaVersions
from tailrace.source.offset import ChunkedTableOffset
from tailrace.source.rqlite import catalog
from tailrace.source.rqlite.catalog import Kinds, stored_names, upstream_id
from tailrace.source.rqlite.decode import identifies_row, needs_image, position_of, read_lines
from tailrace.source.rqlite.discovery import RqliteDiscovery
from tailrace.source.rqlite.log_split import EventColumns, Summary, summaries
from tailrace.source.rqlite.missed_change import MissedChanges
from tailrace.source.schema_log import SchemaLog
from tailrace.source.sqlite import schema_diff
from tailrace.source.sqlite.catalog import ALIAS, ROWID, TableDefinition, rowid_column, stored_columns

# The first events of unknown tables: where they begin, and the kinds of their values.


@dataclass(frozen=True)
class Arrival:
    """One table. `x` is right before its first event; `kinds` are those of its first columns, None without images."""

    name: str
    snapshot_position: Position
    kinds: Kinds | None
    has_rowid: bool

    def infer(self, service: str, kinds: Kinds) -> TableSchema:
        return catalog.infer(None, service, self.name, kinds, has_rowid=self.has_rowid)


def arrivals(
    journal: JournalReader, refs: Sequence[FrameRef], names: Collection[str], after: Position
) -> dict[str, Arrival]:
    """The tables as these frames show them after a position. Only frames that hold them are read."""
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
                # A row with rowid 0 also comes without a rowid, but is hardly ever the only row.
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


class RqliteSchemaLog(SchemaLog[str]):
    """One per service. `failures` holds the position at which a table got unknown columns, and the error to raise."""

    def __init__(
        self,
        service: str,
        versions: SchemaVersions,
        discovery: RqliteDiscovery,
        missed: MissedChanges,
        *,
        rowids: bool,
    ) -> None:
        super().__init__(versions)
        self._missed = missed
        self._service = service
        self._discovery = discovery
        self._rowids = rowids
        self._looked = False
        self.failures: dict[str, tuple[Position, Mapping[str, str | None]]] = {}

    def begin(self, table: TableDefinition, snapshot_position: Position) -> TableSchema:
        """Start a copy of the table at `x`, with its current columns."""
        known = self._versions.schema_at(upstream_id(self._service, table.name))
        return self.put(
            catalog.begin(known, table, self._service, snapshot_position, rowids=self._rowids), snapshot_position
        )

    def scan(
        self, journal: JournalReader, after: Position, upto: Position, tables: Mapping[str, ChunkedTableOffset]
    ) -> None:
        """Store the versions found in the events up to `upto`; the first call starts at `after`."""
        for name, (at, _) in [*self.failures.items()]:
            if name not in tables or tables[name].phase != "stopped":
                # The cause may have been fixed since.
                del self.failures[name]
                self._rewind(max(just_before(at), after))
        self._looked = False
        self._missed.look()

        def read(begin: Position, end: Position) -> None:
            for ref in journal.frames(begin, end):
                if self._missed.are_before(ref):
                    for name, entry in tables.items():
                        if max(begin, entry.snapshot_position) < ref.last <= end:
                            self._mark(name, ref.last)
                for name, summary in summaries(ref.meta).items():
                    if name not in tables or tables[name].phase == "init":
                        continue
                    after_copy = max(begin, tables[name].snapshot_position)
                    if (
                        summary.missing
                        and (lost := self._unidentified(journal, ref, name, after_copy, end)) is not None
                    ):
                        self._mark(name, lost)
                    missing = self._missing(journal, ref, name, summary) if summary.missing else []
                    for shape in sorted([*summary.shapes, *missing], key=lambda shape: shape.at):
                        if after_copy < shape.at <= end and name not in self.failures:
                            self._take(name, shape)

        self._scan(after, upto, read)

    def _unidentified(
        self, journal: JournalReader, ref: FrameRef, name: str, after: Position, upto: Position
    ) -> Position | None:
        """The last event of a frame that came without its row and does not say which key the row had.

        None if there is none, or if the table's rows cannot be queried: then the event itself is the error.
        """
        known = self._versions.schema_at(upstream_id(self._service, name), ref.last)
        if not self._discovery.is_live or known is None or rowid_column(known) is not None:
            return None
        events = read_lines(journal.read(ref).payload).events
        places = [position_of(e) for e in events if e["table"] == name and not identifies_row(e, by_rowid=False)]
        return max((at for at in places if after < at <= upto), default=None)

    def _missing(self, journal: JournalReader, ref: FrameRef, name: str, summary: Summary) -> list[EventColumns]:
        """A frame's events without their row, as shapes without columns, unless the table is unchanged."""
        now, known = self._now(name), upstream_id(self._service, name)
        history = self._versions.schemas_between(known, just_before(ref.first), ref.last)
        if now is None or not history:
            return []
        names = {field.name for field in now.fields}
        steady = len(history) == 1 and all(shape.kinds.keys() == names for shape in summary.shapes)
        if steady and schema_diff.same(history[0][1], now):
            return []
        events = read_lines(journal.read(ref).payload).events
        return [
            EventColumns(position_of(e), {}) for e in events if e["table"] == name and needs_image(e, by_rowid=True)
        ]

    def _now(self, name: str) -> TableDefinition | None:
        """The table in the catalog, read at most once per scan, and after everything that is scanned."""
        if not self._looked:
            self._discovery.refresh(at_once=True)
            self._looked = True
        return self._discovery.tables.get(name)

    def _take(self, name: str, shape: EventColumns) -> None:
        known = self._versions.schema_at(upstream_id(self._service, name), shape.at)
        if known is None:
            return
        if not self._discovery.is_listed:
            has_rowid = bool(known.key)
            inferred = catalog.infer(known, self._service, name, shape.kinds, has_rowid=has_rowid)
            self._versions.put_schema(inferred, shape.at)
            return
        names = set(stored_names(known))
        if shape.kinds and names == shape.kinds.keys():
            return
        now = self._now(name)
        table = now if not shape.kinds else fitting(known, now, shape.kinds)
        if table is None:
            if shape.kinds and self._discovery.is_live:
                self._mark(name, shape.at)  # a column was added and dropped, and only current rows can be queried
            elif shape.kinds:
                self.failures[name] = shape.at, self._unknown(known, shape).describe()
            return
        if schema_diff.same(known, table):
            return
        derived = catalog.derive(known, table, self._service, shape.at, rowids=self._rowids)
        self._versions.put_schema(derived.schema, shape.at)
        if derived.recopy is not None:
            self._mark(name, shape.at)

    def _unknown(self, known: TableSchema, shape: EventColumns) -> TableError:
        new = sorted(shape.kinds.keys() - set(stored_names(known)))
        gone = sorted(set(stored_names(known)) - shape.kinds.keys())
        return TableError(
            "its events have other columns than its schema"
            + (f"; new: {', '.join(new)}" if new else "")
            + (f"; gone: {', '.join(gone)}" if gone else ""),
            fix=f"update the schema file, then tailrace retry FILE {known.table}",
            table=str(known.table),
            position=str(shape.at),
        )


def fitting(known: TableSchema, now: TableDefinition | None, kinds: Kinds) -> TableDefinition | None:
    """The table with just these columns, taken from the known or the current version; None if a column is in neither.

    Columns keep their order and attributes: an older column keeps its type.
    """
    if now is not None and {field.name for field in now.fields} == kinds.keys():
        return now
    old = {column.name: column for column in stored_columns(known)}
    new = {field.name: field for field in now.fields} if now is not None else {}
    key = tuple(name for name in known.key if known.column(name).upstream_type != ROWID)
    if kinds.keys() - (old.keys() | new.keys()) or set(key) - kinds.keys():
        return None
    fields = [
        Field(name, "INTEGER" if column.upstream_type == ALIAS else column.upstream_type, None, 0)
        for name, column in old.items()
        if name in kinds
    ]
    fields += [field for name, field in new.items() if name in kinds and name not in old]
    required = frozenset(name for name, column in old.items() if not column.nullable and name in kinds)
    alias = next((name for name, column in old.items() if column.upstream_type == ALIAS), None)
    lacks_rowid = now.lacks_rowid if now is not None else False
    return TableDefinition(known.table.name, tuple(fields), required, key, alias, lacks_rowid)
