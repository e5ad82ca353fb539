"""`ParquetDestination`: every change of every table, in Parquet files with a log of batches."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tailrace.changelog import row
from tailrace.changelog.entry import ChangeFile, ChangelogEntry, ChangelogLog
from tailrace.changelog.folder import open_folder
from tailrace.destination import (
    Batch,
    BeginEvent,
    Committer,
    CopyBeginEvent,
    CopyMode,
    Event,
    EventDestination,
    RelationEvent,
    Written,
)
from tailrace.destination.parquet.option import ParquetOptions
from tailrace.destination.preflight import as_errors, check_folder, column_problems
from tailrace.errors import Finding, OwnedError
from tailrace.model.change import Changes, Op, Position
from tailrace.model.last_batch import LastBatch
from tailrace.model.schema import TableSchema
from tailrace.system import failpoint
from tailrace.system.object_store import probe_conditional_put

_FILE_ROWS = 1 << 20


class ParquetDestination(ParquetOptions, EventDestination):
    """A changelog. All tables of a batch are written by one task and show together, with the entry of the batch."""

    type: Literal["parquet"] = "parquet"
    copy_mode: ClassVar[CopyMode] = "stream"

    @property
    def name(self) -> str:
        return f"parquet {self.path}"

    def shared_folders(self) -> dict[str, Path]:
        return {} if self._is_remote else {"destination.path": Path(self.path.removeprefix("file://"))}

    def check(self, tables: Sequence[TableSchema] | None) -> list[Finding]:
        if self._is_remote:
            place = probe_conditional_put(self.path, self._options)
        else:
            place = check_folder(Path(self.path.removeprefix("file://")).absolute(), self.path)
        return [place, *(finding for table in tables or () for finding in self.check_columns(table))]

    def check_columns(self, table: TableSchema) -> list[Finding]:
        problems = column_problems(
            table,
            _kept_type,
            lambda name: name.startswith("_tailrace_"),
            str.lower,
            "which many readers do not tell apart",
        )
        return as_errors(table, problems)

    def write_events(self, events: Iterator[Event], batch: Batch) -> Written:
        log = self._log
        number = log.last()
        held = _held(log, batch.pipeline)
        if batch.is_repeat(held):
            return Written(repeated=True, last=held)
        writer = _EntryWriter(log, number + 1, by_day=self.partition_by == "day")
        written = Written()
        for event in events:
            if isinstance(event, BeginEvent):
                writer.commit += 1
            elif isinstance(event, CopyBeginEvent):
                writer.begins.append(str(event.table.table))
            elif isinstance(event, RelationEvent):
                writer.relation(event.table)
            elif isinstance(event, Changes):
                writer.add(event)
                count = int((event.numpy("op") != Op.READ).sum())
                written += Written(changes=count, upserts=count)
        writer.flush()
        if not writer.files and not writer.begins:
            return written
        failpoint.reach("parquet.before_commit")
        entry = writer.entry(batch)
        try:
            log.add(entry)
        except FileExistsError:
            if log.entry(entry.number).to_json() != entry.to_json():
                raise OwnedError(
                    f"another runner wrote entry {entry.number} of {self.path}",
                    fix="stop the other runner of this pipeline, or give one of them another path",
                ) from None
        failpoint.reach("parquet.committed")
        return Written(written.changes, written.upserts, last=batch.last)

    @contextmanager
    def committer(self, pipeline: str) -> Iterator[ParquetCommitter]:
        yield ParquetCommitter(self._log)

    @property
    def _is_remote(self) -> bool:
        return "://" in self.path and not self.path.startswith("file://")

    @property
    def _options(self) -> dict[str, str]:
        return {name: value.reveal() for name, value in self.storage_options.items()}

    @property
    def _log(self) -> ChangelogLog:
        return _opened(self.path, tuple(sorted(self._options.items())))


@lru_cache(maxsize=16)
def _opened(path: str, options: tuple[tuple[str, str], ...]) -> ChangelogLog:
    """One per process, which remembers how far the log goes."""
    return ChangelogLog(open_folder(path, dict(options)))


def _held(log: ChangelogLog, pipeline: str) -> LastBatch | None:
    """The last batch of the pipeline, if it wrote the last entry."""
    last = log.entry(number) if (number := log.last()) else None
    return LastBatch.parse(last.mark) if last is not None and last.pipeline == pipeline else None


class ParquetCommitter(Committer):
    """The driver's part: it compares the changelog with the state."""

    def __init__(self, log: ChangelogLog) -> None:
        self._log = log

    def require_fit(self, batch: Batch) -> None:
        batch.is_repeat(_held(self._log, batch.pipeline))

    def last_batch(self, pipeline: str) -> LastBatch | None:
        return _held(self._log, pipeline)


def _kept_type(kind: pa.DataType) -> pa.DataType:
    """The type itself. Raises TypeError where Parquet has no place for it."""
    try:
        pq.write_table(pa.schema([("c", kind)]).empty_table(), io.BytesIO())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise TypeError(f"Parquet has no type for {kind}") from error
    return kind


@dataclass
class _Run:
    """Changes of one table at one version."""

    table: TableSchema
    version: int
    parts: list[Changes] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    """Of each part, its transaction's number in the batch, and the place of its first change."""
    rows: int = 0


@dataclass
class _EntryWriter:
    """Writes the files of one entry. A repeat of the batch writes the same files under the same names."""

    log: ChangelogLog
    number: int
    by_day: bool
    files: list[ChangeFile] = field(default_factory=list)
    begins: list[str] = field(default_factory=list)
    runs: dict[str, _Run] = field(default_factory=dict)
    order: int = 0
    commit: int = 0
    first: Position | None = None
    last: Position | None = None
    last_at: datetime | None = None
    count: int = 0

    def relation(self, table: TableSchema) -> None:
        name = str(table.table)
        if name in self.runs and self.runs[name].table != table:
            self._write(self.runs.pop(name))
        if name not in self.runs:
            self.runs[name] = _Run(table, self.log.version_for(table, self.number))

    def add(self, changes: Changes) -> None:
        run = self.runs[str(changes.table.table)]
        is_copy = _is_copy(changes)
        if run.parts and (run.rows >= _FILE_ROWS or _is_copy(run.parts[0]) != is_copy):
            self._write(run)
        run.parts.append(changes)
        run.places.append((0 if is_copy else self.commit, self.order))
        run.rows += len(changes)
        self.order += len(changes)
        if not is_copy:
            self.first = min(self.first or changes.first, changes.first)
            self.last = max(self.last or changes.last, changes.last)
            at = pc.max(changes.batch.column("committed_at")).as_py()
            self.last_at = max(filter(None, (self.last_at, at)), default=None)

    def flush(self) -> None:
        for run in self.runs.values():
            self._write(run)

    def entry(self, batch: Batch) -> ChangelogEntry:
        now = datetime.now(UTC)
        return ChangelogEntry(
            self.number,
            batch.pipeline,
            batch.mark,
            now.isoformat(),
            (self.last_at or now).isoformat(),
            self.files,
            self.begins,
            None if self.first is None else str(self.first),
            None if self.last is None else str(self.last),
        )

    def _write(self, run: _Run) -> None:
        if not run.parts:
            return
        sizes = [len(one) for one in run.parts]
        commit = np.repeat([commit for commit, _ in run.places], sizes)
        order = np.concatenate([start + np.arange(size) for (_, start), size in zip(run.places, sizes, strict=True)])
        whole = pa.Table.from_batches([one.batch for one in run.parts]).combine_chunks().to_batches()[0]
        kind: Literal["copy", "log"] = "copy" if _is_copy(run.parts[0]) else "log"
        rows = row.rows_of(Changes(run.table, whole), commit, order)
        for day, part in self._days(rows):
            self._put(run, day, part, kind)
        run.parts, run.places, run.rows = [], [], 0

    def _days(self, rows: pa.Table) -> Iterable[tuple[str, pa.Table]]:
        if not self.by_day:
            return [("", rows)]
        days = pc.strftime(rows.column(row.COMMITTED_AT).cast(pa.timestamp("s", "UTC"), safe=False), "%Y-%m-%d")
        found: Mapping[Any, Any] = {day: pc.equal(days, day) for day in pc.unique(days).drop_null().to_pylist()}
        parts = [(f"day={day}/", rows.filter(mask)) for day, mask in sorted(found.items())]
        # What the upstream gives no time for stands where Hive puts rows without a value.
        unknown = rows.filter(pc.is_null(days))
        return [*parts, *([("day=__HIVE_DEFAULT_PARTITION__/", unknown)] if unknown.num_rows else [])]

    def _put(self, run: _Run, day: str, rows: pa.Table, kind: Literal["copy", "log"]) -> None:
        folder = "/".join(quote(part, safe="") for part in (run.table.table.schema, run.table.table.name))
        path = f"{_visible(folder)}/{day}{self.number:020}-{self.count:04}.parquet"
        self.count += 1
        self.log.folder.put(path, row.encode([rows]))
        self.files.append(ChangeFile(path, str(run.table.table), run.version, rows.num_rows, kind))


def _visible(folder: str) -> str:
    """Readers skip folders that begin with an underscore or a dot, and `..` is another folder."""
    return "/".join(f"%{ord(part[0]):02X}{part[1:]}" if part[0] in "_." else part for part in folder.split("/"))


def _is_copy(changes: Changes) -> bool:
    return bool(changes.batch.column("op")[0].as_py() == Op.READ)
