"""`ChangelogSource`: the changes of a changelog, in its order, from any place.

A position is (entry and transaction, place in the batch). Entries are never changed, so the log is read in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.changelog import row
from tailrace.changelog.entry import ChangelogEntry, ChangelogLog, entry_of_version, paths
from tailrace.changelog.folder import open_folder
from tailrace.errors import Finding, LostError
from tailrace.model.change import START, Changes, Op, Position, end_of
from tailrace.model.collapse import fit
from tailrace.model.schema import TableName, TableSchema
from tailrace.source.follower import Follower, Limit, SchemaVersions
from tailrace.source.log_follower import LogSource, SourceLogFollower, SourceOffset
from tailrace.source.offset import ChunkedTableOffset
from tailrace.source.tape.option import TapeOptions


@dataclass(frozen=True)
class ChangelogSource(LogSource):
    """Tables are known by their names: the upstream's ids are not those of this reader."""

    Options = TapeOptions

    options: TapeOptions

    def shared_folders(self) -> Mapping[str, Path]:
        path = self.options.path
        return {} if "://" in path else {**super().shared_folders(), "source.path": Path(path)}

    def check(self) -> list[Finding]:
        if not self.log.last():
            fix = "correct path, or run the pipeline with destination: {type: parquet} first"
            return [Finding("error", "source", f"there is no changelog at {self.options.path}", fix)]
        return super().check()

    def tables(self) -> list[TableSchema]:
        found = [versions[max(versions)] for name in self.log.tables() if (versions := self.log.versions(name))]
        return self.wanted([_by_name(table) for table in found])

    def head(self) -> Position:
        last = self.log.last()
        return end_of(row.commit_of(last)) if last else START

    def boundary(self, after: Position, upto: Position, limit: Limit) -> Position:
        """Whole entries: those that hold about as many rows as a batch may have."""
        first, last = row.entry_of(after.commit), row.entry_of(upto.commit)
        rows, number = 0, max(first, min(self.first_entry - 1, last))
        while number < last and rows < limit.rows:
            number += 1
            rows += self.log.entry(number).rows
        return min(upto, end_of(row.commit_of(number)))

    def read_log(self, table: TableSchema, after: Position, upto: Position) -> Iterator[Changes]:
        name = str(table.table)
        first = max(row.entry_of(after.commit) + (after.ordinal > 0), self.first_entry, 1)
        for number in range(first, row.entry_of(upto.commit) + 1):
            entry = self.log.entry(number)
            for changes in self._changes(entry, table.table, name):
                inside = _between(changes, after, upto)
                if len(inside):
                    yield fit(Changes(inside.table, inside.batch), table)

    def follow(self, schemas: SchemaVersions, *, is_receiving: bool = False) -> Follower:
        return ChangelogFollower(self, schemas)

    @property
    def log(self) -> ChangelogLog:
        options = {name: value.reveal() for name, value in self.options.storage_options.items()}
        return _opened(self.options.path, tuple(sorted(options.items())))

    @property
    def first_entry(self) -> int:
        """The number of the first entry that this reader needs."""
        begin = self.options.from_
        if begin is None:
            return 1
        if isinstance(begin, int):
            return begin
        log, key = self.log, (self.options.path, begin)
        if key not in _found:
            number = _find(log, begin)
            if number > log.last():
                return number
            _found[key] = number
        return _found[key]

    def _changes(self, entry: ChangelogEntry, table: TableName, name: str) -> Iterator[Changes]:
        """The changes of one table in an entry. A copy that begins again clears the rows that came before it."""
        if name in entry.begins and (version := self._cleared(entry, table)) is not None:
            nothing = version.rows([pa.nulls(1, column.type) for column in version.columns], 1)
            place = row.commit_of(entry.number, 0)
            yield Changes.build(version, nothing, op=Op.TRUNCATE, commit=place, ordinal=np.zeros(1, np.int64))
        for (number, _), files in groupby(paths(entry, name), lambda file: (file.version, file.kind)):
            version = _by_name(self.log.version(table, number))
            group = list(files)
            if any("/day=" in file.path for file in group):
                rows = [part for file in group for part in self._read(file.path, version)]
                yield from self._kept(pa.concat_tables(rows).sort_by(row.ORDER), version, entry)
                continue
            for file in group:
                for part in self._read(file.path, version):
                    yield from self._kept(part, version, entry)

    def _cleared(self, entry: ChangelogEntry, table: TableName) -> TableSchema | None:
        """The table whose rows a copy that begins in this entry clears; None if there can be none."""
        known = [one for one in self.log.versions(table) if entry_of_version(one) <= entry.number]
        is_first = not known or entry_of_version(min(known)) == entry.number
        return None if is_first else _by_name(self.log.version(table, max(known)))

    def _read(self, path: str, version: TableSchema) -> Iterator[pa.Table]:
        body = self.log.folder.get(path)
        if body is None:
            raise LostError(
                f"{path} of the changelog is missing", fix="restore it from a backup, or begin after it with `from`"
            )
        return row.decode(body, version)

    def _kept(self, rows: pa.Table, version: TableSchema, entry: ChangelogEntry) -> Iterator[Changes]:
        begin = self.options.from_
        if isinstance(begin, str):
            if len(begin) == 32:
                rows = rows.filter(pc.greater_equal(rows.column(row.POSITION), begin))
            else:
                written = pa.scalar(datetime.fromisoformat(entry.written_at), pa.timestamp("us", "UTC"))
                at = pa.scalar(datetime.fromisoformat(begin), pa.timestamp("us", "UTC"))
                rows = rows.filter(pc.greater_equal(pc.fill_null(rows.column(row.COMMITTED_AT), written), at))
        if rows.num_rows:
            yield row.changes_of(rows, version, entry.number)


class ChangelogFollower(SourceLogFollower):
    """Knows every version of a table, and where it begins: the changelog says so."""

    source: ChangelogSource

    def compare_schemas(self, now: SourceOffset, end: SourceOffset) -> SourceOffset:
        return end

    def scan_schemas(self, now: SourceOffset, end: SourceOffset) -> None:
        for number in range(row.entry_of(now.log.commit) + 1, row.entry_of(end.log.commit) + 1):
            for file in self.source.log.entry(number).files:
                if entry_of_version(file.version) == number:
                    self._put(TableName.parse(file.table), file.version)

    def _begin(self, table: TableSchema, entry: ChunkedTableOffset) -> ChunkedTableOffset:
        begun = entry.begin(START, (None,))
        versions = sorted(self.source.log.versions(table.table))
        self._versions.put_schema(_by_name(self.source.log.version(table.table, versions[0])), START)
        for version in versions[1:]:
            self._put(table.table, version)
        return begun

    def _put(self, table: TableName, version: int) -> None:
        """Store a version from its entry on. Of several in one entry the last counts: earlier rows are fitted to it."""
        columns = _by_name(self.source.log.version(table, version))
        self._versions.put_schema(columns, Position(row.commit_of(entry_of_version(version), 0), 0))


def _by_name(table: TableSchema) -> TableSchema:
    return TableSchema(table.table, table.columns, table.key, table.version, upstream_id=str(table.table))


def _between(changes: Changes, after: Position, upto: Position) -> Changes:
    commit, ordinal = changes.numpy("commit"), changes.numpy("ordinal")
    inside = (commit > after.commit) | ((commit == after.commit) & (ordinal > after.ordinal))
    inside &= (commit < upto.commit) | ((commit == upto.commit) & (ordinal <= upto.ordinal))
    return changes if inside.all() else Changes(changes.table, changes.batch.filter(pa.array(inside)))


_found: dict[tuple[str, str], int] = {}
"""Where readers begin. An entry that was found stays the first one."""


@lru_cache(maxsize=16)
def _opened(path: str, options: tuple[tuple[str, str], ...]) -> ChangelogLog:
    return ChangelogLog(open_folder(path, dict(options)))


def _find(log: ChangelogLog, begin: str) -> int:
    """The first entry that may hold a change at this position or time, or after it."""
    if len(begin) != 32:
        return log.find_time(datetime.fromisoformat(begin))
    for number in range(1, log.last() + 1):
        if (log.entry(number).last or "") >= begin:
            return number
    return log.last() + 1
