"""The rows of a changelog's files: the columns of a table as they are after a change, and `_tailrace_*` columns."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tailrace.model.change import EXACT, UNCHANGED, Changes, Op, op_names, pack_unchanged, position_texts
from tailrace.model.schema import TableSchema

OP = "_tailrace_op"
POSITION = "_tailrace_position"
COMMITTED_AT = "_tailrace_committed_at"
TXN = "_tailrace_txn"
COMMIT = "_tailrace_commit"
"""The number of a change's transaction in its batch, from 1; 0 for a copied row."""
ORDER = "_tailrace_order"
"""The place of a change among all of its batch, those of other tables included."""
COMMIT_BITS = 24
BEFORE = "_tailrace_before"


def file_schema(table: TableSchema) -> pa.Schema:
    """The columns of a table's files at one version."""
    return pa.schema(
        [
            *table.row_type,
            pa.field(OP, pa.string(), False),
            pa.field(POSITION, pa.string(), False),
            pa.field(COMMITTED_AT, pa.timestamp("us", "UTC")),
            pa.field(TXN, pa.int64()),
            pa.field(COMMIT, pa.int64(), False),
            pa.field(ORDER, pa.int64(), False),
            pa.field(UNCHANGED, pa.list_(pa.string())),
            pa.field(EXACT, pa.string()),
            pa.field(BEFORE, table.row_type),
        ]
    )


def rows_of(changes: Changes, commit: npt.NDArray[np.int64], order: npt.NDArray[np.int64]) -> pa.Table:
    batch = changes.batch
    return pa.table(
        [
            *changes.row.flatten(),
            op_names(changes.numpy("op")),
            position_texts(changes.numpy("commit"), changes.numpy("ordinal")),
            batch.column("committed_at"),
            batch.column("txn"),
            pa.array(commit, pa.int64()),
            pa.array(order, pa.int64()),
            changes.unchanged_names(),
            batch.column("exact"),
            batch.column("before"),
        ],
        schema=file_schema(changes.table),
    )


def encode(rows: Sequence[pa.Table]) -> memoryview:
    """The rows as a Parquet file. It also holds the Arrow types, so that every type comes back."""
    sink = io.BytesIO()
    pq.write_table(pa.concat_tables(rows), sink, compression="zstd", write_page_checksum=True)
    return sink.getbuffer()


def decode(body: bytes, table: TableSchema) -> Iterator[pa.Table]:
    """The rows of a file, some at a time. `table` is the version that it was written with."""
    with pq.ParquetFile(pa.BufferReader(body), page_checksum_verification=True) as file:
        for batch in file.iter_batches(batch_size=131_072):
            yield pa.Table.from_batches([batch]).cast(file_schema(table))


def commit_of(entry: int, commit: int = (1 << COMMIT_BITS) - 1) -> int:
    """The commit that a transaction of a batch is for those who read the changelog; by default the last possible."""
    return (entry << COMMIT_BITS) | commit


def entry_of(commit: int) -> int:
    """The inverse of `commit_of`: the number of the entry."""
    return commit >> COMMIT_BITS


def changes_of(rows: pa.Table, table: TableSchema, entry: int) -> Changes:
    """The changes that rows hold, at their places in the changelog: the first of a batch has the ordinal 1."""
    [batch] = rows.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], schema=rows.schema)]
    names = [column.name for column in table.columns]
    row = table.rows([batch.column(name) for name in names], batch.num_rows)
    ops = pa.array([op.name.lower() for op in Op])
    numbers = np.array([op.value for op in Op], np.int8)
    at = np.asarray(pc.index_in(batch.column(OP), value_set=ops).to_numpy(zero_copy_only=False))
    return Changes.build(
        table,
        row,
        op=numbers[at],
        commit=commit_of(entry, 0) + np.minimum(batch.column(COMMIT).to_numpy(), (1 << COMMIT_BITS) - 1),
        ordinal=batch.column(ORDER).to_numpy() + 1,
        txn=batch.column(TXN),
        committed_at=batch.column(COMMITTED_AT),
        unchanged=_unchanged(batch.column(UNCHANGED), names),
        exact=batch.column(EXACT),
        before=batch.column(BEFORE),
    )


def _unchanged(lists: pa.Array[Any], names: list[str]) -> pa.Array[Any]:
    mask = np.zeros((len(lists), len(names)), bool)
    if lists.null_count < len(lists):
        parents = pc.list_parent_indices(lists).to_numpy()
        at = pc.index_in(lists.flatten(), value_set=pa.array(names, pa.string())).to_numpy(zero_copy_only=False)
        mask[parents, at.astype(np.int64)] = True
    return pack_unchanged(mask)
