# ruff: noqa: S608 - every name in the SQL here is quoted
"""`SqliteSource`: a file, the library that opens it, and the two halves that read it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import pyarrow as pa

from tailrace import errors
from tailrace.capture import tape
from tailrace.capture.layout import quoted
from tailrace.errors import Finding, TailraceError, UnavailableError
from tailrace.model.change import START, Changes
from tailrace.model.schema import TableSchema
from tailrace.model.table_rows import TableRows
from tailrace.option.table import TableOptions
from tailrace.source.follower import Offset, SchemaVersions, TableProgress
from tailrace.source.schema_log import SchemaFile
from tailrace.source.source import PIPELINE
from tailrace.source.split import Split
from tailrace.source.sqlite import preflight, schema_diff
from tailrace.source.sqlite.connection import CapturedFile, EngineName
from tailrace.source.sqlite.copy import SqliteCopySplit, fetch_rows, read_chunk
from tailrace.source.sqlite.cursor import Cursors
from tailrace.source.sqlite.follower import SqliteFollower
from tailrace.source.sqlite.log import TapeLog
from tailrace.source.sqlite.log_split import SqliteLogSplit, read_log
from tailrace.source.sqlite.offset import SqliteOffset, after_change
from tailrace.source.sqlite.option import SqliteSourceOptions, TursoOptions
from tailrace.source.sqlite.reader import read_rows
from tailrace.system.atomic_file import make_folder, remove

PURGE_SECONDS = 60.0
"""How often consumed changes are looked for."""


@dataclass(frozen=True)
class SqliteSource:
    """An SQLite or Turso file and the tables wanted of it. Frozen and picklable; nothing is kept open."""

    options: ClassVar[type[SqliteSourceOptions]] = SqliteSourceOptions

    name: str
    path: str
    folder: str
    tables_wanted: TableOptions
    library: EngineName = "sqlite"
    cdc_table: str = "turso_cdc"
    chunk_rows: int = 100_000
    purge_seconds: float | None = None
    reader: str = PIPELINE

    @classmethod
    def from_options(
        cls, options: SqliteSourceOptions | TursoOptions, *, name: str, tables: TableOptions, state_dir: Path
    ) -> SqliteSource:
        return cls(
            name=name,
            path=str(options.path),
            folder=str(state_dir / "tape"),
            tables_wanted=tables,
            library=options.type,
            cdc_table=options.cdc_table,
            chunk_rows=options.chunk_rows,
            purge_seconds=options.purge,
        )

    @property
    def engine(self) -> CapturedFile:
        return CapturedFile(self.library, self.path)

    def check(self) -> list[Finding]:
        return preflight.check(self)

    def tables(self) -> list[TableSchema]:
        with self.engine.snapshot("looking at the tables") as connection:
            log = TapeLog(connection, self.cdc_table)
            return [schema_diff.begin(None, table, START) for table in preflight.select_tables(self, log)]

    def prepare(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Nothing is made: who captures is the application's choice. Raises PreflightError if nobody does."""
        errors.require(self.check())

    def reset(self) -> None:
        """Forget the reader's cursor. The tape stays as it is. Raises UnavailableError when it cannot be removed."""
        Cursors(self.folder).forget(self.reader)
        remove(self._versions_file)

    @property
    def _versions_file(self) -> Path:
        return Path(self.folder) / f"{quote(self.reader, safe='')}.versions"

    def receiving(self) -> AbstractContextManager[object]:
        """Nothing is pushed: the tape is read where it is."""
        return nullcontext()

    def follow(self, versions: SchemaVersions | None = None) -> SqliteFollower:
        if versions is None:
            self.prepare()
            make_folder(Path(self.folder))
            versions = SchemaFile(self._versions_file)
        return SqliteFollower(self, versions)

    def read(self, split: Split) -> Iterator[Changes]:
        if isinstance(split, SqliteCopySplit):
            return read_chunk(self.engine, split)
        if isinstance(split, SqliteLogSplit):
            return read_log(self.engine, self.cdc_table, split)
        raise TypeError(f"not a split of this source: {type(split).__name__}")

    def refetch(self, table: TableSchema, keys: pa.Table) -> pa.Table:
        return fetch_rows(self.engine, table, keys)

    def read_table(self, table: TableSchema) -> TableRows:
        return TableRows(read_rows(self, table))

    def release(self, upto: Offset) -> None:
        """Note how far the reader is. With `purge`, take out what every reader has had for long enough."""
        cursors = Cursors(self.folder)
        cursors.advance(self.reader, SqliteOffset.from_json(upto).low_water.commit)
        if self.purge_seconds is None or self.reader != PIPELINE or not cursors.is_due(PURGE_SECONDS):
            return
        lowest = cursors.lowest()
        assert lowest is not None  # this reader's own at least
        try:
            self._purge(lowest, time.time() - self.purge_seconds)
        except UnavailableError:
            return  # somebody writes: it is looked at again with a later batch

    def _purge(self, upto: int, before: float) -> None:
        with self.engine.session("purging consumed changes", writes=True) as connection:
            sql = (
                f"SELECT change_id FROM {quoted(self.cdc_table)} "
                "WHERE change_id <= ? AND change_time <= ? ORDER BY change_id DESC LIMIT 1"
            )
            row = connection.execute(sql, (upto, int(before))).fetchone()
            if row is not None:
                # That row stays, and with it the number that the next change gets.
                tape.purge(connection, int(row[0]), self.cdc_table)

    def for_reader(self, reader: str, table: str | None = None) -> SqliteSource:
        wanted = self.tables_wanted if table is None else self.tables_wanted.only(table)
        return replace(self, reader=reader, tables_wanted=wanted)

    def progress(self, offset: Offset) -> list[TableProgress]:
        return SqliteOffset.from_json(offset).progress()

    def status(self) -> dict[str, Any]:
        try:
            with self.engine.snapshot("asking how far the tape is") as connection:
                head = TapeLog(connection, self.cdc_table).head()
        except TailraceError as error:
            return {"gear": "waiting", "error": error.message, "fix": error.fix}
        position = str(after_change(head))
        # No `server`: the distance from there is told in bytes, and a tape counts changes.
        return {"gear": "tape", "received": position, "journal_bytes": self._size()}

    def _size(self) -> int:
        """The tape lies in the file, and grows with it."""
        files = [Path(self.path), Path(f"{self.path}-wal")]
        return sum(file.stat().st_size for file in files if file.exists())
