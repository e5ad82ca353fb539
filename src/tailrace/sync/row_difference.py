# ruff: noqa: S608 - every name in the SQL here is quoted
"""Bring the rows of a table to those of another database that is attached as `now`.

Rows are compared by SQLite itself, exactly: 1 is not 1.0, and 'a' is not 'A', whatever the collation of their column.
"""

from __future__ import annotations

import sqlite3

import apsw

from tailrace.capture.layout import CaptureConnection, quoted, read_table_shape
from tailrace.sync.schema import columns


def bring_rows(connection: CaptureConnection, table: str) -> int:
    """Make the rows of one table those of the image; how many were written or deleted."""
    shape = read_table_shape(connection, table)
    there = columns(connection, "now", table)
    names = [quoted(each.name) for each in shape.fields if each.name in there]
    name, rowid = quoted(table), shape.rowid
    for each in shape.fields:
        if each.name not in there:
            # A column of our own that is not pushed yet: its values are among the changes to replay.
            own, default = quoted(each.name), f"({each.default or 'NULL'})"
            connection.execute(f"UPDATE main.{name} SET {own} = {default} WHERE {own} IS NOT {default}")
    differs = _any([f"m.{one} COLLATE BINARY IS NOT n.{one} OR typeof(m.{one}) <> typeof(n.{one})" for one in names])
    connection.execute("CREATE TEMP TABLE IF NOT EXISTS differing (id INTEGER PRIMARY KEY, kind TEXT)")
    connection.execute("DELETE FROM temp.differing")
    connection.execute(
        f"INSERT INTO temp.differing SELECT m.{rowid}, 'gone' FROM main.{name} m "
        f"WHERE NOT EXISTS (SELECT 1 FROM now.{name} n WHERE n.{rowid} = m.{rowid}) UNION ALL "
        f"SELECT n.{rowid}, iif(m.{rowid} IS NULL, 'new', 'changed') FROM now.{name} n "
        f"LEFT JOIN main.{name} m ON m.{rowid} = n.{rowid} WHERE m.{rowid} IS NULL OR {differs}"
    )
    (count,) = connection.execute("SELECT count(*) FROM temp.differing").fetchone()
    if not count:
        return 0

    def chosen(*kinds: str) -> str:
        return f"IN (SELECT id FROM temp.differing WHERE kind IN ({', '.join(repr(kind) for kind in kinds)}))"

    def write(deleted: str, inserted: str, *, updates: bool) -> None:
        connection.execute(f"DELETE FROM main.{name} WHERE {rowid} {deleted}")
        if updates:
            sets = ", ".join(f"{one} = n.{one}" for one in names)
            connection.execute(
                f"UPDATE main.{name} AS m SET {sets} FROM now.{name} AS n "
                f"WHERE n.{rowid} = m.{rowid} AND m.{rowid} {chosen('changed')}"
            )
        connection.execute(
            f"INSERT INTO main.{name} ({', '.join([rowid, *names])}) "
            f"SELECT {', '.join([rowid, *names])} FROM now.{name} WHERE {rowid} {inserted}"
        )

    connection.execute("SAVEPOINT bring")
    try:
        write(chosen("gone"), chosen("new"), updates=True)
    except (sqlite3.IntegrityError, apsw.ConstraintError):
        # Rows exchange values of a UNIQUE column: there is an order only without the old rows.
        connection.execute("ROLLBACK TO bring")
        write(chosen("gone", "changed"), chosen("new", "changed"), updates=False)
    connection.execute("RELEASE bring")
    return int(count)


def _any(conditions: list[str]) -> str:
    """The conditions joined by OR, halved again and again: SQLite limits how deep an expression is."""
    if len(conditions) == 1:
        return conditions[0]
    middle = len(conditions) // 2
    return f"({_any(conditions[:middle])}) OR ({_any(conditions[middle:])})"
