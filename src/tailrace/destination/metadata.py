"""The `_tailrace_*` columns of a row: where it comes from."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.model.change import Op, op_names, position_texts
from tailrace.model.collapse import Marks
from tailrace.model.schema import TableSchema

POSITION = "_tailrace_position"
OP = "_tailrace_op"
COMMITTED_AT = "_tailrace_committed_at"
DELETED_AT = "_tailrace_deleted_at"

METADATA = {
    "position": pa.field(POSITION, pa.string()),
    "op": pa.field(OP, pa.string()),
    "committed_at": pa.field(COMMITTED_AT, pa.timestamp("us", "UTC")),
}


def metadata_fields(*, keyed: bool, wanted: bool, keeps_deleted: bool) -> list[pa.Field[Any]]:
    """The columns that every row of a table has in addition to the upstream's.

    Rows of a table without a key are its changes, so they always have their position and operation.
    """
    fields = [field for name, field in METADATA.items() if wanted or (not keyed and name != "committed_at")]
    if keyed and keeps_deleted:
        fields.append(pa.field(DELETED_AT, METADATA["committed_at"].type))
    return fields


def row_schema(table: TableSchema) -> pa.Schema:
    """The columns of a table's rows: the upstream's, and the position and operation where the table has no key."""
    return pa.schema([*table.arrow, *metadata_fields(keyed=bool(table.key), wanted=False, keeps_deleted=False)])


def metadata_values(names: Iterable[str], marks: Marks, now: pa.TimestampScalar) -> list[Any]:
    """The values of some of these columns. A deleted row has a time in any case: `now`, where the change has none."""
    values: dict[str, Callable[[], Any]] = {
        POSITION: lambda: position_texts(marks.commit, marks.ordinal),
        OP: lambda: op_names(marks.op),
        COMMITTED_AT: lambda: marks.committed_at,
        DELETED_AT: lambda: pc.if_else(pa.array(marks.op == Op.DELETE), pc.fill_null(marks.committed_at, now), None),
    }
    return [values[name]() for name in names]


def truncate_values(marks: Marks, now: pa.TimestampScalar) -> dict[str, pa.Scalar[Any]]:
    """What rows that a truncate deleted hold in these columns, where a table keeps its deleted rows."""
    at = marks.committed_at[0]
    return {
        DELETED_AT: at if at.is_valid else now,
        OP: op_names(marks.op)[0],
        POSITION: position_texts(marks.commit, marks.ordinal)[0],
        COMMITTED_AT: at,
    }


def now() -> pa.TimestampScalar:
    return pa.scalar(datetime.datetime.now(datetime.UTC), pa.timestamp("us", "UTC"))
