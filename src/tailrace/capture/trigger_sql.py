# ruff: noqa: S608 - every name in the SQL here is quoted
"""The SQL of the triggers that capture one table, for every writer.

A trigger writes the change to the capture table and the values to a separate image table. There they are stored
natively and therefore exactly; a text made by SQL would not be exact. REPLACE deletes rows without firing their delete
trigger (unless recursive_triggers is on). So the rows that it might delete are noted before each insert, and those that
are gone after it are recorded as deletes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from tailrace.capture.layout import (
    DELETE,
    INSERT,
    UPDATE,
    CaptureConnection,
    Mode,
    TableShape,
    literal,
    quoted,
    side_tables,
)
from tailrace.capture.schema_change import TRIGGER_PREFIX, is_own_trigger
from tailrace.errors import PreflightError

_EXPRESSION = -2
_KEPT_NOTES = 20
"""How many notes of rows being replaced to keep: more than nested statements make. Older notes are deleted, because
those of INSERT OR IGNORE are never confirmed."""
_CONSTANT = re.compile(
    r"[-+]?\s*(?:0x[\da-f]+|[\d.]+(?:e[-+]?\d+)?)|x?'(?:[^']|'')*'|true|false|current_(?:date|time|timestamp)", re.I
)
_WORD = re.compile(r'"(?:[^"]|"")*"|[^\W\d]\w*')


def make_side_tables(mode: Mode, width: int) -> Iterator[str]:
    """SQL for the image table, the table of rows being replaced and that of the schema, for up to `width` columns."""
    image, replaced, schema = map(quoted, side_tables(mode.table))
    cells = "".join(f", {cell}" for cell in _cells(2 * width))
    yield f"CREATE TABLE {image} (change_id INTEGER PRIMARY KEY, before_width INTEGER, after_width INTEGER{cells})"
    yield f"CREATE TABLE {replaced} (table_name TEXT, id INTEGER, confirmed INTEGER, width INTEGER{cells})"
    yield f"CREATE TABLE {schema} (id INTEGER PRIMARY KEY, type TEXT, name TEXT, tbl_name TEXT, rootpage INTEGER, sql)"


def make_replaced_trigger(mode: Mode, width: int) -> str:
    """SQL of the trigger that records a delete for each row that is confirmed to have been replaced."""
    body = _write(mode, DELETE, "OLD.table_name", "OLD.id", "OLD.width", [f"OLD.{cell}" for cell in _cells(width)], [])
    replaced = quoted(side_tables(mode.table)[1])
    return f"CREATE TRIGGER {_name('replaced', '')} AFTER UPDATE OF confirmed ON {replaced} BEGIN {body} END"


def make_triggers(connection: CaptureConnection, mode: Mode, shape: TableShape) -> Iterator[str]:
    """SQL of all triggers of one table. Raises PreflightError for a unique index on an expression."""
    table, name = quoted(shape.table), literal(shape.table)
    old = [f"OLD.{quoted(field.name)}" for field in shape.fields]
    new = [f"NEW.{quoted(field.name)}" for field in shape.fields]
    old_id, new_id = f"OLD.{shape.rowid}", f"NEW.{shape.rowid}"
    if _refers_to_itself(connection, shape):
        # Foreign key actions run before AFTER triggers, and may have changed this same row again.
        names = (quoted(field.name) for field in shape.fields)
        new = [f"(SELECT {column} FROM {table} WHERE {shape.rowid} = {new_id})" for column in names]
    replaced = quoted(side_tables(mode.table)[1])
    width = str(len(shape.fields))

    def change(kind: int, before: Sequence[str], after: Sequence[str]) -> str:
        return _write(mode, kind, name, old_id if kind != INSERT else new_id, width, before, after)

    uniques = list(_unique_keys(connection, shape))
    stand_ins = _stand_ins(connection, shape)
    conflict = " OR ".join([f"{shape.rowid} = {new_id}", *(_matches(key, stand_ins) for key in uniques)])
    copied = ", ".join(["table_name", "id", "width", *_cells(len(new))] if mode.has_before else ["table_name", "id"])
    values = ", ".join(quoted(field.name) for field in shape.fields)
    chosen = f"{name}, {shape.rowid}" + (f", {width}, {values}" if mode.has_before else "")

    # If this statement runs inside another one, the notes of the outer statement must stay.
    nests = _may_nest(connection, shape)
    kept = _KEPT_NOTES if nests else 0

    def note(others: str = "") -> str:
        conflicting = f"FROM {table} WHERE ({conflict}){others}"
        done = f"confirmed OR rowid <= (SELECT max(rowid) - {kept} FROM {replaced})"
        return (
            f"DELETE FROM {replaced} WHERE table_name = {name} AND ({done} OR id IN (SELECT {shape.rowid} "
            f"{conflicting})); INSERT INTO {replaced} ({copied}) SELECT {chosen} {conflicting};"
        )

    held = f"EXISTS (SELECT 1 FROM {replaced})"
    drop_noted = f"DELETE FROM {replaced} WHERE table_name = {name}"
    gone = f"NOT EXISTS (SELECT 1 FROM {table} AS kept WHERE kept.{shape.rowid} = {replaced}.id)"

    def confirm(arrived: str, when: str = "1") -> str:
        # The row at the new row's rowid is the new row, so a row that was noted there has been replaced.
        noted = f"({when}) AND confirmed IS NULL AND table_name = {name} AND ({arrived} OR {gone})"
        return f"UPDATE {replaced} SET confirmed = 1 WHERE {noted};"

    moves = f"{new_id} <> {old_id}"
    # An index may have a different collation from its column.
    differs = (f"NEW.{quoted(c)} IS NOT OLD.{quoted(c)} COLLATE BINARY" for key in uniques for c, _ in key)
    may_conflict = " OR ".join([moves, *differs])
    forget_old = f"{drop_noted} AND id = {old_id};"
    images = ", ".join(f"{cell} = {value}" for cell, value in zip(_cells(len(new)), new, strict=True))
    renote = f"UPDATE {replaced} SET {images} WHERE table_name = {name} AND id = {old_id} AND confirmed IS NULL;"
    move = f"{forget_old} {confirm(f'id = {new_id}')} {change(DELETE, old, [])} {change(INSERT, [], new)}"
    makes = [
        ("noted_insert", "BEFORE INSERT", f"EXISTS (SELECT 1 FROM {table} WHERE {conflict})", note()),
        # An upsert notes rows for its insert and then updates one of them. `held` makes this trigger fire in that case
        # too, so that it deletes those notes; with nested statements they may belong to an outer one and stay.
        (
            "noted_update",
            "BEFORE UPDATE",
            may_conflict if nests else f"{may_conflict} OR {held}",
            note(f" AND {shape.rowid} <> {old_id}"),
        ),
        # The deletes come first: a replay must delete the replaced rows before it inserts the new one. These triggers
        # delete no notes, so that exactly one of the first two fires, in whatever order SQLite evaluates them.
        ("insert", "AFTER INSERT", f"NOT {held}", change(INSERT, [], new)),
        ("replace", "AFTER INSERT", held, f"{confirm(f'id = {new_id}')} {change(INSERT, [], new)}"),
        ("update", "AFTER UPDATE", f"{new_id} = {old_id}", f"{confirm('0', may_conflict)} {change(UPDATE, old, new)}"),
        ("renote", "AFTER UPDATE", f"{held} AND {new_id} = {old_id}", renote),
        ("move", "AFTER UPDATE", moves, move),
        # A foreign key may delete the same row that replaced others, and no other trigger would record those.
        ("delete", "AFTER DELETE", "", f"{forget_old} {confirm('0') if nests else ''} {change(DELETE, old, [])}"),
    ]
    for event, when, condition, body in makes:
        if event == "renote" and not mode.has_before:
            continue
        guard = f" WHEN {condition}" if condition else ""
        yield f"CREATE TRIGGER {_name(event, shape.table)} {when} ON {table}{guard} BEGIN {body} END"


def _name(event: str, table: str) -> str:
    return quoted(f"{TRIGGER_PREFIX}{event}:{table}")


def _cells(count: int) -> list[str]:
    return [f"c{index}" for index in range(count)]


def _write(
    mode: Mode, kind: int, table: str, rowid: str, width: str, before: Sequence[str], after: Sequence[str]
) -> str:
    """The statements that record one change, as much of it as the mode keeps. `table`, `rowid`, `width` are SQL."""
    change = (
        f"INSERT INTO {quoted(mode.table)} (change_time, change_type, table_name, id) "
        f"VALUES (unixepoch(), {kind}, {table}, {rowid});"
    )
    before = before if mode.has_before else []
    after = after if mode.has_after else []
    if not (before or after):
        return change
    columns = ["change_id", "before_width", "after_width", *_cells(len(before) + len(after))]
    values = ["last_insert_rowid()", width if before else "NULL", width if after else "NULL", *before, *after]
    image = quoted(side_tables(mode.table)[0])
    return f"{change} INSERT OR REPLACE INTO {image} ({', '.join(columns)}) VALUES ({', '.join(values)});"


def _unique_keys(connection: CaptureConnection, shape: TableShape) -> Iterator[list[tuple[str, str]]]:
    """The columns, with their collations, of each unique key that can make two rows conflict, except the rowid."""
    for _, index, unique, *_ in connection.execute(f"PRAGMA index_list({quoted(shape.table)})").fetchall():
        if not unique:
            continue
        key: list[tuple[str, str]] = []
        for _, place, column, _, collation, is_key in connection.execute(
            f"PRAGMA index_xinfo({quoted(index)})"
        ).fetchall():
            if is_key and place == _EXPRESSION:
                raise PreflightError(
                    f"index {index} is unique on an expression, so rows that REPLACE deletes could be missed",
                    fix="make the expression a generated column and index that, or capture on apsw connections",
                    table=shape.table,
                )
            if is_key:
                key.append((str(column), str(collation)))
        yield key


def _may_nest(connection: CaptureConnection, shape: TableShape) -> bool:
    """Whether a statement on the table can run inside another one, through an application's trigger or foreign key."""
    names = connection.execute("SELECT type, name FROM sqlite_schema WHERE type = 'trigger'").fetchall()
    keys = connection.execute(f"PRAGMA foreign_key_list({quoted(shape.table)})").fetchall()
    return bool(keys) or not all(is_own_trigger(kind, name) for kind, name in names)


def _refers_to_itself(connection: CaptureConnection, shape: TableShape) -> bool:
    keys = connection.execute(f"PRAGMA foreign_key_list({quoted(shape.table)})").fetchall()
    return any(
        target.lower() == shape.table.lower() and on_update == "CASCADE" for _, _, target, _, _, on_update, *_ in keys
    )


def _stand_ins(connection: CaptureConnection, shape: TableShape) -> dict[str, str]:
    """The defaults of NOT NULL columns. REPLACE writes them instead of nulls, but only after the trigger has run."""
    rows = connection.execute(f"PRAGMA table_info({quoted(shape.table)})").fetchall()
    found = {str(name): _constant(str(default)) for _, name, _, required, default, _ in rows if required and default}
    return {name: constant for name, constant in found.items() if constant is not None}


def _constant(default: str) -> str | None:
    """A default as SQL for a trigger. None for an expression, which may call functions that not every writer has."""
    if _CONSTANT.fullmatch(default):
        return default
    # In a DEFAULT clause a bare word is text; in a trigger it would be a column.
    return literal(default.removeprefix('"').removesuffix('"').replace('""', '"')) if _WORD.fullmatch(default) else None


def _matches(key: Sequence[tuple[str, str]], stand_ins: Mapping[str, str]) -> str:
    def arriving(column: str) -> str:
        new = f"NEW.{quoted(column)}"
        return f"coalesce({new}, {stand_ins[column]})" if column in stand_ins else new

    return "(" + " AND ".join(f"{quoted(c)} = {arriving(c)} COLLATE {quoted(order)}" for c, order in key) + ")"
