# ruff: noqa: S608 - every name in the SQL here is quoted
"""Schema changes between replicas: CREATE and ADD COLUMN travel in both directions, everything else stops the sync."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence

from tailrace.capture.change import RecordRow, Schema
from tailrace.capture.layout import is_internal, own_tables, quoted
from tailrace.capture.schema_change import column_names, is_own_trigger
from tailrace.errors import SchemaChangedError
from tailrace.sync.preflight import MARK_TABLE
from tailrace.sync.statement import OwnChange

SchemaObject = tuple[str, str]
_ORDER = {"table": 0, "view": 1, "index": 2, "trigger": 3}


def read_objects(connection: sqlite3.Connection, schema: str) -> dict[SchemaObject, str]:
    """The SQL of the application's tables, indexes, views and triggers in `main` or the attached image."""
    own = own_tables(connection)
    found = {
        (kind, name): sql
        for kind, name, table, sql in connection.execute(
            f"SELECT type, name, tbl_name, sql FROM {schema}.sqlite_schema WHERE sql IS NOT NULL"
        ).fetchall()
        if not (is_internal(name) or table == MARK_TABLE or table in own or is_own_trigger(kind, name))
    }
    return dict(sorted(found.items(), key=lambda entry: _ORDER[entry[0][0]]))


def columns(connection: sqlite3.Connection, schema: str, table: str) -> dict[str, str]:
    """The stored columns of a table with their definitions, as ADD COLUMN takes them."""
    rows = connection.execute(f"PRAGMA {schema}.table_xinfo({quoted(table)})").fetchall()
    return {
        name: " ".join(
            filter(None, (quoted(name), declared, "NOT NULL" if required else "", default and f"DEFAULT ({default})"))
        )
        for _, name, declared, required, default, _, hidden in rows
        if hidden == 0
    }


def bring_schema(connection: sqlite3.Connection, own: Sequence[OwnChange]) -> bool:
    """Create here what the image has in addition; whether something was created. Own DDL not pushed yet stays."""
    mine, theirs = read_objects(connection, "main"), read_objects(connection, "now")
    pending = {(str(entry[0]), str(entry[1])) for entry in _own_entries(own)}
    statements = list[str]()
    for (kind, name), sql in theirs.items():
        if (kind, name) not in mine:
            statements.append(sql)
        elif kind == "table":
            here, there = columns(connection, "main", name), columns(connection, "now", name)
            gone = [column for column in here if column not in there]
            if gone and ("table", name) not in pending:
                raise _stop(f"column {gone[0]} was dropped or renamed on the remote", name)
            statements += [
                f"ALTER TABLE {quoted(name)} ADD COLUMN {definition}"
                for column, definition in there.items()
                if column not in here
            ]
    for kind, name in mine.keys() - theirs.keys() - pending:
        if kind == "table":
            raise _stop("it was dropped or renamed on the remote", name)
        statements.append(f"DROP {kind.upper()} {quoted(name)}")
    for statement in statements:
        connection.execute(statement)
    return bool(statements)


def push_schema(connection: sqlite3.Connection, change: OwnChange) -> Iterator[str]:
    """The statements that bring one own schema change to the remote, of which the image is attached as `now`."""
    operation = change.operation
    assert isinstance(operation, Schema)
    before, after = operation.before, operation.after
    entry = after or before
    assert entry is not None
    kind, name = str(entry[0]), str(entry[1])
    if after is None or kind == "trigger" or (before is not None and kind != "table"):
        raise _stop(f"this change of a {kind} cannot be sent to the remote", name)
    if before is None:
        if (kind, name) not in read_objects(connection, "now"):
            yield str(after[4])
        return
    old, new = column_names(str(before[4])), column_names(str(after[4]))
    if before[1] != after[1] or new[: len(old)] != old:
        raise _stop("a column or the table was renamed or dropped here, which cannot be sent to the remote", name)
    there = columns(connection, "now", name)
    for column, definition in columns(connection, "main", name).items():
        if column in new[len(old) :] and column not in there:
            yield f"ALTER TABLE {quoted(name)} ADD COLUMN {definition}"


def _own_entries(own: Sequence[OwnChange]) -> Iterator[RecordRow]:
    for change in own:
        if isinstance(change.operation, Schema) and change.operation.after is not None:
            yield change.operation.after


def _stop(what: str, table: str) -> SchemaChangedError:
    return SchemaChangedError(
        what,
        fix="make the same change on both sides by hand, or move the local file away and sync again: it is made again "
        "from the remote",
        table=table,
    )
