# ruff: noqa: S608 - every name in the SQL here is quoted
"""The capture table as a log: where it ends, where transactions end, and what is between two of its rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from tailrace.capture import layout
from tailrace.capture.change import CapturedChange
from tailrace.capture.layout import COMMIT, SCHEMA_TABLE, CaptureConnection, CdcVersion, quoted
from tailrace.capture.tape import Tape, TapeMark, check_sequence, read_tape_mark
from tailrace.errors import LostError
from tailrace.source.source import RESYNC

WINDOW = 50_000
"""How many change ids are counted at a time, and read by one split."""
NATIVE_BYTES = 200
"""The assumed size of a change whose images triggers store next to the tape."""


class TapeWindow(NamedTuple):
    """The change ids in (after, upto]."""

    after: int
    upto: int


class Counted(NamedTuple):
    rows: int
    bytes: int


def windows(after: int, upto: int) -> Iterator[TapeWindow]:
    """(after, upto] in pieces. Their inner borders are the same for every caller."""
    while after < upto:
        border = min((after // WINDOW + 1) * WINDOW, upto)
        yield TapeWindow(after, border)
        after = border


class TapeLog:
    """One capture table in one snapshot of its file. Raises PreflightError if it is missing or of unknown version."""

    def __init__(self, connection: CaptureConnection, table: str) -> None:
        tape = Tape(connection, table)
        self.connection = connection
        self.table = table
        self.by_triggers = tape.by_triggers
        self.version = tape.version
        self.has_transactions = tape.version is not CdcVersion.V1
        self._name = quoted(table)

    def head(self) -> int:
        """The last change of the last whole transaction; 0 for an empty tape.

        Everything another connection can read is committed. Rows without the COMMIT row with which Turso ends a
        transaction are still left out, unless other rows follow them.
        """
        row = self._one(f"SELECT change_id, {self._txn}, change_type FROM {self._name} ORDER BY change_id DESC LIMIT 1")
        if row is None:
            return 0
        last, txn, kind = row
        if txn is None or kind == COMMIT:
            return int(last)
        sql = f"SELECT 1 FROM {self._name} WHERE change_id >= ? AND change_txn_id = ? AND change_type = ? LIMIT 1"
        if self._one(sql, txn, txn, COMMIT) is not None:
            return int(last)
        sql = (
            f"SELECT change_id FROM {self._name} "
            "WHERE change_id < ? AND change_txn_id IS NOT ? ORDER BY change_id DESC LIMIT 1"
        )
        before = self._one(sql, last, txn)
        return 0 if before is None else int(before[0])

    def boundary(self, cut: int, head: int) -> int:
        """The last change of the transaction of the first change at or after `cut`."""
        row = self._one(
            f"SELECT change_id, {self._txn} FROM {self._name} WHERE change_id >= ? ORDER BY change_id LIMIT 1", cut
        )
        if row is None:
            return head
        if row[1] is None:
            return min(int(row[0]), head)
        sql = f"SELECT change_id FROM {self._name} WHERE change_id > ? AND change_txn_id IS NOT ? ORDER BY 1 LIMIT 1"
        following = self._one(sql, row[0], row[1])
        return head if following is None else min(self._nearest(int(following[0]) - 1), head)

    def count(self, window: TapeWindow) -> dict[str, Counted]:
        """How many changes of which table lie in a window, and how large their images are; commits left out."""
        size = f"count(*) * {NATIVE_BYTES}"
        if not self.by_triggers:
            size = 'coalesce(sum(length("before")), 0) + coalesce(sum(length("after")), 0)'
        sql = (
            f"SELECT table_name, count(*), {size} FROM {self._name} "
            "WHERE change_id > ? AND change_id <= ? AND table_name IS NOT NULL GROUP BY table_name"
        )
        rows = self.connection.execute(sql, window).fetchall()
        return {str(name): Counted(int(count), int(size)) for name, count, size in rows}

    def schema_changes(self, window: TapeWindow) -> list[CapturedChange]:
        """The rows on sqlite_schema in a window."""
        names = ", ".join(quoted(name) for name in layout.COLUMNS_V2 if name != "change_txn_id")
        sql = f"SELECT {names} FROM {self._name} WHERE change_id > ? AND change_id <= ? AND table_name = ? ORDER BY 1"
        rows = self.connection.execute(sql, (*window, SCHEMA_TABLE)).fetchall()
        return [CapturedChange(row[0], row[1], None, *row[2:]) for row in rows]

    def mark(self, change_id: int) -> TapeMark:
        """A change and the last rows up to it, by which the tape is recognised later."""
        return read_tape_mark(self.connection, self.table, change_id)

    def require_sequence(self, mark: TapeMark) -> None:
        """Raise LostError when the tape was started over, or rows after a mark were removed."""
        check_sequence(self.connection, self.table, mark, fix=RESYNC)

    def _nearest(self, change_id: int) -> int:
        row = self._one(f"SELECT max(change_id) FROM {self._name} WHERE change_id <= ?", change_id)
        return int(row[0] or 0) if row is not None else 0

    def require_rows_after(self, change_id: int, table: str) -> None:
        """Raise LostError if changes after this one, which `table` still needs, were removed."""
        row = self._one(f"SELECT min(change_id) FROM {self._name}")
        if row is not None and row[0] is not None and int(row[0]) > change_id + 1:
            raise LostError(
                f"the changes after {change_id} that {table} still needs were purged from {self.table}",
                fix=f"tailrace resync FILE {table}",
                table=table,
                position=str(change_id),
            )

    def schema_version(self) -> int:
        """A number that grows with every change of the file's schema."""
        row = self._one("PRAGMA schema_version")
        return int(row[0]) if row is not None else 0

    @property
    def _txn(self) -> str:
        # Statements that changed nothing commit with id -1, which no other row has.
        return "change_txn_id" if self.has_transactions else "NULL"

    def _one(self, sql: str, *parameters: object) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self.connection.execute(sql, parameters).fetchone()
        return row
