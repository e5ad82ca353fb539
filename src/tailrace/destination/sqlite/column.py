"""The columns of a table in the file: the upstream's, and tailrace's own after them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.destination.metadata import COMMITTED_AT, DELETED_AT, OP, POSITION, metadata_fields, metadata_values
from tailrace.destination.replica.sql_name import listed, quote
from tailrace.destination.sqlite.value import declared, encode, nan_mask
from tailrace.errors import UnfitError
from tailrace.model.change import EXACT, Changes
from tailrace.model.collapse import Marks
from tailrace.model.schema import TableSchema
from tailrace.model.value_text import text_of

OWN = (POSITION, OP, COMMITTED_AT, DELETED_AT, EXACT)
ColumnValues = list[list[Any]]
"""Rows for the driver, column by column."""


def create_sql(name: str, kept: TableSchema, own: Iterable[str]) -> str:
    """The statement that makes a table with the given name, columns and key."""
    columns = [f"{quote(column.name)} {declared(column.type)}" for column in kept.columns]
    columns += [f"{quote(column)} TEXT" for column in own]
    if kept.key:
        columns.append(f"PRIMARY KEY ({listed(kept.key)})")
    return f"CREATE TABLE {quote(name)} ({', '.join(columns)})"


@dataclass(frozen=True)
class SqliteLayout:
    """How one table is kept: the version it has after the batch, and the columns that are added for people."""

    table: TableSchema
    metadata: bool
    keeps_deleted: bool

    @cached_property
    def own(self) -> tuple[str, ...]:
        """Tailrace's columns that every row has. The one for unfit values comes with the first of them."""
        fields = metadata_fields(keyed=bool(self.table.key), wanted=self.metadata, keeps_deleted=self.keeps_deleted)
        return tuple(field.name for field in fields)

    def rows(self, columns: Sequence[Any], marks: Marks, kept: TableSchema, now: pa.TimestampScalar) -> ColumnValues:
        """The upstream's columns (in `table` order), tailrace's own, and last the texts of unfit values.

        Raises UnfitError for a key by which SQLite could not find the row again.
        """
        name = str(self.table.table)
        exact: list[str | None] = marks.exact.to_pylist()
        found: ColumnValues = []
        for column, values in zip(self.table.columns, columns, strict=True):
            nan = nan_mask(values)
            if column.name in self.table.key and (nan is not None or values.null_count):
                raise _unfit_key(column.name, name)
            if nan is not None:
                note_nan(exact, nan, column.name)
            found.append(encode(values, kept.column(column.name).type, column.name, name))
        own = [as_texts(values) for values in metadata_values(self.own, marks, now)]
        return [*found, *own, exact]

    def rows_of(self, changes: Changes, kept: TableSchema, now: pa.TimestampScalar) -> ColumnValues:
        """The changes themselves as rows, uncollapsed."""
        return self.rows(changes.row.flatten(), Marks.of(changes), kept, now)


def as_texts(values: Any) -> list[Any]:
    """Values of tailrace's own columns as the file keeps them: texts and points in time."""
    texts: list[Any] = []
    for chunk in values.chunks if isinstance(values, pa.ChunkedArray) else [values]:
        texts += (text_of(chunk) if pa.types.is_timestamp(chunk.type) else chunk).to_pylist()
    return texts


def noted(text: str | None, unfit: Mapping[str, str]) -> str:
    """Add values to the unfit values of a row."""
    return json.dumps({**json.loads(text or "{}"), **unfit}, ensure_ascii=False)


def note_nan(exact: list[str | None], nan: npt.NDArray[np.bool_], column: str) -> None:
    """Put a column's NaNs among the unfit values of their rows."""
    for row in np.flatnonzero(nan):
        exact[row] = noted(exact[row], {column: "NaN"})


def _unfit_key(column: str, table: str) -> UnfitError:
    return UnfitError(
        f"key column {column} holds null or NaN, by which SQLite finds no row again",
        table=table,
        fix=f"give the table a key without such values upstream, then tailrace resync FILE {table}",
    )
