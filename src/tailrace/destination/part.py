"""What destinations that keep tables have in common: tailrace's own columns, and batches taken in parts."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pyarrow as pa

from tailrace.destination import Batch
from tailrace.errors import TableError, UnavailableError
from tailrace.model.change import Changes, Op, Position
from tailrace.model.collapse import fit, slim
from tailrace.model.schema import TableName, TableSchema

POSITION = "_tailrace_position"
OP = "_tailrace_op"
COMMITTED_AT = "_tailrace_committed_at"
DELETED_AT = "_tailrace_deleted_at"

LEAVE_OUT = "let the source leave it out (column list of a publication, `columns` of a polled table)"
"""The second half of a fix for a column that cannot be kept: `tables.exclude` knows tables only."""

METADATA = {
    "position": pa.field(POSITION, pa.string()),
    "op": pa.field(OP, pa.string()),
    "committed_at": pa.field(COMMITTED_AT, pa.timestamp("us", "UTC")),
}


@dataclass(frozen=True)
class ChangePart:
    """Some changes of a batch, in order, and whether no others come after them."""

    chunks: list[Changes]
    is_last: bool


def parts(
    changes: Iterable[Changes],
    table: TableSchema,
    part_bytes: int,
    *,
    row_bytes: Callable[[], int],
    keep_deleted: bool = False,
) -> Iterator[ChangePart]:
    """The changes, as those of `table`, in pieces that fit into memory together with what is made of them.

    A table with a key is written once for every piece, so what it does not need is left out before it is weighed. A row
    whose change left values out is weighed with the row at the destination that has them: `row_bytes` on the average,
    asked for when it is needed.
    """
    mean = cache(row_bytes)
    part: list[Changes] = []
    size = 0
    for chunk in changes:
        if not len(chunk):
            continue
        chunk = slim(fit(chunk, table)) if table.key else fit(chunk, table)
        partial = _partial(chunk, keep_deleted) if table.key else 0
        weight = chunk.batch.nbytes + (partial * mean() if partial else 0)
        slices = max(1, math.ceil(weight / part_bytes)) if partial else 1
        step = math.ceil(len(chunk) / slices)
        for start in range(0, len(chunk), step):
            piece = Changes(table, chunk.batch.slice(start, step))
            if size >= part_bytes and not belong_together(part[-1], piece):
                yield ChangePart(part, is_last=False)
                part, size = [], 0
            part.append(piece)
            size += weight * len(piece) // len(chunk)
    if part:
        yield ChangePart(part, is_last=True)


def _partial(chunk: Changes, keep_deleted: bool) -> int:
    """How many changes lack values that only the row of before has. With `keep_deleted` a delete is such a change."""
    left_out: int = len(chunk) - chunk.batch.column("unchanged").null_count
    return left_out + (int((chunk.numpy("op") == Op.DELETE).sum()) if keep_deleted else 0)


def belong_together(before: Changes, after: Changes) -> bool:
    """Whether a changed key lies between them: its delete, and the insert that needs values of the deleted row."""
    last = before.last
    if before.batch.column("op")[-1].as_py() != Op.DELETE or after.batch.column("op")[0].as_py() != Op.INSERT:
        return False
    return after.first == Position(last.commit, last.ordinal + 1)


def require_unwritten(table: TableSchema, batch: Batch, place: str, *, root: Path | None = None) -> None:
    """Raises TableError when a table that is not at the destination should be: its disk may just not be mounted.

    UnavailableError where not even the folder of all tables, `root`, is there.
    """
    if table.upstream_id in batch.written:
        if root is not None and not root.is_dir():
            raise UnavailableError(f"{root} is not there", table=str(table.table), fix="put it back; it is tried again")
        raise TableError(
            f"the table was written before and is no longer in {place}",
            table=str(table.table),
            fix=f"put it back, then tailrace retry FILE {table.table}; or tailrace resync FILE {table.table}",
        )


def early_changes_error(table: TableName) -> TableError:
    """Changes came while the rows they change are still out of sight: a fault in the source."""
    return TableError(
        "changes came with copied rows that cannot be shown before their copy is complete",
        table=str(table),
        fix=f"tailrace resync FILE {table}",
    )


def now() -> pa.TimestampScalar:
    return pa.scalar(datetime.datetime.now(datetime.UTC), pa.timestamp("us", "UTC"))
