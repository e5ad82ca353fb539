"""What destinations that keep tables have in common: tailrace's own columns, and batches taken in parts."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator

import pyarrow as pa

from tailrace.change import Changes, Position
from tailrace.collapse import fit, slim
from tailrace.errors import TableError
from tailrace.schema import TableName, TableSchema

POSITION = "_tailrace_position"
OP = "_tailrace_op"
COMMITTED_AT = "_tailrace_committed_at"
DELETED_AT = "_tailrace_deleted_at"
EXACT = "_tailrace_exact"

METADATA = {
    "position": pa.field(POSITION, pa.string()),
    "op": pa.field(OP, pa.string()),
    "committed_at": pa.field(COMMITTED_AT, pa.timestamp("us", "UTC")),
}


def parts(changes: Iterable[Changes], table: TableSchema, part_bytes: int) -> Iterator[list[Changes]]:
    """The changes, as those of `table`, in pieces that fit into memory together with what is made of them.

    A table with a key is written once for every piece, so what it does not need is left out before it is weighed.
    """
    part: list[Changes] = []
    size = 0
    for chunk in changes:
        if not len(chunk):
            continue
        chunk = slim(fit(chunk, table)) if table.key else fit(chunk, table)
        if size >= part_bytes and not _belong_together(part[-1], chunk):
            yield part
            part, size = [], 0
        part.append(chunk)
        size += chunk.batch.nbytes
    if part:
        yield part


def _belong_together(before: Changes, after: Changes) -> bool:
    """Whether a changed key lies between them: its delete, and the insert that needs values of the deleted row."""
    last = before.last
    return after.first == Position(last.commit, last.ordinal + 1)


def early(table: TableName) -> TableError:
    """Changes came while the rows they change are still out of sight: a fault in the source."""
    return TableError(
        "changes came with copied rows that cannot be shown before their copy is complete",
        table=str(table),
        fix=f"tailrace resync FILE {table}",
    )


def now() -> pa.TimestampScalar:
    return pa.scalar(datetime.datetime.now(datetime.UTC), pa.timestamp("us", "UTC"))
