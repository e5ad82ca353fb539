"""WAL files as columns, and where the WAL ends.

WAL files are numbered from 1, immutable, and each holds whole write batches, so that any file ends at a commit. A new
writer begins with an empty one. Rows are in the order of `seq`, which all rows of one batch share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.errors import LostError
from tailrace.source.slatedb.store import SlateDbDatabase, binding, in_time, run, run_steps

VALUE, TOMBSTONE, MERGE = 0, 1, 2

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
        # The files were there when the range was chosen: past the end the iterator would wait for ever.
        file = await in_time(iterator.next())
        if file.last_consumed_wal_file_id != number:
            raise LostError(
                f"WAL file {number} is missing; {file.last_consumed_wal_file_id} came in its place",
                fix="put the file back, or tailrace resync FILE every table",
            )
        found.append(columns(file.rows))
    return found


def read_files(database: SlateDbDatabase, first: int, last: int) -> list[pa.RecordBatch]:
    """The rows of the files first … last, all of which were seen. Raises CollectedError when one is gone."""
    return run_steps(_read(database, first, last), "reading WAL files")


def find_tail(database: SlateDbDatabase, after: int) -> int:
    """The number of the last file, from `after` on. Raises CollectedError when the one behind `after` is gone."""
    return int(run(database.wal_reader().last_wal_file_id(after), "looking for new WAL files"))


@dataclass(frozen=True)
class Head:
    """What the manifest says: files up to `flushed` and rows up to `seq` are in the tables that checkpoints hold."""

    flushed: int
    seq: int
    writers: int


def read_head(database: SlateDbDatabase) -> Head:
    """Raises LostError where there is no database."""
    manifest = run(database.manifest(), "reading the manifest")
    if manifest is None:
        raise LostError(
            f"there is no SlateDB database at {database.path!r} in the {database.store.type} store",
            fix="let its writer create it, or look at `path` and `store`",
        )
    return Head(manifest.replay_after_wal_id, manifest.last_l0_seq, manifest.writer_epoch)


@dataclass(frozen=True)
class FileSummary:
    """What planning needs to know of a WAL file; `last_seq` and `create_ts` are 0 for a fence file."""

    rows: int
    bytes: int
    last_seq: int
    create_ts: int

    @classmethod
    def of(cls, rows: pa.RecordBatch) -> FileSummary:
        if not rows.num_rows:
            return cls(0, 0, 0, 0)
        created = rows.column("create_ts")[0].as_py()
        return cls(rows.num_rows, rows.nbytes, rows.column("seq")[-1].as_py(), created or 0)
