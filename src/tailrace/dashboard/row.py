"""Rows of the table list, and which of them changed since a version."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tailrace.dashboard.answer import JsonAnswer, encode
from tailrace.state import TableState
from tailrace.state.status import TableStatus

Group = Literal["errored", "paused", "copying", "following"]
"""How the page groups tables: in error; paused; on their way; following."""

GROUPS: tuple[Group, ...] = ("errored", "paused", "copying", "following")


def group_of(table: TableStatus) -> Group:
    if table.state is TableState.ERRORED:
        return "errored"
    if table.paused_at is not None:
        return "paused"
    return "following" if table.state in (TableState.READY, TableState.SYNC_DONE) else "copying"


def row_of(table: TableStatus, hours: Sequence[int] = ()) -> dict[str, Any]:
    """One table in the list. `hours` are the changes of the last hours, oldest first."""
    left = None
    if table.state is TableState.DATA_SYNC and table.rows_total and table.rows_per_second:
        left = round(max(0, table.rows_total - table.rows_copied) / table.rows_per_second)
    return {
        "id": table.upstream_id,
        "name": table.name,
        "state": table.state.value,
        "group": group_of(table),
        "since": table.entered_at.isoformat(),
        "paused_at": table.paused_at.isoformat() if table.paused_at else None,
        "rows_copied": table.rows_copied,
        "rows_total": table.rows_total,
        "seconds_left": left,
        "changes_applied": table.changes_applied,
        "inserts": table.counts.inserts,
        "updates": table.counts.updates,
        "deletes": table.counts.deletes,
        "rows_per_second": rounded(table.rows_per_second),
        "lag_bytes": table.lag_bytes,
        "lag_seconds": rounded(table.lag_seconds),
        "letters": table.letters,
        "code": table.code,
        "reason": table.reason,
        "retry": table.retry,
        "attempts": table.attempts,
        "next_try": table.next_try.isoformat() if table.next_try else None,
        "version": table.version,
        "hours": list(hours),
    }


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


_KEPT_ANSWERS = 16
"""Viewers ask for what changed since one of the last few versions."""


class RowLog:
    """The rows as they are now, and at which version each last changed.

    A version is a text that no other log has given: after a restart of the server everyone gets all rows again.
    """

    def __init__(self) -> None:
        self._life = secrets.token_hex(4)
        self._number = 0
        self._rows: dict[str, tuple[int, str]] = {}
        self._gone: dict[str, int] = {}
        self._answers: dict[int | None, JsonAnswer] = {}

    @property
    def version(self) -> str:
        return f"{self._life}-{self._number}"

    def update(self, encoded: Mapping[str, str]) -> None:
        """Take the rows by their ids, as JSON. The version grows where one of them is new, different or gone."""
        changed = [key for key, text in encoded.items() if key not in self._rows or self._rows[key][1] != text]
        gone = self._rows.keys() - encoded.keys()
        if not changed and not gone and self._number:
            return
        self._number += 1
        for key in changed:
            self._rows[key] = (self._number, encoded[key])
            self._gone.pop(key, None)
        for key in gone:
            del self._rows[key]
            self._gone[key] = self._number
        self._answers.clear()

    def since(self, version: str | None) -> JsonAnswer:
        """The rows that changed after a version; all of them where the version is not known."""
        life, _, number = (version or "").rpartition("-")
        is_known = life == self._life and number.isascii() and number.isdigit() and len(number) < 20
        after = int(number) if is_known and int(number) <= self._number else None
        if after not in self._answers:
            if len(self._answers) > _KEPT_ANSWERS:
                self._answers.clear()
            self._answers[after] = self._encode(after)
        return self._answers[after]

    def _encode(self, after: int | None) -> JsonAnswer:
        rows = [text for number, text in self._rows.values() if after is None or number > after]
        gone = [key for key, number in self._gone.items() if after is not None and number > after]
        head = {"version": self.version, "complete": after is None, "total": len(self._rows), "gone": gone}
        body = f'{encode(head)[:-1]},"tables":[{",".join(rows)}]}}'
        return JsonAnswer(body.encode(), self.version if after is None else f"{self.version}-{after}")
