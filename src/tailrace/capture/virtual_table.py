"""The virtual table through which SQLite tells a capture of savepoints, rollbacks and the coming commit."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from tailrace.capture.change_buffer import ChangeBuffer, Savepoint
from tailrace.capture.layout import quoted

if TYPE_CHECKING:
    import apsw

MODULE = "tailrace_enlistment"
VIRTUAL_TABLE = "tailrace_enlistment"
ENLIST = f"INSERT INTO {VIRTUAL_TABLE} VALUES (0)"  # noqa: S608 - a name of our own
"""Enlists the virtual table in the transaction, when it is run or as a part of another statement."""

_EVENTS = ("INSERT", "UPDATE", "DELETE")
_OURS = "SELECT name, tbl_name FROM temp.sqlite_schema WHERE type = 'trigger' AND name LIKE 'tailrace:%'"


class Participant(Protocol):
    """Who takes part in the transaction: notes that grow, are cut back by savepoints, and are written at the end."""

    @property
    def notes(self) -> ChangeBuffer: ...
    def sync(self) -> None: ...
    def forget(self) -> None: ...
    def undo(self) -> None: ...


class Enlistment:
    """The module and, as it has a single table, the table too. Method names are SQLite's.

    DDL makes SQLite connect the table anew in the midst of a transaction, with another Begin; the earlier one is still
    told of everything. So each call may come twice, and only the first of a savepoint counts.
    """

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._notes = participant.notes
        self._marks: list[tuple[int, Savepoint]] = []

    def Create(self, *_: Any) -> tuple[str, Enlistment]:  # noqa: N802
        return "CREATE TABLE x(y)", self

    Connect = Create

    def Disconnect(self) -> None:  # noqa: N802
        """Nothing is held."""

    Destroy = Disconnect

    def BestIndex(self, *_: Any) -> None:  # noqa: N802
        """Asked when SQLite lists all tables; nobody reads this one."""

    def Begin(self) -> None:  # noqa: N802
        """Whatever was noted before belongs to the same transaction."""

    def Sync(self) -> None:  # noqa: N802
        self._participant.sync()

    def Commit(self) -> None:  # noqa: N802
        self._marks.clear()
        self._participant.forget()

    def Rollback(self) -> None:  # noqa: N802
        self.Commit()
        self._participant.undo()

    def Savepoint(self, level: int) -> None:  # noqa: N802
        # Called once or twice for every statement of a transaction: it must cost little.
        marks = self._marks
        if not marks or marks[-1][0] < level:
            marks.append((level, self._notes.mark()))

    def Release(self, level: int) -> None:  # noqa: N802
        while self._marks and self._marks[-1][0] >= level:
            self._marks.pop()

    def RollbackTo(self, level: int) -> None:  # noqa: N802
        while self._marks and self._marks[-1][0] > level:
            self._marks.pop()
        # A savepoint without a mark is older than our part in the transaction: there was nothing then.
        self._notes.cut(self._marks[-1][1] if self._marks and self._marks[-1][0] == level else (0, 0))
        self._participant.undo()

    def UpdateInsertRow(self, _rowid: int | None, _fields: tuple[Any, ...]) -> int:  # noqa: N802
        return 0


class TriggerSet:
    """The temporary triggers, three for each table, that make every statement that writes it enlist the virtual table.

    They never fire: being compiled into the statement is what enlists. That makes SQLite open a savepoint for each.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def create(self, connection: apsw.Connection, tables: Iterable[str]) -> None:
        """Those that are missing."""
        found = {(table, _event(name)) for name, table in self._list(connection)}
        for table, event in itertools.product(tables, _EVENTS):
            if (table, event) not in found:
                connection.execute(
                    f"CREATE TEMP TRIGGER {quoted(f'tailrace:{event}:{next(self._numbers)}')} "
                    f"AFTER {event} ON main.{quoted(table)} WHEN 0 BEGIN {ENLIST}; END"
                )

    def drop(self, connection: apsw.Connection, table: str | None = None, event: str | None = None) -> None:
        """All of them, or that of one table and event."""
        for name, of in self._list(connection):
            if table is None or (of.lower() == table.lower() and _event(name) == event):
                connection.execute(f"DROP TRIGGER temp.{quoted(name)}")

    def _list(self, connection: apsw.Connection) -> list[tuple[str, str]]:
        return [(str(name), str(table)) for name, table in connection.execute(_OURS).fetchall()]


def _event(name: str) -> str:
    return name.split(":")[1]
