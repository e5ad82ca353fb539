"""Blocks, the rows that cross Spark. Each refers to many changes and contains none of them.

A block names the place where the changes of some tables are read (the journal keeps the bytes), is the receipt of
copied rows that are staged at the destination, or carries the error that stopped a table.
docs/decisions/0004-references.md explains why.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Generic, TypeVar

import pyarrow as pa
from pyspark import cloudpickle

from tailrace.destination import Staged
from tailrace.errors import TableError, revive
from tailrace.model.schema import TableSchema
from tailrace.source.split import Split

# Something that travels pickled and is opened where it is used.

T = TypeVar("T")


@dataclass(frozen=True)
class Pickled(Generic[T]):
    """A value on its way to a task. Processes that only pass it on need not import its modules, which would take more
    time and memory than the rest of their work."""

    content: bytes

    @classmethod
    def of(cls, value: T) -> Pickled[T]:
        return cls(cloudpickle.dumps(value))  # type: ignore[no-untyped-call]

    def open(self) -> T:
        """Unpickle the value; each call returns a new copy."""
        value: T = pickle.loads(self.content)  # noqa: S301 - sealed by the same pipeline
        return value


# In the order in which a table's rows must be processed.
ERROR, STAGED, LOG = 0, 1, 2

LAYOUT = pa.schema(
    [
        ("lane", pa.int32()),
        ("table", pa.string()),
        ("kind", pa.int32()),
        ("first", pa.string()),
        ("payload", pa.binary()),
    ]
)
SCHEMA = "lane INT, table STRING, kind INT, first STRING, payload BINARY"


@dataclass(frozen=True)
class CopyReceipt:
    """Copied rows of a table, staged at the destination, and whether their batch starts or completes its copy."""

    table: TableSchema
    staged: Staged
    starts: bool
    completes: bool


@dataclass(frozen=True)
class BlockRow:
    """One row on the executor that applies it. `payload` stays in Spark's buffer until it is decoded."""

    table: str
    kind: int
    first: str
    payload: pa.Buffer

    def log(self) -> Split:
        """Where the changes of some tables are to be read."""
        split = pickle.loads(self.payload)  # noqa: S301 - written by `log_row` in the same job
        assert isinstance(split, Split)
        return split

    def receipt(self) -> CopyReceipt:
        """The receipt of a copied chunk."""
        raw = json.loads(self.payload.to_pybytes())
        table, staged = TableSchema.from_json(raw["table"]), Staged(**raw["staged"])
        return CopyReceipt(table, staged, raw["starts"], raw["completes"])

    def error(self) -> tuple[str, TableError]:
        """The error that stopped the copy of a table, and the table's upstream id."""
        raw = json.loads(self.payload.to_pybytes())
        found = revive(raw["error"])
        assert isinstance(found, TableError)
        return raw["upstream_id"], found


def log_row(split: Split, number: int, lane: int) -> pa.RecordBatch:
    """A split by reference: the bytes stay in the journal until the lane that applies them reads them there."""
    return _row(lane, "", LOG, f"{number:08}", pickle.dumps(split))


def staged_row(receipt: CopyReceipt, lane: int) -> pa.RecordBatch:
    raw = {
        "table": receipt.table.to_json(),
        "staged": asdict(receipt.staged),
        "starts": receipt.starts,
        "completes": receipt.completes,
    }
    return _row(lane, str(receipt.table.table), STAGED, "", json.dumps(raw).encode())


def error_row(table: TableSchema, error: TableError, lane: int) -> pa.RecordBatch:
    raw = {"upstream_id": table.upstream_id, "error": error.describe()}
    return _row(lane, str(table.table), ERROR, "", json.dumps(raw).encode())


def _row(lane: int, table: str, kind: int, first: str, payload: bytes) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [
            pa.array([lane], pa.int32()),
            pa.array([table], pa.string()),
            pa.array([kind], pa.int32()),
            pa.array([first], pa.string()),
            pa.array([payload], pa.binary()),
        ],
        schema=LAYOUT,
    )


def rows_of(batch: pa.RecordBatch) -> Iterator[BlockRow]:
    """The rows of a batch as Spark hands it to a task, payloads not copied."""
    tables: Sequence[str] = batch.column("table").to_pylist()
    kinds: Sequence[int] = batch.column("kind").to_pylist()
    firsts: Sequence[str] = batch.column("first").to_pylist()
    payloads = batch.column("payload")
    for index, (table, kind, first) in enumerate(zip(tables, kinds, firsts, strict=True)):
        yield BlockRow(table, kind, first, payloads[index].as_buffer())


def unfit_value(error: pa.ArrowException, table: str) -> TableError:
    """What stops a table whose values cannot be converted. The message of Arrow is left out: it may quote values."""
    return TableError(
        f"a value of this table could not be converted ({type(error).__name__})",
        table=table,
        fix=f"tailrace resync FILE {table}",
    )
