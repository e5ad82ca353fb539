"""A batch in parts that fit into memory together with what is made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import pyarrow as pa

from tailrace.model.change import Changes, Op, Position
from tailrace.model.collapse import fit, slim
from tailrace.model.schema import TableSchema

PART_BYTES = 64 << 20
"""How much of a batch is collapsed and written at a time. Most batches are smaller; a huge transaction is not."""

ROW_BYTES = 8 << 10
"""The assumed size of a row whose change left values out: upstreams leave out only large values."""


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
    """The changes, as those of `table`, in pieces that fit into memory together with what is built from them.

    A table with a key is written once for every piece, so what it does not need is left out before sizes are counted. A
    row whose change left values out counts with the size of the row at the destination that has them: `row_bytes` on
    average, computed only when it is needed.
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
    """How many changes lack values that only the earlier row has. With `keep_deleted` a delete is such a change."""
    left_out: int = len(chunk) - chunk.batch.column("unchanged").null_count
    return left_out + (int((chunk.numpy("op") == Op.DELETE).sum()) if keep_deleted else 0)


def belong_together(before: Changes, after: Changes) -> bool:
    """Whether a cut here splits a changed key: its delete, and the insert that needs values of the deleted row."""
    last = before.last
    if before.batch.column("op")[-1].as_py() != Op.DELETE or after.batch.column("op")[0].as_py() != Op.INSERT:
        return False
    return after.first == Position(last.commit, last.ordinal + 1)


def whole(changes: Iterable[Changes], *, least_bytes: int = 0) -> Iterator[Changes]:
    """The chunks, with the two halves of a changed key in the same one, and those smaller than `least_bytes` joined."""
    held: list[Changes] = []
    size = 0
    for chunk in changes:
        if not len(chunk):
            continue
        if held and size >= least_bytes and not belong_together(held[-1], chunk):
            yield _joined(held)
            held, size = [], 0
        held.append(chunk)
        size += chunk.batch.nbytes
    if held:
        yield _joined(held)


def _joined(chunks: list[Changes]) -> Changes:
    if len(chunks) == 1:
        return chunks[0]
    both = pa.Table.from_batches([chunk.batch for chunk in chunks]).combine_chunks().to_batches()
    return Changes(chunks[0].table, both[0])
