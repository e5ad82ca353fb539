# ruff: noqa: S608 - every name in the SQL here is quoted
"""Schema changes between replicas: CREATE and ADD COLUMN travel in both directions, everything else stops the sync."""

from __future__ import annotations

import json
from collections.abc import Iterator

from tailrace.capture.layout import CaptureConnection, is_internal, own_tables, quoted
from tailrace.capture.schema_change import is_own_trigger
from tailrace.errors import SchemaChangedError
from tailrace.sync.preflight import MARK_TABLE

SchemaObject = tuple[str, str]
_ORDER = {"table": 0, "view": 1, "index": 2, "trigger": 3}


def read_objects(connection: CaptureConnection, schema: str) -> dict[SchemaObject, str]:
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


def columns(connection: CaptureConnection, schema: str, table: str) -> dict[str, str]:
    """The stored columns of a table with their definitions, as ADD COLUMN takes them."""
    rows = connection.execute(f"PRAGMA {schema}.table_xinfo({quoted(table)})").fetchall()
    return {
        name: " ".join(
            filter(None, (quoted(name), declared, "NOT NULL" if required else "", default and f"DEFAULT ({default})"))
        )
        for _, name, declared, required, default, _, hidden in rows
        if hidden == 0
    }


def describe(connection: CaptureConnection, schema: str) -> str:
    """Which objects and columns there are, to know later which of them someone dropped, and which are new."""
    found = [[*each, list(columns(connection, schema, each[1]))] for each in read_objects(connection, schema)]
    return json.dumps(found)


def bring_schema(connection: CaptureConnection, known: str) -> bool:
    """Create here what the image has in addition; whether something was created. Own DDL not pushed yet stays.

    `known` describes the remote as of the last pull. Raises SchemaChangedError for what either side dropped or renamed.
    """
    mine, theirs = read_objects(connection, "main"), read_objects(connection, "now")
    held = {(kind, name): set(names) for kind, name, names in json.loads(known)}
    statements = list[str]()
    for (kind, name), sql in theirs.items():
        if (kind, name) not in mine:
            if (kind, name) in held:
                raise _stop(f"the {kind} was dropped or changed here, which cannot be sent to the remote", name)
            statements.append(sql)
        elif kind == "table":
            here, there = columns(connection, "main", name), columns(connection, "now", name)
            before = held.get((kind, name), set())
            if gone := [column for column in before if column in here and column not in there]:
                raise _stop(f"column {gone[0]} was dropped or renamed on the remote", name)
            if gone := [column for column in before if column in there and column not in here]:
                raise _stop(f"column {gone[0]} was dropped or renamed here, which cannot be sent to the remote", name)
            statements += [
                f"ALTER TABLE {quoted(name)} ADD COLUMN {definition}"
                for column, definition in there.items()
                if column not in here
            ]
    for kind, name in (mine.keys() - theirs.keys()) & held.keys():
        if kind == "table":
            raise _stop("it was dropped or renamed on the remote", name)
        statements.append(f"DROP {kind.upper()} {quoted(name)}")
    for statement in statements:
        connection.execute(statement)
    return bool(statements)


def push_schema(connection: CaptureConnection) -> Iterator[str]:
    """The statements that bring own DDL to the remote, of which the image is attached as `now`."""
    theirs = read_objects(connection, "now")
    for (kind, name), sql in read_objects(connection, "main").items():
        if (kind, name) not in theirs:
            if kind == "trigger":
                raise _stop("a trigger cannot be sent to the remote: create it there", name)
            yield sql
        elif kind == "table":
            there = columns(connection, "now", name)
            for column, definition in columns(connection, "main", name).items():
                if column not in there:
                    yield f"ALTER TABLE {quoted(name)} ADD COLUMN {definition}"


def _stop(what: str, table: str) -> SchemaChangedError:
    return SchemaChangedError(
        what,
        fix="make the same change on both sides by hand, or move the local file away and sync again: it is made again "
        "from the remote",
        table=table,
    )
