# ruff: noqa: S608 - every name in the SQL here is quoted
"""Rows read through the API, with their storage classes.

rqlite turns columns declared as dates and booleans into other values, and writes BLOB as base64 that looks like TEXT.
So every column is selected as an expression, which has no declared type, with a letter for its storage class.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pyarrow as pa

from tailrace.capture import layout
from tailrace.capture.layout import quoted
from tailrace.model.schema import TableSchema
from tailrace.source.rqlite.api import Api, QueryRefusedError
from tailrace.source.rqlite.catalog import stored_names
from tailrace.source.rqlite.decode import read_values
from tailrace.source.sqlite.catalog import ALIAS, ROWID, rowid_column
from tailrace.source.sqlite.decode import SqliteImage

FETCH_KEYS = 200
_LARGEST = "1.7976931348623157e308"
_BLOB = "b"

QueryRow = list[Any]
"""The rowid (null where there is none), the letters of the storage classes, then the columns."""


def rowid_name(columns: Sequence[str]) -> str:
    """A name by which SQL can address the rowid of a table with these columns."""
    return layout.rowid_name(columns) or "NULL"


class Selection:
    """SELECTs of a table's stored columns. Names are qualified: SQLite reads an unknown bare name as a string."""

    def __init__(self, table: TableSchema, *, lacks_rowid: bool, columns: Sequence[str] | None = None) -> None:
        self.table = table
        self.columns = list(stored_names(table) if columns is None else columns)
        name = "NULL" if lacks_rowid else rowid_name(stored_names(table))
        self.rowid = name if name == "NULL" else f"t.{name}"
        letters = "||".join(f"substr(typeof({_name(column)}),1,1)" for column in self.columns) or "''"
        cells = ", ".join([self.rowid, letters, *(_cell(column) for column in self.columns)])
        self.sql = f"SELECT {cells} FROM {quoted(table.table.name)} AS t"

    def only(self, names: Collection[str]) -> Selection:
        """The selection of the named columns only."""
        kept = [name for name in self.columns if name in names]
        return Selection(self.table, lacks_rowid=self.rowid == "NULL", columns=kept)

    def values(self, rows: Sequence[QueryRow]) -> list[Sequence[Any]]:
        """The columns of these rows; blobs are bytes."""
        if not rows:
            return [[] for _ in self.columns]
        _, letters, *columns = zip(*rows, strict=True)
        return [_bytes(values, [each[at] for each in letters]) for at, values in enumerate(columns)]


def _name(column: str) -> str:
    return f"t.{quoted(column)}"


def _cell(column: str) -> str:
    name = _name(column)
    # JSON has no infinity: one such value would make the whole answer fail.
    real = f"CASE WHEN {name} > {_LARGEST} THEN 'inf' WHEN {name} < -{_LARGEST} THEN '-inf' ELSE {name} END"
    return f"CASE typeof({name}) WHEN 'blob' THEN hex({name}) WHEN 'real' THEN {real} ELSE {name} END"


def _bytes(values: Sequence[Any], letters: Sequence[str]) -> Sequence[Any]:
    if _BLOB in letters:
        values = [bytes.fromhex(v) if kind == _BLOB else v for v, kind in zip(values, letters, strict=True)]
    if "inf" in values or "-inf" in values:
        texts = zip(values, letters, strict=True)
        values = [float(v) if kind == "r" and isinstance(v, str) else v for v, kind in texts]
    return values


def read_image(table: TableSchema, selection: Selection, rows: Sequence[QueryRow]) -> SqliteImage:
    """The rows as the table's typed columns."""
    found = dict(zip(selection.columns, selection.values(rows), strict=True))
    rowids = pa.array([row[0] for row in rows], pa.int64())
    columns: list[pa.Array[Any]] = []
    exact: dict[str, pa.Array[Any]] = {}
    for column in table.columns:
        if column.upstream_type == ROWID:
            columns.append(rowids)
            continue
        array, unfit = read_values(column, found.get(column.name, [None] * len(rows)), encoded=False)
        columns.append(array)
        if unfit is not None:
            exact[column.name] = unfit
    return SqliteImage(columns, exact)


def fetch_by_rowid(api: Api, table: TableSchema, rowids: Sequence[int]) -> tuple[dict[int, dict[str, Any]], set[str]]:
    """The current rows by rowid, and the columns dropped since. A row that is not found is gone."""
    selection = Selection(table, lacks_rowid=False)
    found: dict[int, dict[str, Any]] = {}
    gone: set[str] = set()
    for some in _pieces(sorted(set(rowids))):
        where = f" WHERE {selection.rowid} IN ({', '.join('?' * len(some))})"
        selection, rows = _ask(api, selection, where, some)
        gone = set(stored_names(table)).difference(selection.columns)
        values = selection.values(rows)
        for at, row in enumerate(rows):
            found[row[0]] = dict.fromkeys(gone) | {
                name: column[at] for name, column in zip(selection.columns, values, strict=True)
            }
    return found, gone


def fetch_by_key(api: Api, table: TableSchema, keys: pa.Table) -> pa.Table:
    """The current rows of these keys; rows that are gone are left out. A null key finds nothing.

    A column that was dropped is null.
    """
    selection = Selection(table, lacks_rowid=lacks_rowid(table))
    is_rowid = rowid_column(table) is not None
    sought = [selection.rowid if is_rowid else _name(name) for name in table.key]
    group = f"({', '.join('?' * len(sought))})"
    batches: list[pa.RecordBatch] = []
    values = list(zip(*(keys.column(name).to_pylist() for name in table.key), strict=True))
    for some in _pieces(values):
        where = f" WHERE ({', '.join(sought)}) IN (VALUES {', '.join([group] * len(some))})"
        selection, rows = _ask(api, selection, where, [parameter(value) for key in some for value in key])
        if rows:
            batches.append(pa.RecordBatch.from_struct_array(read_image(table, selection, rows).struct(table)))
    return pa.Table.from_batches(batches, pa.schema(list(table.row_type)))


def _ask(api: Api, selection: Selection, where: str, values: Sequence[Any]) -> tuple[Selection, list[QueryRow]]:
    """Rows of the columns that the table still has, and their selection. No rows if the table is gone."""
    try:
        return selection, api.query(selection.sql + where, *values)
    except QueryRefusedError:
        names = {name for (name,) in api.query("SELECT name FROM pragma_table_info(?)", selection.table.table.name)}
    if not names:
        return selection, []
    left = selection.only(names)
    try:
        return left, api.query(left.sql + where, *values)
    except QueryRefusedError as error:
        raise api.unavailable(f"it does not give rows of {selection.table.table.name}: {error}") from None


def lacks_rowid(table: TableSchema) -> bool:
    """Whether the table's version needs no rowid, so that the table may have none."""
    return not any(column.upstream_type in (ROWID, ALIAS) for column in table.columns)


def parameter(value: Any) -> Any:
    """A value as an rqlite parameter: bytes become a list of numbers."""
    return list(value) if isinstance(value, bytes) else value


def _pieces(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(values), FETCH_KEYS):
        yield values[start : start + FETCH_KEYS]
