"""Follows the tables' versions along the tape: its rows on sqlite_schema become versions, stored by position.

RENAME leaves no row in Turso, so now and then the file's schema is compared with the newest versions as well.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping, Set

from tailrace.capture.change import CapturedChange, RecordRow
from tailrace.capture.layout import DELETE, INSERT
from tailrace.capture.record import Value
from tailrace.capture.schema_change import SQL
from tailrace.errors import DamagedError
from tailrace.model.change import Position, end_of
from tailrace.model.schema import TableSchema
from tailrace.source.offset import ChunkedTableOffset
from tailrace.source.schema_log import SchemaLog
from tailrace.source.sqlite import schema_diff
from tailrace.source.sqlite.catalog import Listed, TableDefinition, describe
from tailrace.source.sqlite.log import TapeLog, TapeWindow
from tailrace.source.sqlite.offset import FIRST_HALF


class SqliteSchemaLog(SchemaLog[str]):
    """The versions of the tables of one file."""

    def begin(self, table: TableDefinition, snapshot_position: Position) -> TableSchema:
        """Start a copy of the table at `x`, with its current columns."""
        known = self._versions.schema_at(table.name)
        return self.put(schema_diff.begin(known, table, snapshot_position), snapshot_position)

    def scan(
        self,
        log: TapeLog,
        after: Position,
        upto: Position,
        tables: Mapping[str, ChunkedTableOffset],
        listed: Mapping[str, Listed],
    ) -> None:
        """Store the versions found in the rows up to `upto`; the first call starts at `after`."""

        def read(begin: Position, end: Position) -> None:
            for change in log.schema_changes(TapeWindow(begin.commit, end.commit)):
                self._take(change, tables, listed, by_triggers=log.by_triggers)

        self._scan(after, upto, read)

    def _take(
        self,
        change: CapturedChange,
        tables: Mapping[str, ChunkedTableOffset],
        listed: Mapping[str, Listed],
        *,
        by_triggers: bool,
    ) -> None:
        at = Position(change.change_id, FIRST_HALF)
        older = {name for name, entry in tables.items() if entry.snapshot_position < at}
        try:
            before, after = change.row("before"), change.row("after")
        except DamagedError:
            before = after = None
        row = after or before
        if row is None:
            self._take_unseen(change, at, older, listed)
        elif row[0] == "trigger" and change.type == INSERT and by_triggers:
            # A trigger newer than those of the capture ran before them, so the tape has its effects first.
            self._mark_all(older, at, row[2])
        elif row[0] != "table":
            return
        elif before is not None and after is not None and before[1] != after[1]:
            # A renamed table counts as another table, even if its name is reused at once or restored.
            self._mark_all(older, at, before[1], after[1])
        elif (name := str(row[1])) in older:
            if change.type in (INSERT, DELETE):
                self._mark(name, at)
            elif before is None or after is None:
                self._take_unseen(change, at, [name], listed)
            else:
                self._take_altered(name, before, after, at)

    def _take_altered(self, name: str, before: RecordRow, after: RecordRow, at: Position) -> None:
        known = self._versions.schema_at(name, end_of(at.commit - 1))
        if known is None:
            return
        try:
            # Renames since the known version show in the old text.
            renamed = schema_diff.derive(known, describe(str(before[SQL])), at)
            altered = schema_diff.derive(renamed.schema, describe(str(after[SQL])), at)
        except sqlite3.Error:
            self._mark(name, at)
            return
        self._versions.put_schema(altered.schema, at)
        if renamed.recopy is not None or altered.recopy is not None:
            self._mark(name, at)

    def _take_unseen(
        self, change: CapturedChange, at: Position, tables: Collection[str], listed: Mapping[str, Listed]
    ) -> None:
        """A capture without images shows that the schema changed, but not how: compare with the file."""
        for name in tables:
            now, known = listed.get(name), self._versions.schema_at(name, at)
            if now is None or now.described is None or known is None:
                continue
            if change.type == INSERT and change.id == now.entry:
                self._mark(name, at)
            elif not schema_diff.same(known, now.described):
                self._put(schema_diff.derive(known, now.described, at), at)

    def look(self, name: str, table: TableDefinition, at: Position) -> bool:
        """Compare a table of the file with its newest version. True if it changed without a row on the tape."""
        known = self._versions.schema_at(name)
        if known is None or schema_diff.same(known, table):
            return False
        derived = schema_diff.derive(known, table, at)
        self._put(derived, at)
        if len(derived.schema.columns) != len(known.columns) and derived.recopy is None:
            self._mark(name, at)
        return True

    def _put(self, derived: schema_diff.SqliteDerivedSchema, at: Position) -> None:
        schema = self._versions.put_schema(derived.schema, at)
        if derived.recopy is not None:
            self._mark(schema.upstream_id, at)

    def _mark_all(self, tables: Set[str], at: Position, *names: Value) -> None:
        for name in tables & set(map(str, names)):
            self._mark(name, at)
