"""Tables that a capture leaves out, because their changes cannot be recorded, and why.

They are stored in the file, so that whoever reads the tape knows that it says nothing about them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tailrace.capture.layout import DEFAULT_TABLE, EXCLUDED_TABLE, CaptureConnection, has_table
from tailrace.errors import Finding, PreflightError


@dataclass(frozen=True)
class ExcludedTable:
    """One table whose changes are not on the tape, the reason, and how to have it captured."""

    table: str
    reason: str
    fix: str

    @classmethod
    def of(cls, table: str, error: PreflightError) -> ExcludedTable:
        return cls(table, error.message, error.fix or "")

    def finding(self) -> Finding:
        table = f"main.{self.table}"
        return Finding("warning", f"table {table}", f"not captured: {self.reason}", self.fix, table)


def excluded(connection: CaptureConnection, table: str = DEFAULT_TABLE) -> list[Finding]:
    """One finding for each table that the capture into `table` leaves out: its changes are not on the tape."""
    return [one.finding() for one in read_excluded(connection, table)]


def read_excluded(connection: CaptureConnection, tape: str) -> list[ExcludedTable]:
    if not has_table(connection, EXCLUDED_TABLE):
        return []
    sql = f"SELECT table_name, reason, fix FROM {EXCLUDED_TABLE} WHERE tape = ? ORDER BY 1"  # noqa: S608 - our own name
    rows = connection.execute(sql, (tape,)).fetchall()
    return [ExcludedTable(str(table), str(why), str(fix)) for table, why, fix in rows]


def write_excluded(connection: CaptureConnection, tape: str, tables: Iterable[ExcludedTable]) -> None:
    """Store these tables as all that the capture leaves out, inside the caller's transaction. Safe to repeat."""
    wanted = sorted(tables, key=lambda one: one.table)
    if wanted == read_excluded(connection, tape):
        return
    connection.execute(
        f"CREATE TABLE IF NOT EXISTS {EXCLUDED_TABLE} (tape TEXT NOT NULL, table_name TEXT NOT NULL, "
        "reason TEXT NOT NULL, fix TEXT NOT NULL, PRIMARY KEY (tape, table_name))"
    )
    connection.execute(f"DELETE FROM {EXCLUDED_TABLE} WHERE tape = ?", (tape,))  # noqa: S608 - a name of our own
    for one in wanted:
        sql = f"INSERT INTO {EXCLUDED_TABLE} VALUES (?, ?, ?, ?)"  # noqa: S608 - a name of our own
        connection.execute(sql, (tape, one.table, one.reason, one.fix))
    if not connection.execute(f"SELECT 1 FROM {EXCLUDED_TABLE}").fetchone():  # noqa: S608 - a name of our own
        connection.execute(f"DROP TABLE {EXCLUDED_TABLE}")
