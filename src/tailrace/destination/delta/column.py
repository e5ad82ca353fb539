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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.destination.delta import version
from tailrace.destination.delta.option import TableMode
from tailrace.destination.metadata import metadata_fields, metadata_values
from tailrace.destination.preflight import LEAVE_OUT
from tailrace.errors import UnfitError
from tailrace.model.change import EXACT, UNCHANGED, Changes, Op
from tailrace.model.collapse import Marks, origins
from tailrace.model.schema import Column, TableSchema

BEFORE = "_tailrace_before_"
"""How the columns of a changelog begin that hold the values before a change, where the upstream sends them."""

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

    A `changelog` has no key, even if the upstream's table has one; `before` adds columns for the old values. The
    table of a `history` is that of the versions of its rows.
    """

    table: TableSchema
    metadata: bool
    keeps_deleted: bool
    partition_by: tuple[str, ...] = ()
    exact: bool = False
    mode: TableMode = "current"
    before: bool = False

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
        fields = [_field(column.name, delta_type(column.type), column.number) for column in self.table.columns]
        is_changelog = self.mode == "changelog"
        fields += metadata_fields(
            keyed=self.keyed, wanted=self.metadata or is_changelog, keeps_deleted=self.keeps_deleted
        )
        if is_changelog:
            fields.append(pa.field(UNCHANGED, pa.list_(pa.string())))
        if self.exact:
            fields.append(pa.field(EXACT, pa.string()))
        if self.before:
            # Columns of their own, so that they follow a renamed or widened column as every other does.
            fields += [_field(BEFORE + one.name, delta_type(one.type), -one.number) for one in self.table.columns]
        return pa.schema(fields)

    def rows(
        self,
        columns: Sequence[Any],
        marks: Marks,
        now: pa.TimestampScalar,
        extra: Mapping[str, Any] = MappingProxyType({}),
    ) -> pa.Table:
        """Rows ready for a file: the upstream's columns (in `table` order) and tailrace's own from the marks."""
        arrays = self._values(columns)
        if self.mode == "changelog":
            marks = replace(marks, committed_at=_times(marks, now))
        special = {**extra, EXACT: marks.exact}
        own = [field.name for field in list(self.schema)[len(arrays) :]]
        known = [name for name in own if name not in special]
        special |= zip(known, metadata_values(known, marks, now), strict=True)
        return pa.table([*arrays, *(special[name] for name in own)], schema=self.schema)

    def rows_of(self, changes: Changes, now: pa.TimestampScalar) -> pa.Table:
        """The changes themselves as rows, uncollapsed; of a table with a history, copied rows as its first versions."""
        columns: list[Any] = list(changes.row.flatten())
        if self.mode == "history":
            columns += version.first_versions(changes)
        extra: dict[str, Any] = {UNCHANGED: changes.unchanged_names()} if self.mode == "changelog" else {}
        if self.before:
            names = (BEFORE + column.name for column in self.table.columns)
            extra |= zip(names, self._values(changes.batch.column("before").flatten()), strict=True)
        return self.rows(columns, Marks.of(changes), now, extra)

    def _values(self, columns: Sequence[Any]) -> list[Any]:
        return [
            to_delta(values, delta_type(column.type), column.name, str(self.table.table))
            for column, values in zip(self.table.columns, columns, strict=True)
        ]


def retaining(versions: TableSchema, found: pa.Schema) -> TableSchema:
    """The table of a history with those columns, too, that the Delta table has and the upstream dropped.

    A version that is closed keeps its values of them.
    """
    columns = versions.columns[: -len(version.COLUMNS)]
    names = {column.name.lower() for column in columns}
    matched = set(
        origins([(one.name, number_of(one)) for one in found], [(column.name, column.number) for column in columns])
    )
    dropped = [
        Column(one.name, one.type, number=number_of(one))
        for at, one in enumerate(found)
        if at not in matched and one.name.lower() not in names and not one.name.startswith("_tailrace_")
    ]
    return replace(versions, columns=(*columns, *dropped, *version.COLUMNS)) if dropped else versions


def _field(name: str, kind: pa.DataType, number: int) -> pa.Field[Any]:
    return pa.field(name, kind, metadata={NUMBER: str(number).encode()} if number else None)


def _times(marks: Marks, now: pa.TimestampScalar) -> pa.ChunkedArray[Any]:
    """When the changes of a changelog were committed; the current time where the source gives none."""
    return pc.if_else(pa.array(marks.op == Op.READ), marks.committed_at, pc.fill_null(marks.committed_at, now))
