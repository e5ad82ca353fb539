# ruff: noqa: S608 - every name in the SQL here is quoted
"""Capture for a whole SQLite file, by triggers, which work for every writer, whatever library or language it uses.

A trigger cannot see transactions or DDL. So changes have no transaction id, and DDL is found by comparing schemas: when
`enable` is run again, it records what has changed in the schema since, with the rows that the triggers could not see.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from tailrace.capture import layout
from tailrace.capture.exclusion import ExcludedTable, excluded, read_excluded, write_excluded
from tailrace.capture.layout import (
    INSERT,
    OFF,
    UPDATE,
    CaptureConnection,
    CaptureState,
    CdcVersion,
    Mode,
    TableShape,
    parse_mode,
    quoted,
    side_tables,
)
from tailrace.capture.record import Value, encode
from tailrace.capture.schema_change import SchemaChange, SchemaRow, column_names, compare, is_own_trigger, read_schema
from tailrace.capture.trigger_sql import make_replaced_trigger, make_side_tables, make_triggers
from tailrace.errors import Finding, PreflightError
from tailrace.system.file_lock import is_locked
from tailrace.system.turso_lock import server_lock

WIDEST = 990
"""SQLite allows 2,000 columns in a result, and readers of the tape select two images with a few more columns."""


@dataclass(frozen=True)
class CaptureStatus:
    """The capture of a file. `pending` counts schema changes that `enable` has not recorded yet; `excluded` are the
    tables that cannot be captured."""

    captured: CaptureState
    tables: int
    pending: int
    excluded: tuple[Finding, ...]


def enable(connection: CaptureConnection, argument: str = "full") -> CaptureState:
    """Capture every table of this file from now on; `argument` is `<mode>[,<table>]` or `off`.

    A table that cannot be captured, such as one WITHOUT ROWID, is left out, and `excluded` tells which and why.

    A repeat updates the triggers to the current schema and this release, and records DDL that was run since; without
    changes it does nothing. It is one transaction: if it raises, the file is unchanged. Raises ConfigError for a wrong
    argument, and PreflightError for a file that is already captured in another way, or if a table that was captured so
    far no longer can be.
    """
    mode = parse_mode(argument)
    if mode is None:
        disable(connection)
        return OFF
    with layout.transaction(connection):
        running = layout.trigger_capture(connection)
        if running is None or running.table != mode.table:
            _require_unserved(connection)
            _require_unclaimed(connection, mode, running)
            layout.ensure(connection, mode.table, CdcVersion.TRIGGERS)
            _put_capture(connection, mode, after=None)
        elif running != mode or _pending(connection, mode) or not _is_current(connection, mode):
            _write_schema_changes(connection, running)
            _put_capture(connection, mode, after=running)
    return read_captured(connection)


def disable(connection: CaptureConnection, *, drop: bool = False) -> bool:
    """Stop capture by triggers. The tape stays readable; `drop` deletes it too, even if capture was stopped before.

    A stopped tape cannot be continued later, because it would have a gap that no reader can see. Returns whether a
    tape was dropped. A repeat does nothing.
    """
    with layout.transaction(connection):
        _drop_triggers(connection)
        connection.execute(f"DROP TABLE IF EXISTS {layout.CAPTURE_TABLE}")
        for tape in layout.trigger_tapes(connection):
            write_excluded(connection, tape, ())
        tapes = layout.trigger_tapes(connection) if drop else []
        for tape in tapes:
            for table in (tape, *side_tables(tape)):
                connection.execute(f"DROP TABLE IF EXISTS {quoted(table)}")
            connection.execute(f"DELETE FROM {layout.VERSION_TABLE} WHERE table_name = ?", (tape,))
    return bool(tapes)


def suspend(connection: CaptureConnection) -> Mode | None:
    """Drop the triggers until `resume`, in one transaction, in which the caller writes the tape itself."""
    running = layout.trigger_capture(connection)
    _drop_triggers(connection)
    return running


def resume(connection: CaptureConnection, running: Mode | None) -> None:
    """Create the triggers again, for the current schema. Called in the transaction that suspended them."""
    if running is not None:
        _put_capture(connection, running, after=running)


def remember(connection: CaptureConnection, names: Collection[str]) -> None:
    """Take these objects as they are now: they were dropped and created again, which is no change of the schema."""
    running = layout.trigger_capture(connection)
    if running is None:
        return
    schema = quoted(side_tables(running.table)[2])
    for name in names:
        connection.execute(f"DELETE FROM {schema} WHERE name = ?", (name,))
    for rowid, entry in read_schema(connection).items():
        if entry[1] in names:
            connection.execute(f"INSERT OR REPLACE INTO {schema} VALUES (?, ?, ?, ?, ?, ?)", (rowid, *entry))


def read_captured(connection: CaptureConnection) -> CaptureState:
    """The capture by triggers that is active in this file: (mode, table, version), or ('off', None, None)."""
    running = layout.trigger_capture(connection)
    if running is None:
        return OFF
    return CaptureState(running.name, running.table, str(layout.read_version(connection, running.table)))


def read_status(connection: CaptureConnection) -> CaptureStatus:
    captured = read_captured(connection)
    running = layout.trigger_capture(connection)
    pending = len(_pending(connection, running)) if running is not None else 0
    left_out = () if running is None else tuple(excluded(connection, running.table))
    return CaptureStatus(captured, len(layout.list_tables(connection)) - len(left_out), pending, left_out)


def _require_unserved(connection: CaptureConnection) -> None:
    """Raise PreflightError if a sync server's clients would receive the capture, or its tape is read instead."""
    row = connection.execute("PRAGMA database_list").fetchone()
    if row is None or not row[2]:
        return
    path = Path(row[2])
    if is_locked(server_lock(path)):
        raise PreflightError(
            f"{path} is served, and every client would receive the capture with its pages",
            fix=f"to follow it with a pipeline: tailrace serve-sync {path} --tape",
        )
    if layout.served_tape(path).exists():
        raise PreflightError(
            f"{path} was served, and {layout.served_tape(path)} has its tape",
            fix=f"serve it, or delete that file: rm {layout.served_tape(path)}*",
        )


def _require_unclaimed(connection: CaptureConnection, mode: Mode, running: Mode | None) -> None:
    if running is not None:
        raise PreflightError(
            f"triggers capture this file into {running.table} already",
            fix=f"keep that table, or run tailrace sqlite disable FILE, then enable with {mode.table}",
        )
    claimed = [table for table in sorted(layout.own_tables(connection)) if layout.has_table(connection, table)]
    notes = (layout.VERSION_TABLE, layout.PROGRESS_TABLE, layout.EXCLUDED_TABLE, *layout.SYNC_TABLES)
    existing = [table for table in claimed if table not in notes]
    existing += [
        table
        for table in (mode.table, *side_tables(mode.table))
        if table not in existing and layout.has_table(connection, table)
    ]
    if existing:
        left_out = [table for table in claimed if table == layout.EXCLUDED_TABLE]
        drops = " ".join(f"DROP TABLE {quoted(table)};" for table in (*existing, *left_out))
        deletes = f" DELETE FROM {layout.VERSION_TABLE};" if layout.VERSION_TABLE in claimed else ""
        raise PreflightError(
            f"the file holds the tape of another capture ({existing[0]}): of Turso, of a connection, or of a capture "
            "that was stopped; two captures would record every change twice",
            fix=f"stop that capture and drop its tape: {drops}{deletes}",
        )


def _put_capture(connection: CaptureConnection, mode: Mode, after: Mode | None) -> None:
    """Create the triggers for the current schema, and store that schema."""
    known = _captured_tables(connection)
    plan = _make_plan(connection, mode)
    if lost := [one for one in plan.excluded if one.table in known]:
        # Leaving it out from now on would give it a gap that no reader can see.
        raise PreflightError(f"{lost[0].table} was captured, but no longer can be: {lost[0].reason}", fix=lost[0].fix)
    _drop_triggers(connection)
    layout.write_version(connection, mode.table, CdcVersion.TRIGGERS)
    write_excluded(connection, mode.table, plan.excluded)
    if after is None:
        for sql in make_side_tables(mode, plan.width):
            connection.execute(sql)
    else:
        _widen(connection, mode, plan.width)
        # Rows noted as being replaced may belong to a dropped table whose name another table has now.
        connection.execute(f"DELETE FROM {quoted(side_tables(mode.table)[1])}")
    for sql in plan.triggers:
        connection.execute(sql)
    schema = quoted(side_tables(mode.table)[2])
    connection.execute(f"DELETE FROM {schema}")
    for rowid, entry in read_schema(connection).items():
        connection.execute(f"INSERT INTO {schema} VALUES (?, ?, ?, ?, ?, ?)", (rowid, *entry))
    connection.execute(
        f"CREATE TABLE IF NOT EXISTS {layout.CAPTURE_TABLE} (mode TEXT NOT NULL, table_name TEXT NOT NULL)"
    )
    connection.execute(f"DELETE FROM {layout.CAPTURE_TABLE}")
    connection.execute(f"INSERT INTO {layout.CAPTURE_TABLE} VALUES (?, ?)", (mode.name, mode.table))


@dataclass(frozen=True)
class _TriggerPlan:
    """The triggers for the current schema, the columns of the widest table, and the tables that are left out."""

    triggers: list[str]
    width: int
    excluded: list[ExcludedTable]


def _make_plan(connection: CaptureConnection, mode: Mode) -> _TriggerPlan:
    triggers: list[str] = []
    left_out: list[ExcludedTable] = []
    width = 0
    for table in layout.list_tables(connection):
        shape = layout.read_table_shape(connection, table)
        try:
            layout.require_capturable(shape)
            _require_narrow(shape)
            triggers += make_triggers(connection, mode, shape)
        except PreflightError as error:
            left_out.append(ExcludedTable.of(table, error))
        else:
            width = max(width, len(shape.fields))
    return _TriggerPlan([make_replaced_trigger(mode, width), *triggers], width, left_out)


def uncapturable(connection: CaptureConnection) -> list[ExcludedTable]:
    """The tables that a capture by triggers would leave out."""
    return _make_plan(connection, Mode("full", layout.DEFAULT_TABLE)).excluded


def _captured_tables(connection: CaptureConnection) -> set[str]:
    """The tables that have triggers now."""
    rows = connection.execute("SELECT type, name, tbl_name FROM sqlite_schema").fetchall()
    return {table for kind, name, table in rows if is_own_trigger(kind, name)}


def _is_current(connection: CaptureConnection, mode: Mode) -> bool:
    """Whether triggers and version are those that this release would write; an older release wrote others."""
    if layout.stored_version(connection, mode.table) != CdcVersion.TRIGGERS:
        return False
    rows = connection.execute("SELECT type, name, sql FROM sqlite_schema").fetchall()
    found = {sql for kind, name, sql in rows if is_own_trigger(kind, name)}
    return found == set(_make_plan(connection, mode).triggers)


def _require_narrow(shape: TableShape) -> None:
    if len(shape.fields) > WIDEST:
        raise PreflightError(
            f"{shape.table} has more than {WIDEST} columns, and triggers store both images of a row in a single row",
            fix="capture on apsw connections (tailrace.capture.capture), or split the table",
            table=shape.table,
        )


def _widen(connection: CaptureConnection, mode: Mode, width: int) -> None:
    for table in side_tables(mode.table)[:2]:
        held = {str(row[1]) for row in connection.execute(f"PRAGMA table_info({quoted(table)})").fetchall()}
        for index in range(2 * width):
            if f"c{index}" not in held:
                connection.execute(f"ALTER TABLE {quoted(table)} ADD COLUMN c{index}")


def _drop_triggers(connection: CaptureConnection) -> None:
    for kind, name in connection.execute("SELECT type, name FROM sqlite_schema").fetchall():
        if is_own_trigger(kind, name):
            connection.execute(f"DROP TRIGGER {quoted(name)}")


def _pending(connection: CaptureConnection, mode: Mode) -> list[SchemaChange]:
    return compare(_remembered(connection, mode), read_schema(connection))


def _remembered(connection: CaptureConnection, mode: Mode) -> dict[int, SchemaRow]:
    schema = quoted(side_tables(mode.table)[2])
    rows = connection.execute(f"SELECT id, type, name, tbl_name, rootpage, sql FROM {schema}").fetchall()
    return {int(rowid): tuple(entry) for rowid, *entry in rows}


def _write_schema_changes(connection: CaptureConnection, mode: Mode) -> None:
    """Record the DDL since the triggers were created, each followed by the rows that they could not see."""
    left_out = {one.table for one in _make_plan(connection, mode).excluded}
    capturable = set(layout.list_tables(connection)) - left_out
    created = set()
    for change in _pending(connection, mode):
        before = encode(change.before) if change.before and mode.has_before else None
        after = encode(change.after) if change.after and mode.has_after else None
        _write_change(connection, mode, change.type, layout.SCHEMA_TABLE, change.id, before, after)
        if change.after is None or change.after[0] != "table":
            continue
        table = str(change.after[1])
        if table in capturable:
            shape = layout.read_table_shape(connection, table)
            known = column_names(str(change.before[4])) if change.before is not None else []
            added = [field.name for field in shape.fields[len(known) :]]
            if change.before is None or added:
                _write_unseen_rows(connection, mode, shape, added)
            if change.before is None:
                created.add(table)
    for one in read_excluded(connection, mode.table):
        if one.table in capturable - created:
            shape = layout.read_table_shape(connection, one.table)
            _write_unseen_rows(connection, mode, shape, [field.name for field in shape.fields])


def _write_unseen_rows(connection: CaptureConnection, mode: Mode, shape: TableShape, added: Sequence[str]) -> None:
    """Record all rows of a new table, or the rows whose added columns differ from their default."""
    is_new = len(added) == len(shape.fields)
    names = [quoted(field.name) for field in shape.fields]
    defaults = [field.default or "NULL" if field.name in added else quoted(field.name) for field in shape.fields]
    differs = " OR ".join(f"{name} IS NOT {default}" for name, default in zip(names, defaults, strict=True))
    sql = f"SELECT {shape.rowid}, {', '.join(names)}, {', '.join(defaults)} FROM {quoted(shape.table)}"
    for rowid, *cells in connection.execute(sql if is_new else f"{sql} WHERE {differs}").fetchall():
        new, old = cells[: len(names)], cells[len(names) :]
        before = encode(old) if mode.has_before and not is_new else None
        after = encode(new) if mode.has_after else None
        _write_change(connection, mode, INSERT if is_new else UPDATE, shape.table, rowid, before, after)


def _write_change(
    connection: CaptureConnection,
    mode: Mode,
    kind: int,
    table: str,
    rowid: Value,
    before: bytes | None,
    after: bytes | None,
) -> None:
    connection.execute(
        f'INSERT INTO {quoted(mode.table)} (change_time, change_type, table_name, id, "before", "after") '
        "VALUES (?, ?, ?, ?, ?, ?)",
        (int(time.time()), kind, table, rowid, before, after),
    )
