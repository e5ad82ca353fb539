"""The columns of an Iceberg table: the upstream's, in types that Iceberg has, and tailrace's own.

Arrow type                         kept as
integers of up to 32 bits          int
unsigned 32, 64 bit                long, decimal(20,0)
half float                         float
time                               time, in microseconds
duration                           long, in the duration's unit
decimal of more than 38 digits     string
timestamp of any unit              microseconds, with or without a zone
fixed-size binary                  binary
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.schema import Schema
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
    TimeType,
)

from tailrace.destination.metadata import metadata_fields, metadata_values
from tailrace.destination.preflight import LEAVE_OUT
from tailrace.destination.replica.arrow_table import OWN
from tailrace.destination.replica.plan import ColumnRules, ReplicaPlan
from tailrace.destination.replica.sql_name import quote
from tailrace.errors import UnfitError
from tailrace.model.change import EXACT, Changes
from tailrace.model.collapse import Marks, origins
from tailrace.model.schema import Column, TableSchema

FIELD_ID = b"PARQUET:field_id"

_ICEBERG: Mapping[pa.DataType, IcebergType] = {
    pa.bool_(): BooleanType(),
    pa.int32(): IntegerType(),
    pa.int64(): LongType(),
    pa.float32(): FloatType(),
    pa.float64(): DoubleType(),
    pa.string(): StringType(),
    pa.binary(): BinaryType(),
    pa.date32(): DateType(),
    pa.time64("us"): TimeType(),
    pa.timestamp("us"): TimestampType(),
    pa.timestamp("us", "UTC"): TimestamptzType(),
}
_KEPT: Mapping[pa.DataType, pa.DataType] = {
    pa.int8(): pa.int32(),
    pa.int16(): pa.int32(),
    pa.uint8(): pa.int32(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.null(): pa.string(),
    pa.date64(): pa.date32(),
}


def kept_type(kind: pa.DataType) -> pa.DataType:
    """The type that a column is kept as. Raises TypeError where Iceberg has none."""
    if kind in _ICEBERG:
        return kind
    if kind in _KEPT:
        return _KEPT[kind]
    if isinstance(kind, pa.BaseExtensionType):
        return kept_type(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return kept_type(kind.value_type)
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    if pa.types.is_time(kind):
        return pa.time64("us")
    if pa.types.is_duration(kind):
        return pa.int64()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if pa.types.is_decimal(kind):
        return pa.decimal128(kind.precision, kind.scale) if kind.precision <= 38 and kind.scale >= 0 else pa.string()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(kept_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, kept_type(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(kept_type(kind.key_type), kept_type(kind.item_type))
    raise TypeError(f"Iceberg has no type for {kind}")


def encode(values: Any, kind: pa.DataType, column: str, table: str) -> Any:
    """Values as the kept type `kind`; never alters one silently."""
    if values.type == kind:
        return values
    try:
        return pc.cast(values, kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        # Without the cause: its message may quote values.
        raise UnfitError(
            f"a value of column {column} does not fit the Iceberg type that keeps it ({kind})",
            table=table,
            fix=f"cast the column upstream, or {LEAVE_OUT}",
        ) from None


def _is_promoted(old: pa.DataType, new: pa.DataType) -> bool:
    """Whether readers of Iceberg take values of the old type for those of the new one, without any rewrite."""
    if pa.types.is_decimal(old) and pa.types.is_decimal(new):
        return bool(old.scale == new.scale and old.precision <= new.precision)
    return (old, new) in {(pa.int32(), pa.int64()), (pa.float32(), pa.float64())}


def _conversion(old: Column, new: Column) -> str:
    """For `ColumnRules`: whether values stay as they are; the text of any other conversion means nothing here."""
    return "{}" if old.type == new.type or _is_promoted(old.type, new.type) else "CAST({})"


RULES = ColumnRules("the Iceberg table", kept_type, _conversion, lambda name: name.lower())


# -- columns as fields ---------------------------------------------------------------------------------------


def iceberg_type(kind: pa.DataType, next_id: Callable[[], int]) -> IcebergType:
    """The Iceberg type of a kept type, with new ids for what is nested in it."""
    if kind in _ICEBERG:
        return _ICEBERG[kind]
    if pa.types.is_decimal(kind):
        return DecimalType(kind.precision, kind.scale)
    if pa.types.is_list(kind):
        element = next_id()
        return ListType(element, iceberg_type(kind.value_type, next_id), element_required=False)
    if pa.types.is_map(kind):
        key, value = next_id(), next_id()
        kinds = [iceberg_type(each, next_id) for each in (kind.key_type, kind.item_type)]
        return MapType(key, kinds[0], value, kinds[1], value_required=False)
    numbers = [next_id() for _ in kind]
    fields = [
        NestedField(number, field.name, iceberg_type(field.type, next_id), required=False)
        for number, field in zip(numbers, kind, strict=True)
    ]
    return StructType(*fields)


def arrow_schema(schema: Schema, types: Mapping[str, pa.DataType]) -> pa.Schema:
    """The columns of a data file, with the ids by which readers find them."""
    # Other programs may have added columns, which are null in our rows.
    return pa.schema([_field(field, types[field.name]) for field in schema.fields if field.name in types])


def _field(field: NestedField, kind: pa.DataType, *, nullable: bool = True) -> pa.Field[Any]:
    metadata = {FIELD_ID: str(field.field_id).encode()}
    return pa.field(field.name, _with_ids(field.field_type, kind), nullable, metadata=metadata)


def _with_ids(field: IcebergType, kind: pa.DataType) -> pa.DataType:
    if isinstance(field, ListType):
        return pa.list_(_field(field.element_field, kind.value_type))
    if isinstance(field, MapType):
        return pa.map_(
            _field(field.key_field, kind.key_type, nullable=False), _field(field.value_field, kind.item_type)
        )
    if isinstance(field, StructType):
        return pa.struct([_field(each, kind.field(each.name).type) for each in field.fields])
    return kind


# -- the columns of one table ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class IcebergLayout:
    """How one table is kept: the version it has after the batch, and the columns that are added for people."""

    table: TableSchema
    metadata: bool
    keeps_deleted: bool

    @property
    def own(self) -> list[str]:
        """Tailrace's columns that every row has. The one for unfit values comes with the first of them."""
        fields = metadata_fields(keyed=bool(self.table.key), wanted=self.metadata, keeps_deleted=self.keeps_deleted)
        return [field.name for field in fields]


@dataclass(frozen=True)
class TableColumns:
    """The columns that an Iceberg table has: those of the upstream, dropped ones included, and tailrace's own.

    kept      the upstream's columns in their kept types, under the names that they have in `schema`
    schema    all columns with their ids
    """

    kept: TableSchema
    schema: Schema

    @property
    def own(self) -> list[str]:
        return [name for name in OWN if name in self.schema.column_names]

    @property
    def types(self) -> dict[str, pa.DataType]:
        return {column.name: column.type for column in self.kept.columns} | {name: OWN[name] for name in self.own}

    def ids(self, names: Iterable[str]) -> list[int]:
        found = {field.name: field.field_id for field in self.schema.fields}
        return [found[name] for name in names]

    def arrow(self) -> pa.Schema:
        return arrow_schema(self.schema, self.types)

    def kinds(self, names: Iterable[str]) -> pa.Schema:
        """Some of the columns as plain Arrow fields."""
        types = self.types
        return pa.schema([(name, types[name]) for name in names])


@dataclass(frozen=True)
class IcebergEvolution:
    """The way from some columns to others.

    columns    those afterwards
    changes    whether they differ
    sources    for columns whose values must be written again: the id of each new column, and the old one's or None
    initial    what rows hold in such columns that are new
    renamed    the old name of each column that is still there, and the new one
    """

    columns: TableColumns
    changes: bool
    sources: Mapping[int, int | None]
    initial: Mapping[int, pa.Scalar[Any]]
    renamed: Mapping[str, str]

    @property
    def rewrites(self) -> bool:
        """Whether the rows must be written again, because readers would not find the new columns in them."""
        return bool(self.sources)


class _Numbers:
    def __init__(self, last: int) -> None:
        self.last = last

    def __call__(self) -> int:
        self.last += 1
        return self.last


def new_columns(layout: IcebergLayout, *, exact: bool, last_id: int = 0) -> TableColumns:
    """The columns of a table without rows."""
    kept = RULES.as_kept(layout.table)
    names = [*layout.own, *([EXACT] if exact else [])]
    types = [*((column.name, column.type) for column in kept.columns), *((name, OWN[name]) for name in names)]
    number = _Numbers(last_id)
    ids = [number() for _ in types]
    fields = [
        NestedField(field_id, name, iceberg_type(kind, number), required=False)
        for field_id, (name, kind) in zip(ids, types, strict=True)
    ]
    return TableColumns(kept, Schema(*fields))


def evolve(now: TableColumns, layout: IcebergLayout, last_id: int, *, exact: bool) -> IcebergEvolution:
    """From a table's columns to those of a layout. Raises SchemaChangedError where that is impossible."""
    plan = RULES.plan(now.kept, layout.table)
    before = {field.name: field for field in now.schema.fields}
    number = _Numbers(last_id)
    sources: dict[int, int | None] = {}
    initial: dict[int, pa.Scalar[Any]] = {}
    fields: list[NestedField] = []
    for column in plan.kept.columns:
        name, conversion = plan.sources.get(column.name, (None, ""))
        old = before[name] if name is not None else None
        if old is not None and conversion == quote(old.name):
            kind = old.field_type
            if now.kept.column(old.name).type != column.type:
                kind = iceberg_type(column.type, number)
            fields.append(NestedField(old.field_id, column.name, kind, required=False))
            continue
        made = number()
        fields.append(NestedField(made, column.name, iceberg_type(column.type, number), required=False))
        if old is not None:
            sources[made] = old.field_id
        elif column.name in plan.initial and plan.initial[column.name].is_valid:
            sources[made] = None
            initial[made] = _initial(plan, column)
    own = [name for name in OWN if name in now.own or name in layout.own or (exact and name == EXACT)]
    fields += [
        before[name] if name in before else NestedField(number(), name, _ICEBERG[OWN[name]], required=False)
        for name in own
    ]
    fields += _foreign(now)
    renamed = plan.renamed
    if EXACT in now.own and _renames(now.kept, renamed):
        # Its texts name columns.
        sources.setdefault(before[EXACT].field_id, before[EXACT].field_id)
    columns = TableColumns(plan.kept, Schema(*fields))
    changes = plan.changes(now.kept) or columns.schema.as_struct() != now.schema.as_struct()
    return IcebergEvolution(columns, changes, sources, initial, renamed)


def replace_columns(now: TableColumns, layout: IcebergLayout, last_id: int, *, exact: bool) -> IcebergEvolution:
    """To the columns of a layout alone, for rows that replace all others. A column that is still the same keeps its
    id."""
    kept, number = RULES.as_kept(layout.table), _Numbers(last_id)
    before = {field.name: field for field in now.schema.fields}
    found = origins(*([(each.name, each.number) for each in table.columns] for table in (now.kept, kept)))
    fields: list[NestedField] = []
    for column, at in zip(kept.columns, found, strict=True):
        old = now.kept.columns[at] if at is not None else None
        if old is not None and old.type == column.type:
            fields.append(NestedField(before[old.name].field_id, column.name, before[old.name].field_type))
        else:
            fields.append(NestedField(number(), column.name, iceberg_type(column.type, number), required=False))
    for name in [*layout.own, *([EXACT] if exact else [])]:
        fields.append(before.get(name) or NestedField(number(), name, _ICEBERG[OWN[name]], required=False))
    fields += _foreign(now)
    columns = TableColumns(kept, Schema(*fields))
    return IcebergEvolution(columns, columns != now, {}, {}, {})


def _foreign(now: TableColumns) -> list[NestedField]:
    """Columns that another program added."""
    types = now.types
    return [field for field in now.schema.fields if field.name not in types]


def _renames(kept: TableSchema, renamed: Mapping[str, str]) -> bool:
    return any(renamed.get(column.name) != column.name for column in kept.columns)


def _initial(plan: ReplicaPlan, column: Column) -> pa.Scalar[Any]:
    value = plan.initial[column.name]
    values = encode(pa.array([value], value.type), column.type, column.name, str(plan.kept.table))
    found: pa.Scalar[Any] = values[0]
    return found


def rows_of(
    columns: TableColumns, layout: IcebergLayout, values: Sequence[Any], marks: Marks, now: pa.TimestampScalar
) -> pa.Table:
    """Rows ready for a data file: `values` are the columns of the layout's table, in its order."""
    table, types = layout.table, columns.types
    found: dict[str, Any] = {
        column.name: encode(each, types[column.name], column.name, str(table.table))
        for column, each in zip(table.columns, values, strict=True)
    }
    found |= dict(zip(layout.own, metadata_values(layout.own, marks, now), strict=True))
    if EXACT in types:
        found[EXACT] = marks.exact
    count = len(marks)
    arrays = [found[name] if name in found else pa.nulls(count, kind) for name, kind in types.items()]
    return pa.table(arrays, schema=pa.schema(list(types.items())))


def change_rows(columns: TableColumns, layout: IcebergLayout, changes: Changes, now: pa.TimestampScalar) -> pa.Table:
    """The changes themselves as rows, uncollapsed."""
    return rows_of(columns, layout, changes.row.flatten(), Marks.of(changes), now)
