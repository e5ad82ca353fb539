"""Values that a database has no value for: null in their column, and exact text with their row."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.errors import UnfitError
from tailrace.model.schema import TableName, TableSchema
from tailrace.model.value_text import text_of


@dataclass(frozen=True)
class UnheldMask:
    """Which values of a column, and the text of each."""

    at: npt.NDArray[np.bool_]
    texts: list[str]


Ranges = Mapping[pa.DataType, tuple[int, int]]
"""The first and last day or microsecond that a database has, for types of which it does not have all values."""


def out_of_range(values: Any, ranges: Ranges) -> UnheldMask | None:
    """Where dates or timestamps are that a database does not have; None when nowhere."""
    if (limits := ranges.get(values.type)) is None or not len(values):
        return None
    numbers = values.cast(pa.int32() if pa.types.is_date(values.type) else pa.int64())
    found = pc.min_max(numbers)
    low, high = found["min"].as_py(), found["max"].as_py()
    if low is None or (limits[0] <= low and high <= limits[1]):
        return None
    out = pc.fill_null(pc.or_(pc.less(numbers, limits[0]), pc.greater(numbers, limits[1])), False)
    return UnheldMask(np.asarray(out.to_pylist(), bool), each_chunk(values.filter(out), text_of).to_pylist())


def each_chunk(values: Any, function: Callable[[pa.Array[Any]], pa.Array[Any]]) -> Any:
    """The texts that a function makes of an array or chunked array."""
    if isinstance(values, pa.ChunkedArray):
        return pa.chunked_array(map(function, values.chunks), pa.string())
    return function(values)


def note_unheld(values: Any, mask: UnheldMask, exact: Any, column: str, table: TableSchema) -> tuple[Any, Any]:
    """The column with nulls in place of these values, and the unfit values of each row with their texts.

    Raises UnfitError for a column of the key, by which rows are found.
    """
    if column in table.key:
        raise UnfitError(
            f"key column {column} holds a value by which the destination finds no row again",
            table=str(table.table),
            fix=f"give the table a key without such values upstream, then tailrace resync FILE {table.table}",
        )
    noted: list[str | None] = exact.to_pylist()
    # Such values are rare: row by row is fine here.
    for row, text in zip(np.flatnonzero(mask.at), mask.texts, strict=True):
        noted[row] = json.dumps({**json.loads(noted[row] or "{}"), column: text}, ensure_ascii=False)
    return pc.if_else(pa.array(~mask.at), values, pa.scalar(None, values.type)), pa.chunked_array(
        [pa.array(noted, pa.string())]
    )


def unfit(column: str, table: TableName) -> UnfitError:
    """The error for a value that the database has no value for, in a place where no text can stand for it."""
    return UnfitError(
        f"a value of column {column} is out of the range of the type that the destination keeps it in",
        table=str(table),
        fix=f"change the value upstream, or cast the column to text, then tailrace resync FILE {table}",
    )
