# ruff: noqa: S608 - every name in the SQL here is quoted
"""Merge a tape into a database that has rows of its own: the tape's rows win, by key, and all others stay."""

from __future__ import annotations

import sqlite3
from typing import Any

from tailrace.capture.change import CapturedChange, Delete, Insert, RecordRow, Schema, Update
from tailrace.capture.layout import TableShape, quoted
from tailrace.capture.replay import TapeReplay, bind
from tailrace.capture.schema_change import SQL, column_names
from tailrace.errors import PreflightError, SchemaChangedError, TableError


class MergeReplay(TapeReplay):
    """Runs operations as `TapeReplay` does, on a database in any state. A repeat changes nothing.

    A row is found by its primary key, or by its rowid if the table declares none. An insert or update writes the row,
    whether it exists or not; a delete of a missing row is done already, and so is DDL whose result exists. Raises
    TableError if a row violates a constraint, SchemaChangedError if a table has other columns.
    """

    def replay(self, change: CapturedChange) -> None:
        operation = change.into_apply()
        match operation:
            case Insert(table, rowid, row):
                self._upsert(self._shape(table, row), rowid, row)
            case Update(table, rowid, row, changed):
                self._merge_update(self._shape(table, row), rowid, change.row("before"), row, changed)
            case Delete(table, rowid):
                shape, old = self._shape(table, ()), change.row("before")
                if old is None and _key(shape) and not _is_rowid(shape):
                    raise PreflightError(
                        "the tape does not hold the key of a row that was deleted",
                        fix="capture in mode full or before",
                        table=table,
                        position=str(change.change_id),
                    )
                self._delete(shape, rowid, old)
            case Schema(before, after, statement):
                if not self._is_done(before, after):
                    super().run(Schema(before, after, statement))
                self._shapes.clear()

    def _upsert(self, shape: TableShape, rowid: int, row: RecordRow) -> None:
        names = [quoted(field.name) for field in shape.fields[: len(row)]]
        holders, values = bind(row)
        sets = ", ".join(f"{name} = {holder}" for name, holder in zip(names, holders, strict=True))
        where, found = _identity(shape, rowid, row)
        if self._write(shape.table, f"UPDATE {quoted(shape.table)} SET {sets} WHERE {where}", [*values, *found]):
            return
        if not _has_key(shape, row):
            self._make_room(shape, rowid)
            names, holders, values = [shape.rowid, *names], ["?", *holders], [rowid, *values]
        into = f"INSERT INTO {quoted(shape.table)} ({', '.join(names)}) VALUES ({', '.join(holders)})"
        self._write(shape.table, into, values)

    def _merge_update(
        self,
        shape: TableShape,
        rowid: int,
        old: RecordRow | None,
        row: RecordRow,
        changed: tuple[bool, ...] | None,
    ) -> None:
        was = _identity(shape, rowid, row if old is None else old)
        if was != _identity(shape, rowid, row):
            # The new key may be that of another row here, which the tape's row takes the place of.
            self._delete(shape, rowid, old)
            self._upsert(shape, rowid, row)
            return
        chosen = [place for place in range(len(row)) if changed is None or changed[place]]
        if not chosen:
            return
        holders, values = bind(tuple(row[place] for place in chosen))
        sets = ", ".join(
            f"{quoted(shape.fields[place].name)} = {holder}" for place, holder in zip(chosen, holders, strict=True)
        )
        where, found = was
        if not self._write(shape.table, f"UPDATE {quoted(shape.table)} SET {sets} WHERE {where}", [*values, *found]):
            self._upsert(shape, rowid, row)

    def _make_room(self, shape: TableShape, rowid: int) -> None:
        """Give another rowid to a row that is found by its key, and replace one that is found by its rowid."""
        table, key = quoted(shape.table), [quoted(shape.fields[place].name) for place in _key(shape)]
        if key:
            keyed = " AND ".join(f"{name} IS NOT NULL" for name in key)
            moved = f"UPDATE {table} SET {shape.rowid} = (SELECT max({shape.rowid}) + 1 FROM {table})"
            self._write(shape.table, f"{moved} WHERE {shape.rowid} = ? AND {keyed}", [rowid])
            self._write(shape.table, f"DELETE FROM {table} WHERE {shape.rowid} = ?", [rowid])

    def _delete(self, shape: TableShape, rowid: int, old: RecordRow | None) -> None:
        where, found = _identity(shape, rowid, old)
        self._write(shape.table, f"DELETE FROM {quoted(shape.table)} WHERE {where}", found)

    def _write(self, table: str, sql: str, values: list[Any]) -> int:
        try:
            return self._connection.execute(sql, values).rowcount
        except sqlite3.IntegrityError:
            raise TableError(
                "a row of the tape cannot be written: it violates a constraint of this database",
                fix="delete or change the row of this database that is in its way, and run the command again",
                table=table,
            ) from None

    def _is_done(self, before: RecordRow | None, after: RecordRow | None) -> bool:
        """Whether this database has the result of a schema change. Raises SchemaChangedError if it cannot be had."""
        if after is None or after[0] == "trigger":
            return False
        now = self._sql_of(after)
        if after[0] != "table":
            return now is not None and (before is None or now == after[SQL])
        wanted = column_names(str(after[SQL]))
        columns = [] if now is None else column_names(now)
        if columns[: len(wanted)] == wanted:
            return True
        if before is None and now is None:
            return False
        had = None if before is None else self._sql_of(before)
        if before is None or had is None or column_names(had) != column_names(str(before[SQL])):
            raise SchemaChangedError(
                f"the columns of {after[1]!s} in this database are not those of the tape",
                fix="rename the table in this database, or give it the columns of the tape, in the same order",
                table=str(after[1]),
            )
        return False

    def _sql_of(self, entry: RecordRow) -> str | None:
        sql = "SELECT sql FROM sqlite_schema WHERE type = ? AND name = ?"
        row = self._connection.execute(sql, (entry[0], entry[1])).fetchone()
        return None if row is None else str(row[0])


def _key(shape: TableShape) -> list[int]:
    """The places of the key's columns, in the key's order."""
    places = [place for place, field in enumerate(shape.fields) if field.key]
    return sorted(places, key=lambda place: shape.fields[place].key)


def _is_rowid(shape: TableShape) -> bool:
    key = _key(shape)
    return len(key) == 1 and shape.fields[key[0]].declared.upper() == "INTEGER"


def _has_key(shape: TableShape, row: RecordRow) -> bool:
    """Whether the row has a key and no null in it, which SQLite allows, and which makes no two rows the same."""
    key = _key(shape)
    return bool(key) and all(place < len(row) and row[place] is not None for place in key)


def _identity(shape: TableShape, rowid: int, row: RecordRow | None) -> tuple[str, list[Any]]:
    """The condition that finds a row by its key, and the values to bind. A row without a key, or with nulls in it, is
    found by its rowid as well."""
    key = [place for place in _key(shape) if row is not None and place < len(row)]
    holders, values = bind(tuple(row[place] for place in key)) if row is not None else ([], [])
    terms = [f"{quoted(shape.fields[place].name)} IS {held}" for place, held in zip(key, holders, strict=True)]
    if row is None or not _has_key(shape, row):
        terms, values = [*terms, f"{shape.rowid} = ?"], [*values, rowid]
    return " AND ".join(terms), values
