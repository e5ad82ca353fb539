"""The virtual table through which SQLite notifies a capture of savepoints, rollbacks and the coming commit."""

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
"""Enlists the virtual table in the transaction, whether it runs alone or as part of another statement."""

_EVENTS = ("INSERT", "UPDATE", "DELETE")
_OURS = "SELECT name, tbl_name FROM temp.sqlite_schema WHERE type = 'trigger' AND name LIKE 'tailrace:%'"


class Participant(Protocol):
    """What takes part in the transaction. Its notes grow, are cut back by savepoints, and are written at the end."""

    @property
    def notes(self) -> ChangeBuffer: ...
    def sync(self) -> None: ...
    def forget(self) -> None: ...
    def undo(self) -> None: ...


class Enlistment:
    """The virtual table module and, because it has a single table, that table too. Method names are SQLite's.

    After DDL, SQLite connects the table again in the middle of a transaction, with another Begin, and still calls the
    earlier connection as well. So each call may come twice, and only the first one for a savepoint counts.
    """

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._notes = participant.notes
        self._marks: list[tuple[int, Savepoint]] = []

    def Create(self, *_: Any) -> tuple[str, Enlistment]:  # noqa: N802
        return "CREATE TABLE x(y)", self

    Connect = Create

    def Disconnect(self) -> None:  # noqa: N802
        """There is nothing to release."""

    Destroy = Disconnect

    def BestIndex(self, *_: Any) -> None:  # noqa: N802
        """Called when SQLite lists all tables; this table is never read."""

    def Begin(self) -> None:  # noqa: N802
        """Keep the notes: those made before this call belong to the same transaction."""

    def Sync(self) -> None:  # noqa: N802
        self._participant.sync()

    def Commit(self) -> None:  # noqa: N802
        self._marks.clear()
        self._participant.forget()

    def Rollback(self) -> None:  # noqa: N802
        self.Commit()
        self._participant.undo()

    def Savepoint(self, level: int) -> None:  # noqa: N802
        # Called once or twice for every statement of a transaction, so it must be cheap.
        marks = self._marks
        if not marks or marks[-1][0] < level:
            marks.append((level, self._notes.mark()))

    def Release(self, level: int) -> None:  # noqa: N802
        while self._marks and self._marks[-1][0] >= level:
            self._marks.pop()

    def RollbackTo(self, level: int) -> None:  # noqa: N802
        while self._marks and self._marks[-1][0] > level:
            self._marks.pop()
        # A savepoint without a mark is older than our enlistment: at that time there were no notes.
        self._notes.cut(self._marks[-1][1] if self._marks and self._marks[-1][0] == level else (0, 0))
        self._participant.undo()

    def UpdateInsertRow(self, _rowid: int | None, _fields: tuple[Any, ...]) -> int:  # noqa: N802
        return 0


class TriggerSet:
    """The temporary triggers, three per table, through which every writing statement enlists the virtual table.

    They never fire: it is enough that they are compiled into the statement. But because of them SQLite opens a
    savepoint for each statement.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def create(self, connection: apsw.Connection, tables: Iterable[str]) -> None:
        """Create the triggers that are missing."""
        found = {(table, _event(name)) for name, table in self._list(connection)}
        for table, event in itertools.product(tables, _EVENTS):
            if (table, event) not in found:
                connection.execute(
                    f"CREATE TEMP TRIGGER {quoted(f'tailrace:{event}:{next(self._numbers)}')} "
                    f"AFTER {event} ON main.{quoted(table)} WHEN 0 BEGIN {ENLIST}; END"
                )

    def drop(self, connection: apsw.Connection, table: str | None = None, event: str | None = None) -> None:
        """Drop all triggers, or the one of a table and event."""
        for name, of in self._list(connection):
            if table is None or (of.lower() == table.lower() and _event(name) == event):
                connection.execute(f"DROP TRIGGER temp.{quoted(name)}")

    def _list(self, connection: apsw.Connection) -> list[tuple[str, str]]:
        return [(str(name), str(table)) for name, table in connection.execute(_OURS).fetchall()]


def _event(name: str) -> str:
    return name.split(":")[1]
