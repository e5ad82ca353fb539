# ruff: noqa: S608 - every name in the SQL here is quoted
"""`SqliteSource`: a file, the library that opens it, and the two halves that read it."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa

from tailrace.capture import tape
from tailrace.capture.layout import quoted, served_tape
from tailrace.errors import Finding, TailraceError, UnavailableError
from tailrace.model.change import START, Changes
from tailrace.model.schema import TableSchema
from tailrace.model.source_status import SourceStatus
from tailrace.model.table_rows import TableRows
from tailrace.source.capability import SurveyedTable
from tailrace.source.follower import Offset, SchemaVersions, TableProgress
from tailrace.source.source import Source
from tailrace.source.split import Split
from tailrace.source.sqlite import preflight, schema_diff
from tailrace.source.sqlite.connection import CapturedFile
from tailrace.source.sqlite.copy import SqliteCopySplit, fetch_rows, read_chunk
from tailrace.source.sqlite.cursor import Cursors
from tailrace.source.sqlite.follower import SqliteFollower
from tailrace.source.sqlite.log import TapeLog
from tailrace.source.sqlite.log_split import SqliteLogSplit, read_log
from tailrace.source.sqlite.offset import SqliteOffset, after_change
from tailrace.source.sqlite.option import SqliteSourceOptions, TursoOptions
from tailrace.source.sqlite.reader import read_rows
from tailrace.source.sqlite.survey import survey
from tailrace.system.atomic_file import remove

PURGE_SECONDS = 60.0
"""How often to check for changes that can be purged."""


@dataclass(frozen=True)
class SqliteSource(Source):
    """An SQLite or Turso file and the tables wanted of it. Frozen and picklable; nothing is kept open."""

    Options = SqliteSourceOptions

    options: SqliteSourceOptions | TursoOptions

    @property
    def engine(self) -> CapturedFile:
        return CapturedFile(self.options.type, str(self.path))

    @property
    def path(self) -> Path:
        """The file that is read. The tape of a file that a sync server serves is in a file next to it."""
        path = Path(self.options.path)
        tape = served_tape(path)
        return tape if self.options.type == "sqlite" and tape.exists() else path

    @property
    def folder(self) -> Path:
        """The cursors of all readers: changes that every reader has may be purged."""
        return self.context.state_dir / "tape"

    def shared_folders(self) -> dict[str, Path]:
        return {"source.path": Path(self.options.path).parent}

    @property
    def schema_file(self) -> Path:
        return self.folder / f"{quote(self.context.reader, safe='')}.versions"

    def check(self) -> list[Finding]:
        return preflight.check(self)

    def tables(self) -> list[TableSchema]:
        with self.engine.snapshot("listing the tables") as connection:
            log = TapeLog(connection, self.options.cdc_table)
            return [schema_diff.begin(None, table, START) for table in preflight.select_tables(self, log)]

    def survey(self) -> list[SurveyedTable]:
        with self.engine.snapshot("listing the tables") as connection:
            return survey(connection, self.options.cdc_table)

    def reset(self) -> None:
        """Forget the reader's cursor. The tape stays as it is. Raises UnavailableError when it cannot be removed."""
        Cursors(self.folder).forget(self.context.reader)
        remove(self.schema_file)

    def forget(self) -> None:
        self.reset()

    def readers(self) -> Collection[str]:
        return Cursors(self.folder).readers()

    def follow(self, schemas: SchemaVersions, *, is_receiving: bool = False) -> SqliteFollower:
        """Nothing is pushed: the tape is read where it is."""
        return SqliteFollower(self, schemas)

    def read(self, split: Split) -> Iterator[Changes]:
        if isinstance(split, SqliteCopySplit):
            return read_chunk(self.engine, split)
        if isinstance(split, SqliteLogSplit):
            return read_log(self.engine, self.options.cdc_table, split)
        raise TypeError(f"not a split of this source: {type(split).__name__}")

    def refetch(self, table: TableSchema, keys: pa.Table) -> pa.Table:
        return fetch_rows(self.engine, table, keys)

    def read_table(self, table: TableSchema) -> TableRows:
        return TableRows(read_rows(self, table))

    def release(self, upto: Offset) -> None:
        """Store how far the reader is. With `purge`, delete changes that every reader has had for long enough."""
        cursors = Cursors(self.folder)
        cursors.advance(self.context.reader, SqliteOffset.from_json(upto).low_water.commit)
        if self.options.purge is None or not self.context.is_pipeline or not cursors.is_due(PURGE_SECONDS):
            return
        lowest = cursors.lowest()
        assert lowest is not None  # this reader's own at least
        try:
            self._purge(lowest, time.time() - self.options.purge)
        except UnavailableError:
            return  # the file is being written: a later batch tries again

    def _purge(self, upto: int, before: float) -> None:
        with self.engine.session("purging consumed changes", writes=True) as connection:
            sql = (
                f"SELECT change_id FROM {quoted(self.options.cdc_table)} "
                "WHERE change_id <= ? AND change_time <= ? ORDER BY change_id DESC LIMIT 1"
            )
            row = connection.execute(sql, (upto, int(before))).fetchone()
            if row is not None:
                # Keep that row: it determines the number of the next change.
                tape.purge(connection, int(row[0]), self.options.cdc_table)

    def progress(self, offset: Offset) -> list[TableProgress]:
        return SqliteOffset.from_json(offset).progress()

    def status(self) -> SourceStatus:
        try:
            with self.engine.snapshot("reading the end of the tape") as connection:
                head = TapeLog(connection, self.options.cdc_table).head()
        except TailraceError as error:
            return SourceStatus("waiting", error=error.message, fix=error.fix)
        position = str(after_change(head))
        # No `server`: lag is reported in bytes, and a tape counts changes.
        return SourceStatus("tape", position, self._size())

    def _size(self) -> int:
        """The tape lies in the file, and grows with it."""
        files = [self.path, Path(f"{self.path}-wal")]
        return sum(file.stat().st_size for file in files if file.exists())
