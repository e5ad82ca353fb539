# ruff: noqa: S608 - every name in the SQL here is quoted
"""Schema changes between replicas: CREATE and ADD COLUMN travel in both directions, everything else stops the sync."""

from __future__ import annotations

import json
import sqlite3

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


def _require_alike(connection: CaptureConnection, table: str) -> None:
    """Raise SchemaChangedError if both sides have the table, but made its columns in different ways."""
    (own, own_made), (other, other_made) = (_layout(connection, schema, table) for schema in ("main", "now"))
    for column in sorted(own.keys() | other.keys()):
        (key, declared), (other_key, other_declared) = own.get(column, (0, "")), other.get(column, (0, ""))
        if key != other_key or (column in own and column in other and declared != other_declared):
            raise _stop(f"column {column} has another type or another place in the key on the remote", table)
    if unlike := sorted(own_made ^ other_made):
        raise _stop(f"the generated column {unlike[0]} is on one side only", table)


def _layout(connection: CaptureConnection, schema: str, table: str) -> tuple[dict[str, tuple[int, str]], set[str]]:
    """The place in the key and the type of each stored column; and the generated columns."""
    rows = connection.execute(f"PRAGMA {schema}.table_xinfo({quoted(table)})").fetchall()
    stored = {name: (key, declared.upper()) for _, name, declared, _, _, key, hidden in rows if not hidden}
    return stored, {row[1] for row in rows if row[6]}


def describe(connection: CaptureConnection, schema: str) -> str:
    """Which objects and columns there are, to know later which of them someone dropped, and which are new."""
    found = [[*each, list(columns(connection, schema, each[1]))] for each in read_objects(connection, schema)]
    return json.dumps(found)


def bring_schema(connection: CaptureConnection, known: str) -> tuple[bool, list[str]]:
    """Create here what the image has in addition; whether something was created. Own DDL not pushed yet stays.

    Also returns the statements of indexes that own rows contradict: to be run once the rows are those of the image.
    `known` describes the remote as of the last pull. Raises SchemaChangedError for what either side dropped or renamed,
    and for what both made in different ways.
    """
    mine, theirs = read_objects(connection, "main"), read_objects(connection, "now")
    held = {(kind, name): set(names) for kind, name, names in json.loads(known)}
    statements = list[tuple[str, str]]()
    for (kind, name), sql in theirs.items():
        if (kind, name) not in mine:
            if (kind, name) in held:
                raise _stop(f"the {kind} was dropped or changed here, which cannot be sent to the remote", name)
            statements.append((name, sql))
        elif kind == "table":
            before = held.get((kind, name), set())
            statements += ((name, sql) for sql in _missing_columns(connection, name, before))
    for kind, name in (mine.keys() - theirs.keys()) & held.keys():
        if kind == "table":
            raise _stop("it was dropped or renamed on the remote", name)
        statements.append((name, f"DROP {kind.upper()} {quoted(name)}"))
    later = list[str]()
    for name, statement in statements:
        try:
            connection.execute(statement)
        except sqlite3.IntegrityError:
            later.append(statement)
        except sqlite3.OperationalError as error:
            raise _stop(f"what the remote has cannot be created here: {error}", name) from None
    return len(statements) > len(later), later


def _missing_columns(connection: CaptureConnection, table: str, before: set[str]) -> list[str]:
    """The statements that add the columns which only the image has; `before` are those of the last pull."""
    here, there = columns(connection, "main", table), columns(connection, "now", table)
    if gone := [column for column in before if column in here and column not in there]:
        raise _stop(f"column {gone[0]} was dropped or renamed on the remote", table)
    if gone := [column for column in before if column in there and column not in here]:
        raise _stop(f"column {gone[0]} was dropped or renamed here, which cannot be sent to the remote", table)
    _require_alike(connection, table)
    return [
        f"ALTER TABLE {quoted(table)} ADD COLUMN {definition}"
        for column, definition in there.items()
        if column not in here
    ]


def new_indexes(connection: CaptureConnection) -> set[str]:
    """The own indexes that are not pushed yet."""
    gone = read_objects(connection, "main").keys() - read_objects(connection, "now").keys()
    return {name for kind, name in gone if kind == "index"}


def push_schema(connection: CaptureConnection) -> tuple[list[str], list[str]]:
    """The statements that bring own DDL to the remote, of which the image is attached as `now`.

    The second list are those of indexes, for after the changes of rows: those may be what makes rows unique.
    """
    mine, theirs = read_objects(connection, "main"), read_objects(connection, "now")
    for kind, name in theirs.keys() - mine.keys():
        raise _stop(f"the {kind} was dropped or changed here, which cannot be sent to the remote", name)
    tables, indexes = list[str](), list[str]()
    for (kind, name), sql in mine.items():
        if (kind, name) not in theirs:
            if kind == "trigger":
                raise _stop("a trigger cannot be sent to the remote: create it there", name)
            (indexes if kind == "index" else tables).append(sql)
        elif kind == "table":
            _require_alike(connection, name)
            here, there = columns(connection, "main", name), columns(connection, "now", name)
            if gone := sorted(there.keys() - here.keys()):
                raise _stop(f"column {gone[0]} was dropped or renamed here, which cannot be sent to the remote", name)
            tables += (
                f"ALTER TABLE {quoted(name)} ADD COLUMN {definition}"
                for column, definition in here.items()
                if column not in there
            )
    return tables, indexes


def contradicted(index: str, why: str) -> SchemaChangedError:
    """The error for an own index that rows of the remote do not allow."""
    return SchemaChangedError(
        f"the index is not on the remote yet, and rows of the remote do not allow it: {why}",
        fix=f"DROP INDEX {quoted(index)}, sync, change those rows, and create it again",
        table=index,
    )


def _stop(what: str, table: str) -> SchemaChangedError:
    return SchemaChangedError(
        what,
        fix="make the same change on both sides by hand, or move the local file away and sync again: it is made again "
        "from the remote",
        table=table,
    )
