"""How the rows of a file are read with the columns that the table has after a schema change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.errors import SchemaChangedError
from tailrace.model.change import EXACT, UNCHANGED, name_lists
from tailrace.model.collapse import renamed_exact


@dataclass(frozen=True)
class ColumnReading:
    """How a file's columns have changed since it was written.

    table      whose file it is, for errors
    renamed    new name → the name the file has
    initial    columns the file lacks, though it may hold another one of that name, and what its rows have there
    rewrite    whether the file must be rewritten, because readers would not find the table's columns in it
    """

    table: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)
    initial: Mapping[str, pa.Scalar[Any]] = field(default_factory=dict)
    rewrite: bool = False

    def name(self, column: str) -> str | None:
        """The name in the file of a column of the table; None when the file cannot have it."""
        return None if column in self.initial else self.renamed.get(column, column)

    def read(self, rows: pa.Table, schema: pa.Schema) -> pa.Table:
        """A file's rows with exactly these columns: missing ones null or initial, others found by name and cast.

        Raises SchemaChangedError for a value that a column's type cannot hold.
        """
        names = set(rows.schema.names)
        arrays: list[Any] = []
        for column in schema:
            name = self.name(column.name)
            if name is None:
                arrays.append(pa.repeat(self.initial[column.name], rows.num_rows))
            elif name not in names:
                arrays.append(pa.nulls(rows.num_rows, column.type))
            elif name == EXACT and (self.renamed or self.initial):
                arrays.append(self._exact(rows))
            elif name == UNCHANGED and (self.renamed or self.initial):
                arrays.append(self._unchanged(rows))
            else:
                arrays.append(self._cast(rows.column(name), column))
        return pa.table(arrays, schema=schema)

    def _exact(self, rows: pa.Table) -> pa.ChunkedArray[Any]:
        """The texts of values that do not fit, which are kept under their column's name."""
        names = self._names(rows)
        return pa.chunked_array([renamed_exact(part, names) for part in rows.column(EXACT).chunks], pa.string())

    def _unchanged(self, rows: pa.Table) -> pa.ChunkedArray[Any]:
        """The names of columns that a change left out, where it still lacks them."""
        names = self._names(rows)
        old, new = pa.array(names.keys(), pa.string()), pa.array(names.values(), pa.string())
        parts: list[pa.Array[Any]] = []
        for lists in rows.column(UNCHANGED).chunks:
            at = pc.index_in(lists.flatten(), value_set=old)
            within = pc.list_parent_indices(lists).filter(at.is_valid()).to_numpy()
            parts.append(name_lists(np.bincount(within, minlength=len(lists)), new.take(at.drop_null())))
        return pa.chunked_array(parts, pa.list_(pa.string()))

    def _names(self, rows: pa.Table) -> dict[str, str]:
        """The current names of those columns of the file that the table still has."""
        new = {old: name for name, old in self.renamed.items()}
        lost = (self.initial.keys() | self.renamed.keys()) - new.keys()
        return {name: new.get(name, name) for name in rows.schema.names if name not in lost}

    def _cast(self, values: pa.ChunkedArray[Any], column: pa.Field[Any]) -> pa.ChunkedArray[Any]:
        if values.type == column.type:
            return values
        try:
            return values.cast(column.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise SchemaChangedError(
                f"a {values.type} of an older version does not fit column {column.name} of type {column.type}",
                table=self.table,
                fix=f"tailrace resync FILE {self.table}",
            ) from error


AS_IS = ColumnReading()
