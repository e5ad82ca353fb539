"""WAL files as columns, and where the WAL ends.

WAL files are numbered from 1, immutable, and each holds whole write batches, so that any file ends at a commit. A new
writer begins with an empty one. Rows are in the order of `seq`, which all rows of one batch share.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from tailrace.errors import LostError
from tailrace.source.follower import Limit
from tailrace.source.slatedb.object_store import CollectedError, SlateDbDatabase, binding, in_time, run, run_steps
from tailrace.source.slatedb.offset import WalPoint
from tailrace.source.source import RESYNC

# The log as the driver sees it: where it ends, and how much of it makes a batch.


class WalLog(Protocol):
    """WAL files in place, or their kept copies."""

    def tail(self, after: int) -> int:
        """The last file there is, from `after` on. Raises CollectedError when the next one is gone."""
        ...

    def summary(self, number: int) -> FileSummary:
        """What a file holds. Raises CollectedError when it is gone."""
        ...

    def hold(self, after: int) -> None:
        """From now on keep everything after `after`, where we control that."""
        ...

    def release(self) -> None:
        """End `hold`: files may be deleted again once they are read."""
        ...

    def kept(self, after: int) -> int:
        """The last file, from `after` on, that SlateDB cannot delete before it is read."""
        ...

    def stop(self) -> None: ...


class RemoteLog:
    """WAL files read in place. The driver reads few of them: the last one of each batch."""

    def __init__(self, database: SlateDbDatabase) -> None:
        self._database = database
        self.summary = lru_cache(maxsize=256)(self._summary)

    def tail(self, after: int) -> int:
        return find_tail(self._database, after)

    def kept(self, after: int) -> int:
        return after

    def _summary(self, number: int) -> FileSummary:
        [rows] = read_files(self._database, number, number)
        return FileSummary.of(rows)

    def hold(self, after: int) -> None:
        """Does nothing: SlateDB's garbage collector cannot be held back."""

    def release(self) -> None:
        """Nothing is held."""

    def stop(self) -> None:
        """Nothing is open between calls."""


_REMEMBERED = 64
_FENCES = 16
"""How many files a batch skips at once while only empty ones were seen."""


class Measure:
    """The average size of the WAL files read so far: it decides how many make a batch."""

    def __init__(self) -> None:
        self._files = 0
        self._rows = 0
        self._bytes = 0

    def add(self, summary: FileSummary) -> None:
        if summary.rows:
            self._files += 1
            self._rows += summary.rows
            self._bytes += summary.bytes
        if self._files >= _REMEMBERED:
            # Older files count less and less.
            self._files, self._rows, self._bytes = self._files // 2, self._rows // 2, self._bytes // 2

    @property
    def is_unknown(self) -> bool:
        return self._files == 0

    @property
    def file_bytes(self) -> int:
        return max(1, self._bytes // max(1, self._files))

    def files_within(self, limit: Limit) -> int:
        """At least one: a batch must make progress."""
        if self.is_unknown:
            return _FENCES
        rows = max(1, self._rows // self._files)
        return max(1, min(limit.rows // rows, limit.bytes // self.file_bytes))


def wal_point_at(log: WalLog, measure: Measure, after: WalPoint, wal: int) -> WalPoint:
    """The position after a file. Files without rows are skipped backwards, at most to `after`."""
    for number in range(wal, after.wal, -1):
        summary = log.summary(number)
        measure.add(summary)
        if summary.rows:
            return WalPoint(wal, max(after.seq, summary.last_seq))
    return WalPoint(wal, after.seq)


class WalWitness(NamedTuple):
    """A WAL file that was read, and the checksum by which it is recognised later."""

    wal: int
    checksum: int


def find_witness(log: WalLog, upto: int) -> WalWitness | None:
    """The last file with rows, if it is among the last few: fence files all look the same."""
    for number in range(upto, max(0, upto - _FENCES), -1):
        try:
            summary = log.summary(number)
        except LostError:
            return None
        if summary.rows:
            return WalWitness(number, summary.checksum)
    return None


def require_witness(database: SlateDbDatabase, witness: WalWitness) -> None:
    """Raise LostError when another file has the number of one that was read. A file that is not there shows nothing."""
    try:
        # Reading a file past the end would wait for it.
        if find_tail(database, read_head(database).flushed) < witness.wal:
            return
        [rows] = read_files(database, witness.wal, witness.wal)
    except CollectedError:
        return
    if FileSummary.of(rows).checksum != witness.checksum:
        raise LostError(
            f"WAL file {witness.wal} is not the one that was read: the database was put back to an earlier copy, or it"
            " is another one",
            fix=RESYNC,
        )


def oldest_at(log: WalLog, after: int, upto: int) -> int | None:
    """When the first row after `after` was written, in milliseconds; None when there is none, or it is gone.

    Fence files hold no time, and are skipped.
    """
    for number in range(after + 1, min(upto, after + _FENCES) + 1):
        try:
            created = log.summary(number).create_ts
        except CollectedError:
            return None
        if created:
            return created
    return None


def wal_point_before(log: WalLog, seq: int, near: int) -> WalPoint:
    """A position from which everything after `seq` can be read, searched backwards from the file `near`.

    Raises CollectedError when that part of the log was deleted.
    """
    lost, high, step = 0, near + 1, 1
    while high - lost > 1:
        number = max(lost + 1, high - step)
        try:
            summary = log.summary(number)
        except CollectedError:
            lost, step = number, max(1, (high - number) // 2)
            continue
        if summary.rows and summary.last_seq <= seq:
            return WalPoint(number, seq)
        high = number
        step = step * 2 if not lost else max(1, (high - lost) // 2)
    if lost:
        raise CollectedError(f"SlateDB deleted WAL file {lost}, which is still needed")
    return WalPoint(0, seq)


VALUE, TOMBSTONE, MERGE = 0, 1, 2
_SAMPLE = 8

ROWS = pa.schema(
    [
        pa.field("kind", pa.int8(), False),
        pa.field("key", pa.binary(), False),
        pa.field("value", pa.binary()),
        pa.field("seq", pa.int64(), False),
        pa.field("create_ts", pa.int64()),
        pa.field("expire_ts", pa.int64()),
    ]
)
"""Rows as SlateDB has them; times in milliseconds."""


def columns(rows: Sequence[Any], *, is_log: bool = True) -> pa.RecordBatch:
    """SlateDB's row objects as columns: those of a WAL file, or of a scan, which knows values only."""
    values = [row.value for row in rows]
    kind = np.zeros(len(rows), np.int8)
    if is_log:
        merge = binding().RowEntryKind.MERGE
        kind[[value is None for value in values]] = TOMBSTONE
        kind[[row.kind is merge for row in rows]] = MERGE
    return pa.RecordBatch.from_arrays(
        [
            pa.array(kind),
            pa.array([row.key for row in rows], pa.binary()),
            pa.array(values, pa.binary()),
            pa.array([row.seq for row in rows], pa.int64()),
            pa.array([row.create_ts for row in rows], pa.int64()),
            pa.array([row.expire_ts for row in rows], pa.int64()),
        ],
        schema=ROWS,
    )


async def _read(database: SlateDbDatabase, first: int, last: int) -> list[pa.RecordBatch]:
    iterator = await in_time(database.wal_reader().iterator(first))
    found: list[pa.RecordBatch] = []
    for number in range(first, last + 1):
        # The files existed when the range was chosen: past the end the iterator would wait forever.
        file = await in_time(iterator.next())
        if file.last_consumed_wal_file_id != number:
            raise LostError(
                f"WAL file {number} is missing; {file.last_consumed_wal_file_id} came in its place",
                fix=f"put the file back, or {RESYNC}",
            )
        found.append(columns(file.rows))
    return found


def read_files(database: SlateDbDatabase, first: int, last: int) -> list[pa.RecordBatch]:
    """The rows of the files first … last, all of which are known to exist. Raises CollectedError when one is gone."""
    return run_steps(_read(database, first, last), "reading WAL files")


def find_tail(database: SlateDbDatabase, after: int) -> int:
    """The number of the last file, from `after` on. Raises CollectedError when the one after `after` is gone."""
    return int(run(database.wal_reader().last_wal_file_id(after), "looking for new WAL files"))


@dataclass(frozen=True)
class Head:
    """From the manifest: files up to `flushed` and rows up to `seq` are in the tables that checkpoints hold."""

    flushed: int
    seq: int
    writers: int


def read_head(database: SlateDbDatabase) -> Head:
    """Read the manifest. Raises LostError where there is no database."""
    manifest = run(database.manifest(), "reading the manifest")
    if manifest is None:
        raise LostError(
            f"there is no SlateDB database at {database.path!r} in the {database.store.type} store",
            fix="let its writer create it, or check `path` and `store`",
        )
    return Head(manifest.replay_after_wal_id, manifest.last_l0_seq, manifest.writer_epoch)


@dataclass(frozen=True)
class FileSummary:
    """What planning needs of a WAL file; `last_seq` and `create_ts` are 0 for a fence file.

    `checksum` is that of its first and last rows: it tells the file from another one with the same number.
    """

    rows: int
    bytes: int
    last_seq: int
    create_ts: int
    checksum: int = 0

    @classmethod
    def of(cls, rows: pa.RecordBatch) -> FileSummary:
        if not rows.num_rows:
            return cls(0, 0, 0, 0)
        created = rows.column("create_ts")[0].as_py()
        # Of values, not of Arrow's buffers, which may differ between two reads of the same rows.
        some = [rows.num_rows, rows.slice(0, _SAMPLE).to_pydict(), rows.slice(max(0, len(rows) - _SAMPLE)).to_pydict()]
        checksum = zlib.crc32(repr(some).encode())
        return cls(rows.num_rows, rows.nbytes, rows.column("seq")[-1].as_py(), created or 0, checksum)
