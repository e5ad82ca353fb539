"""Compare the lake with the source by `EXCEPT ALL` in both directions, executed by PostgreSQL itself.

The lake's rows are loaded into a temporary table on the source, printed there by the same output functions as the
source's own rows, and compared as text. So every type is compared by value, and independently of how tailrace reads
types.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from psycopg import sql

from tailrace.destination.delta.log import DeltaSnapshot
from tailrace.destination.delta.place import place_of
from tailrace.destination.delta.reader import scan
from tailrace.destination.metadata import DELETED_AT, OP, POSITION
from tailrace.model.change import EXACT
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.source.postgres.bulk import bulk

KEYS_SHOWN = 10

_LAKE = "tailrace_lake"
_DAY_US = 86_400_000_000


@dataclass(frozen=True)
class Difference:
    """One table that differs. `missing` rows are only in the source, `extra` rows only in the lake.

    `keys` are some of the keys of those rows, as text; empty for a table without a key.
    """

    table: TableName
    source_rows: int
    lake_rows: int
    missing: int
    extra: int
    keys: tuple[tuple[str, ...], ...] = ()

    def __str__(self) -> str:
        shown = ", ".join("(" + ", ".join(key) + ")" for key in self.keys)
        return (
            f"{self.table}: {self.source_rows:,} rows in the source, {self.lake_rows:,} in the lake;"
            f" {self.missing:,} only in the source, {self.extra:,} only in the lake"
            + (f"; keys {shown}" if shown else "")
        )


def compare(dsn: str, tables: Iterable[TableSchema], lake: str | Path) -> list[Difference]:
    """The tables that differ; empty if the lake is right. Neither side may be written to in the meantime.

    A table without a key is a log in the lake: its inserts minus its deletes are compared. Rows that are kept but
    marked as deleted do not count. Raises the drivers' errors when one of the two cannot be read.
    """
    found = (_compare_table(dsn, table, str(lake)) for table in tables)
    return [difference for difference in found if difference is not None]


def count_lake(table: TableSchema, lake: str | Path) -> int:
    """How many rows of any kind a table has in the lake now; 0 if there is no such table."""
    snapshot = DeltaSnapshot.load(place_of(str(lake), table.table, {}), str(table.table))
    return sum(file.alive for file in snapshot.files()) if snapshot is not None else 0


def _compare_table(dsn: str, table: TableSchema, lake: str) -> Difference | None:
    with bulk(dsn, f"comparing {table.table}") as connection, connection.cursor() as cursor:
        cursor.ingest(_LAKE, _lake_rows(table, lake))

        def ask(query: sql.Composed) -> list[tuple[Any, ...]]:
            cursor.execute(query.as_string())
            rows: list[tuple[Any, ...]] = cursor.fetchall()
            return rows

        source, kept = _source_query(table), _lake_query(table)
        source_rows = ask(sql.SQL("SELECT count(*) FROM ({}) s").format(source))[0][0]
        lake_rows = ask(_count_query(table))[0][0]
        missing = sql.SQL("SELECT * FROM ({} EXCEPT ALL {}) d").format(source, kept)
        extra = sql.SQL("SELECT * FROM ({} EXCEPT ALL {}) d").format(kept, source)
        only_source, only_lake = (
            ask(sql.SQL("SELECT count(*) FROM ({}) c").format(query))[0][0] for query in (missing, extra)
        )
        if source_rows == lake_rows and not only_source and not only_lake:
            return None
        keys: list[tuple[str, ...]] = []
        if table.key:
            names = sql.SQL(", ").join(sql.Identifier(name) for name in table.key)
            query = sql.SQL(
                "SELECT DISTINCT {names} FROM ({missing} UNION ALL {extra}) k ORDER BY {names} LIMIT {limit}"
            )
            keys = ask(query.format(names=names, missing=missing, extra=extra, limit=sql.Literal(KEYS_SHOWN)))
        return Difference(table.table, source_rows, lake_rows, only_source, only_lake, tuple(keys))


# -- the source ---------------------------------------------------------------------------------------------


def _source_query(table: TableSchema) -> sql.Composed:
    columns = sql.SQL(", ").join(
        sql.SQL("{} AS {}").format(_printed(sql.Identifier(column.name)), sql.Identifier(column.name))
        for column in table.columns
    )
    return sql.SQL("(SELECT {} FROM {})").format(columns, sql.Identifier(table.table.schema, table.table.name))


def _printed(value: sql.Composable) -> sql.Composed:
    # IS DISTINCT FROM, because a composite of nulls is not itself null.
    return sql.SQL("CASE WHEN {0} IS DISTINCT FROM NULL THEN pg_catalog.format('%s', {0}) END").format(value)


# -- the lake -----------------------------------------------------------------------------------------------


def _lake_query(table: TableSchema) -> sql.Composed:
    columns = sql.SQL(", ").join(
        sql.SQL("coalesce({}, exact::jsonb ->> {}) AS {}").format(
            _lake_value(index, column), sql.Literal(column.name), sql.Identifier(column.name)
        )
        for index, column in enumerate(table.columns)
    )
    rows = sql.SQL("SELECT {} FROM pg_temp.{}").format(columns, sql.Identifier(_LAKE))
    if table.key:
        return sql.SQL("({})").format(rows)
    since = _since_truncate()
    query = "({rows} WHERE op IN ('read', 'insert') AND {since} EXCEPT ALL {rows} WHERE op = 'delete' AND {since})"
    return sql.SQL(query).format(rows=rows, since=since)


def _count_query(table: TableSchema) -> sql.Composed:
    if table.key:
        return sql.SQL("SELECT count(*) FROM pg_temp.{}").format(sql.Identifier(_LAKE))
    # EXCEPT ALL does not notice a delete without a matching row, but this sum does.
    worth = "CASE op WHEN 'delete' THEN -1 WHEN 'truncate' THEN 0 ELSE 1 END"
    query = f"SELECT coalesce(sum({worth}), 0)::int8 FROM pg_temp.{{}} WHERE {{}}"
    return sql.SQL(query).format(sql.Identifier(_LAKE), _since_truncate())


def _since_truncate() -> sql.Composed:
    query = "at > coalesce((SELECT max(at) FROM pg_temp.{} WHERE op = 'truncate'), '')"
    return sql.SQL(query).format(sql.Identifier(_LAKE))


def _lake_value(index: int, column: Column) -> sql.Composable:
    """SQL for the text that Postgres prints for a column of the temporary table, filled with values of `_carried`."""
    value, kind = sql.Identifier(f"c{index}"), column.type
    if pa.types.is_string(kind):
        return value
    if pa.types.is_list(kind):
        if pa.types.is_temporal(kind.value_type):
            element = _moment(sql.SQL("v"), kind.value_type)
            array = "ARRAY(SELECT {1} FROM unnest({0}::int8[]) WITH ORDINALITY u(v, n) ORDER BY n)"
            return _printed(sql.SQL(f"CASE WHEN {{0}} IS NOT NULL THEN {array} END").format(value, element))
        return _printed(_as_declared(value, column))
    if pa.types.is_temporal(kind):
        return _printed(_moment(value, kind))
    return _printed(_as_declared(value, column)) if pa.types.is_decimal(kind) else _printed(value)


def _as_declared(value: sql.Composable, column: Column) -> sql.Composed:
    # The declared type comes from the catalog, so it is valid SQL as it is.
    return sql.SQL("{}::" + column.upstream_type).format(value)


def _moment(value: sql.Composable, kind: pa.DataType) -> sql.Composed:
    if pa.types.is_date(kind):
        return sql.SQL("(date '1970-01-01' + {}::int4)").format(value)
    # Add days and microseconds separately: Postgres would compute one large interval of microseconds as a float.
    text = (
        "(timestamp '1970-01-01' + make_interval(days => ({0} / {1})::int4) + ({0} % {1}) * interval '1 microsecond')"
    )
    local = sql.SQL(text).format(value, sql.Literal(_DAY_US))
    return sql.SQL("({} AT TIME ZONE 'UTC')").format(local) if kind.tz else local


def _lake_rows(table: TableSchema, lake: str) -> pa.RecordBatchReader:
    handle = DeltaTable(place_of(lake, table.table, {}).uri)
    layout = pa.schema(
        [
            *(pa.field(f"c{index}", _carried_type(column.type)) for index, column in enumerate(table.columns)),
            ("op", pa.string()),
            ("at", pa.string()),
            ("exact", pa.string()),
        ]
    )

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in scan(handle):
            alive = batch
            if DELETED_AT in batch.schema.names:
                alive = batch.filter(pc.is_null(batch.column(DELETED_AT)))
            if alive.num_rows:
                yield _carry(alive, table.columns, layout)

    return pa.RecordBatchReader.from_batches(layout, batches())


def _carry(batch: pa.RecordBatch, columns: Sequence[Column], layout: pa.Schema) -> pa.RecordBatch:
    arrays = [_carried(batch.column(column.name)) for column in columns]
    for name in (OP, POSITION, EXACT):
        known = name in batch.schema.names
        arrays.append(batch.column(name) if known else pa.nulls(batch.num_rows, pa.string()))
    return pa.RecordBatch.from_arrays(arrays, schema=layout)


def _carried_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.int64()
    if pa.types.is_date(kind):
        return pa.int32()
    return pa.string() if pa.types.is_decimal(kind) or pa.types.is_list(kind) else kind


def _carried(values: pa.Array[Any]) -> pa.Array[Any]:
    """Values in a type that can be sent to Postgres without loss: times as integers, decimals and arrays as text."""
    kind = values.type
    if pa.types.is_list(kind):
        return _array_text(values)
    if pa.types.is_timestamp(kind):
        return values.cast(pa.timestamp("us", kind.tz)).view(pa.int64())
    if pa.types.is_date(kind):
        return values.view(pa.int32())
    return values.cast(pa.string()) if pa.types.is_decimal(kind) else values


def _array_text(lists: pa.Array[Any]) -> pa.Array[Any]:
    """Lists as Postgres array literals, with every element quoted."""
    elements = _carried(pc.list_flatten(lists))
    if pa.types.is_binary(elements.type):
        texts = pa.array([None if each is None else "\\x" + each.hex() for each in elements.to_pylist()], pa.string())
    else:
        texts = elements.cast(pa.string())
    escaped = pc.replace_substring(pc.replace_substring(texts, "\\", "\\\\"), '"', '\\"')
    quoted = pc.fill_null(pc.binary_join_element_wise('"', escaped, '"', ""), "NULL")
    lengths = pc.fill_null(pc.list_value_length(lists), 0)
    bounds = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths).cast(pa.int32())])
    joined = pc.binary_join(pa.ListArray.from_arrays(bounds, quoted), ",")
    return pc.if_else(lists.is_valid(), pc.binary_join_element_wise("{", joined, "}", ""), None)
