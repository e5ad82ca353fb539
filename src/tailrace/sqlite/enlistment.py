"""The virtual table through which SQLite tells a capture of savepoints, rollbacks and the coming commit."""

from __future__ import annotations

from typing import Any, Protocol

MODULE = "tailrace_enlistment"
VIRTUAL_TABLE = "tailrace_enlistment"


class Participant(Protocol):
    """Who takes part in the transaction: a list that grows, is cut back by savepoints, and is written at the end."""

    @property
    def noted(self) -> list[Any]: ...
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
        self._noted = participant.noted
        self._marks: list[tuple[int, int]] = []

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
        if not self._marks or self._marks[-1][0] < level:
            self._marks.append((level, len(self._noted)))

    def Release(self, level: int) -> None:  # noqa: N802
        while self._marks and self._marks[-1][0] >= level:
            self._marks.pop()

    def RollbackTo(self, level: int) -> None:  # noqa: N802
        while self._marks and self._marks[-1][0] > level:
            self._marks.pop()
        # A savepoint without a mark is older than our part in the transaction: the list was empty then.
        length = self._marks[-1][1] if self._marks and self._marks[-1][0] == level else 0
        del self._noted[length:]
        self._participant.undo()

    def UpdateInsertRow(self, _rowid: int | None, _fields: tuple[Any, ...]) -> int:  # noqa: N802
        return 0
