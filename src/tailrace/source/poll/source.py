"""`PollSource`: a database that can only be queried, and the two halves that read it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from tailrace.errors import Finding
from tailrace.model.change import Changes, end_of
from tailrace.model.schema import TableSchema
from tailrace.model.source_status import SourceStatus
from tailrace.model.table_rows import TableRows
from tailrace.source.follower import Offset, SchemaVersions, TableProgress
from tailrace.source.poll.connector import Connector, ConnectorOptions, Polled, connect
from tailrace.source.poll.diff import DiffResultSplit, DiffScan, DiffSplit, read_diff
from tailrace.source.poll.discovery import denied, examine, select_tables
from tailrace.source.poll.follower import PollFollower
from tailrace.source.poll.key_snapshot import KeySnapshot
from tailrace.source.poll.offset import PollOffset
from tailrace.source.poll.option import PollOptions
from tailrace.source.poll.reader import read_rows
from tailrace.source.poll.split import ChunkSplit, PollSplit, RefusedSplit, read_changes, read_chunk
from tailrace.source.source import Source
from tailrace.source.split import Split
from tailrace.system.atomic_file import make_folder


@dataclass(frozen=True)
class PollSource(Source):
    """A database and the tables wanted of it. Frozen and picklable; the DSN never shows in its repr.

    `folder` holds the key snapshots of the tables; on a cluster every executor must see it.
    """

    Options = PollOptions

    options: PollOptions
    alone: bool = False
    """Whether one process does everything, so that nothing shares the limit on queries with it."""

    @property
    def dsn(self) -> str:
        return self.options.dsn.reveal()

    @property
    def parallel(self) -> int:
        """How many tasks share the limit on queries."""
        return self.options.parallel or os.cpu_count() or 2

    @property
    def look_back_us(self) -> int | None:
        seconds = self.options.look_back
        return None if seconds is None else round(seconds * 1_000_000)

    def connector(self) -> Connector:
        """The database, for one of the processes that share the limit on its load: the tasks, and the one that plans
        what they read."""
        bound = self.options.max_queries_per_second
        share = bound / (1 if self.alone else self.parallel + 1) if bound is not None else None
        return connect(self.dsn, ConnectorOptions(self.options.statement_timeout, share, self.options.time_zone))

    def keeps_keys(self, table: Polled) -> bool:
        """Whether all keys of a table are recorded, which its full diffs need."""
        deletes = self.context.tables.settings_of(table.name).deletes
        return deletes is not None and deletes.full_diff is not None

    def check(self) -> list[Finding]:
        findings = self.connector().check()
        if any(finding.level == "error" for finding in findings):
            return findings
        with self.connector().open() as session:
            discovery = select_tables(session.tables(), self.context.tables)
            examined = [finding for table in discovery.tables.values() for finding in examine(session, table)]
        return [*findings, *discovery.findings, *examined, *self.notices()]

    def notices(self) -> list[Finding]:
        return denied(self.connector(), self.context.tables)

    def tables(self) -> list[TableSchema]:
        with self.connector().open() as session:
            return [table.schema for table in select_tables(session.tables(), self.context.tables).tables.values()]

    def follow(self, schemas: SchemaVersions, *, is_receiving: bool = False) -> PollFollower:
        make_folder(self.folder)
        return PollFollower(self, schemas)

    def read(self, split: Split) -> Iterator[Changes]:
        if isinstance(split, RefusedSplit):
            assert split.error is not None
            raise split.error
        if isinstance(split, DiffResultSplit):
            yield from split.read()
            return
        with self.connector().open() as session:
            if isinstance(split, PollSplit):
                yield from read_changes(session, split)
            elif isinstance(split, ChunkSplit):
                yield from read_chunk(session, split)
            elif isinstance(split, DiffScan):
                assert split.piece is not None
                yield from read_diff(session, split.piece)
            elif isinstance(split, DiffSplit):
                yield from read_diff(session, split)
            else:
                raise TypeError(f"not a split of this source: {type(split).__name__}")

    def refetch(self, table: TableSchema, keys: pa.Table) -> pa.Table:
        """The current rows of these keys. Polls emit complete rows, so this should not be needed."""
        deletes = self.context.tables.settings_of(str(table.table)).deletes
        polled = Polled(table, None, soft=deletes.soft if deletes is not None else None)
        with self.connector().open() as session:
            found = [pa.RecordBatch.from_struct_array(page.rows) for page in session.fetch(polled, keys, table)]
        return pa.Table.from_batches(found, pa.schema(list(table.row_type)))

    def read_table(self, table: TableSchema) -> TableRows:
        return TableRows(read_rows(self, table))

    def release(self, upto: Offset) -> None:
        """Merge the key snapshots of the tables, and delete what no step needs any more."""
        for upstream_id, entry in PollOffset.from_json(upto).tables.items():
            known = KeySnapshot.of(str(self.folder), upstream_id)
            known.prune(window=entry.oldest_window, base=entry.oldest_base, applied=entry.step)
            if entry.base:
                known.gather(entry.base, entry.undo.get("step", 0))

    def progress(self, offset: Offset) -> list[TableProgress]:
        return [
            TableProgress(
                upstream_id, entry.phase, end_of(entry.step), entry.next, entry.chunks, entry.request, entry.copy
            )
            for upstream_id, entry in PollOffset.from_json(offset).tables.items()
        ]

    def status(self) -> SourceStatus:
        return SourceStatus("polling")
