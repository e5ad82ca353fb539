"""The columns of a Delta table: the upstream's, in types that Delta has, and tailrace's own.

Arrow type                         kept as
time                               string, `HH:MM:SS.ffffff`
duration                           long, in the duration's unit
unsigned 8, 16, 32, 64 bit         short, int, long, decimal(20,0)
half float                         float
decimal of more than 38 digits     string
timestamp of any unit              microseconds; without a zone as timestampNtz
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.destination.metadata import metadata_fields, metadata_values
from tailrace.destination.preflight import LEAVE_OUT
from tailrace.errors import UnfitError
from tailrace.model.change import EXACT, UNCHANGED, Changes, Op
from tailrace.model.collapse import Marks
from tailrace.model.schema import TableSchema

NUMBER = b"tailrace.number"
"""Field metadata: the upstream's number of the column, by which a renamed column is recognized."""


def number_of(field: pa.Field[Any]) -> int:
    """The upstream's number of a Delta table's column; 0 when it has none."""
    return int(field.metadata[NUMBER]) if field.metadata and NUMBER in field.metadata else 0


def delta_type(kind: pa.DataType) -> pa.DataType:
    """The type a column has in Delta files. Raises TypeError where Delta has none."""
    plain: dict[pa.DataType, pa.DataType] = {
        pa.uint8(): pa.int16(),
        pa.uint16(): pa.int32(),
        pa.uint32(): pa.int64(),
        pa.uint64(): pa.decimal128(20, 0),
        pa.float16(): pa.float32(),
        pa.null(): pa.string(),
        pa.date64(): pa.date32(),
    }
    if isinstance(kind, pa.BaseExtensionType):
        return delta_type(kind.storage_type)
    if kind in plain:
        return plain[kind]
    if pa.types.is_dictionary(kind):
        return delta_type(kind.value_type)
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind) or pa.types.is_time(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    if pa.types.is_duration(kind):
        return pa.int64()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if pa.types.is_decimal(kind):
        return pa.decimal128(kind.precision, kind.scale) if kind.precision <= 38 and kind.scale >= 0 else pa.string()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(delta_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, delta_type(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(delta_type(kind.key_type), delta_type(kind.item_type))
    is_plain = pa.types.is_primitive(kind) or pa.types.is_string(kind) or pa.types.is_binary(kind)
    if not is_plain or pa.types.is_interval(kind):
        raise TypeError(f"Delta has no type for {kind}")
    return kind


def to_delta(values: Any, kind: pa.DataType, column: str, table: str) -> Any:
    """Cast an array or chunked array to the type Delta keeps it in; never alters a value silently."""
    if values.type == kind:
        return values
    try:
        return pc.cast(values, kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise UnfitError(
            f"a value of column {column} does not fit the Delta type {kind}",
            table=table,
            fix=f"cast the column upstream, or {LEAVE_OUT}",
        ) from error


@dataclass(frozen=True)
class DeltaLayout:
    """How one table is kept. `exact` adds the column for values that their own column cannot hold.

    `history` keeps a row for each change: the Delta table then has no key, even if the upstream's has one.
    """

    table: TableSchema
    metadata: bool
    keeps_deleted: bool
    partition_by: tuple[str, ...] = ()
    exact: bool = False
    history: bool = False

    @property
    def keyed(self) -> bool:
        return bool(self.table.key)

    @property
    def key_types(self) -> dict[str, pa.DataType]:
        """The types of the key's columns, in their order."""
        return {name: delta_type(self.table.column(name).type) for name in self.table.key}

    @cached_property
    def schema(self) -> pa.Schema:
        """All columns, the partition's included."""
        fields = [
            pa.field(
                column.name,
                delta_type(column.type),
                metadata={NUMBER: str(column.number).encode()} if column.number else None,
            )
            for column in self.table.columns
        ]
        fields += metadata_fields(
            keyed=self.keyed, wanted=self.metadata or self.history, keeps_deleted=self.keeps_deleted
        )
        if self.history:
            fields.append(pa.field(UNCHANGED, pa.list_(pa.string())))
        if self.exact:
            fields.append(pa.field(EXACT, pa.string()))
        return pa.schema(fields)

    def rows(
        self, columns: Sequence[Any], marks: Marks, now: pa.TimestampScalar, unchanged: pa.Array[Any] | None = None
    ) -> pa.Table:
        """Rows ready for a file: the upstream's columns (in `table` order) and tailrace's own from the marks."""
        arrays: list[Any] = [
            to_delta(values, delta_type(column.type), column.name, str(self.table.table))
            for column, values in zip(self.table.columns, columns, strict=True)
        ]
        if self.history:
            marks = replace(marks, committed_at=_times(marks, now))
        special = {UNCHANGED: unchanged, EXACT: marks.exact}
        own = [field.name for field in list(self.schema)[len(arrays) :]]
        arrays += metadata_values([name for name in own if name not in special], marks, now)
        arrays += [special[name] for name in own if name in special]
        return pa.table(arrays, schema=self.schema)

    def rows_of(self, changes: Changes, now: pa.TimestampScalar) -> pa.Table:
        """The changes themselves as rows, uncollapsed."""
        unchanged = changes.unchanged_names() if self.history else None
        return self.rows(changes.row.flatten(), Marks.of(changes), now, unchanged)


def _times(marks: Marks, now: pa.TimestampScalar) -> pa.ChunkedArray[Any]:
    """When the changes of a history were committed; the current time where the source gives none."""
    return pc.if_else(pa.array(marks.op == Op.READ), marks.committed_at, pc.fill_null(marks.committed_at, now))
