"""`PollSource`: a database that can only be queried, and the two halves that read it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import pyarrow as pa

from tailrace import errors
from tailrace.errors import Finding
from tailrace.model.change import Changes, end_of
from tailrace.model.schema import TableSchema
from tailrace.model.table_rows import TableRows
from tailrace.option.table import TableOptions
from tailrace.source.follower import Offset, SchemaVersions, TableProgress
from tailrace.source.poll.connector import ConnectorOptions, Polled, SourceConnector, connect
from tailrace.source.poll.diff import DiffResultSplit, DiffScan, DiffSplit, read_diff
from tailrace.source.poll.discovery import examine, select_tables
from tailrace.source.poll.follower import PollFollower
from tailrace.source.poll.key_snapshot import KeySnapshot
from tailrace.source.poll.offset import PollOffset
from tailrace.source.poll.option import PollOptions
from tailrace.source.poll.reader import read_rows
from tailrace.source.poll.split import ChunkSplit, PollSplit, RefusedSplit, read_changes, read_chunk
from tailrace.source.schema_log import SchemaFile
from tailrace.source.source import PIPELINE
from tailrace.source.split import Split
from tailrace.system.atomic_file import make_folder, remove


@dataclass(frozen=True)
class PollSource:
    """A database and the tables wanted of it. Frozen and picklable; the DSN never shows in its repr.

    `folder` holds what is known of the tables downstream; on a cluster every executor must see it.
    """

    options: ClassVar[type[PollOptions]] = PollOptions

    name: str
    dsn: str = field(repr=False)
    folder: str
    tables_wanted: TableOptions
    page_rows: int = 10_000
    chunk_rows: int = 200_000
    interval_seconds: float = 1.0
    idle_interval_seconds: float = 30.0
    statement_seconds: float = 60.0
    queries_per_second: float | None = None
    parallel: int = 2
    look_back_us: int | None = None
    zone: str | None = None
    on_bad_watermark: str = "strict"

    @classmethod
    def from_options(cls, options: PollOptions, *, name: str, tables: TableOptions, state_dir: Path) -> PollSource:
        return cls(
            name=name,
            dsn=options.dsn.reveal(),
            folder=str(state_dir / "poll" / PIPELINE),
            tables_wanted=tables,
            page_rows=options.page_rows,
            chunk_rows=options.chunk_rows,
            interval_seconds=options.interval,
            idle_interval_seconds=options.idle_interval,
            statement_seconds=options.statement_timeout,
            queries_per_second=options.max_queries_per_second,
            parallel=options.parallel or os.cpu_count() or 2,
            look_back_us=None if options.look_back is None else round(options.look_back * 1_000_000),
            zone=options.time_zone,
            on_bad_watermark=options.on_bad_watermark,
        )

    def connector(self, tasks: int = 1) -> SourceConnector:
        """The database, for one of so many sessions that share the bound on its load."""
        share = self.queries_per_second / tasks if self.queries_per_second is not None else None
        return connect(self.dsn, ConnectorOptions(self.statement_seconds, share, self.zone))

    def keeps_keys(self, table: Polled) -> bool:
        """Whether all keys of a table are written down, which its full diffs need."""
        deletes = self.tables_wanted.settings_of(table.name).deletes
        return deletes is not None and deletes.full_diff is not None

    def check(self) -> list[Finding]:
        findings = self.connector().check()
        if any(finding.level == "error" for finding in findings):
            return findings
        with self.connector().open() as session:
            discovery = select_tables(session.tables(), self.tables_wanted)
            examined = [finding for table in discovery.tables.values() for finding in examine(session, table)]
        return [*findings, *discovery.findings, *examined]

    def tables(self) -> list[TableSchema]:
        with self.connector().open() as session:
            return [table.schema for table in select_tables(session.tables(), self.tables_wanted).tables.values()]

    def prepare(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Nothing is made in a database that can only be queried. Raises PreflightError when it cannot be polled."""
        errors.require(self.check())

    def reset(self) -> None:
        """Forget what is known of the tables. Raises UnavailableError when it cannot be removed."""
        remove(Path(self.folder))

    def receiving(self) -> AbstractContextManager[object]:
        """Nothing is pushed: there is nothing to receive."""
        return nullcontext()

    def follow(self, versions: SchemaVersions | None = None) -> PollFollower:
        make_folder(Path(self.folder))
        if versions is None:
            self.prepare()
            versions = SchemaFile(Path(self.folder) / "versions.json")
        return PollFollower(self, versions)

    def read(self, split: Split) -> Iterator[Changes]:
        if isinstance(split, RefusedSplit):
            assert split.error is not None
            raise split.error
        if isinstance(split, DiffResultSplit):
            yield from split.read()
            return
        with self.connector(self.parallel).open() as session:
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
        """The rows of these keys now. Polls send whole rows, so that nobody should need it."""
        deletes = self.tables_wanted.settings_of(str(table.table)).deletes
        polled = Polled(table, None, soft=deletes.soft if deletes is not None else None)
        with self.connector(self.parallel).open() as session:
            found = [pa.RecordBatch.from_struct_array(page.rows) for page in session.fetch(polled, keys, table)]
        return pa.Table.from_batches(found, pa.schema(list(table.row_type)))

    def read_table(self, table: TableSchema) -> TableRows:
        return TableRows(read_rows(self, table))

    def release(self, upto: Offset) -> None:
        """What is known of the tables is brought together, and what no step needs any more is deleted."""
        for upstream_id, entry in PollOffset.from_json(upto).tables.items():
            known = KeySnapshot.of(self.folder, upstream_id)
            known.prune(window=entry.oldest_window, base=entry.oldest_base, applied=entry.step)
            if entry.base:
                known.gather(entry.base, entry.undo.get("step", 0))

    def for_reader(self, reader: str, table: str | None = None) -> PollSource:
        wanted = self.tables_wanted if table is None else self.tables_wanted.only(table)
        folder = Path(self.folder).with_name(quote(reader, safe=""))
        return replace(self, folder=str(folder), tables_wanted=wanted)

    def progress(self, offset: Offset) -> list[TableProgress]:
        return [
            TableProgress(
                upstream_id, entry.phase, end_of(entry.step), entry.next, entry.chunks, entry.request, entry.copy
            )
            for upstream_id, entry in PollOffset.from_json(offset).tables.items()
        ]

    def status(self) -> dict[str, Any]:
        return {"gear": "polling"}
