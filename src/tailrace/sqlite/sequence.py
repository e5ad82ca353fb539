# ruff: noqa: S608 - every name in the SQL here is quoted
"""The numbering of a tape: forgetting what was consumed, and noticing when it was started over.

`change_id` begins again at 1 when a capture table is emptied or made anew. A reader that only remembers a number would
skip the new changes; so it remembers a `Mark`, and the row a mark stands for is never purged.
"""

from __future__ import annotations

from typing import NamedTuple

from tailrace.errors import LostError
from tailrace.sqlite.layout import Connection, has_table, quoted, read_version, side_tables, transaction


class Mark(NamedTuple):
    """How far a reader came: the last change it consumed, with enough of the row to know it again."""

    change_id: int
    change_time: int
    change_type: int

    def __str__(self) -> str:
        return ":".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> Mark:
        """The inverse of `str`. Raises ValueError for any other text."""
        change_id, change_time, change_type = map(int, text.split(":"))
        return cls(change_id, change_time, change_type)


START = Mark(0, 0, 0)


def read_mark(connection: Connection, table: str, change_id: int) -> Mark | None:
    """The mark of a change; None if the tape does not hold it (any more)."""
    sql = f"SELECT change_id, coalesce(change_time, 0), change_type FROM {quoted(table)} WHERE change_id = ?"
    row = connection.execute(sql, (change_id,)).fetchone()
    return None if row is None else Mark(*map(int, row))


def check_sequence(connection: Connection, table: str, mark: Mark) -> None:
    """Raises LostError if the tape is not the one `mark` was read from, or no longer holds what comes after it."""
    read_version(connection, table)
    if mark.change_id == 0:
        first = connection.execute(f"SELECT min(change_id) FROM {quoted(table)}").fetchone()[0]
        if first is not None and first > 1:
            _lost(table, mark, f"its changes before {first} were purged")
        return
    found = read_mark(connection, table, mark.change_id)
    if found is None:
        _lost(table, mark, "the last change that was read is not on it")
    if found != mark:
        _lost(table, mark, "another change has that number now")


def _lost(table: str, mark: Mark, why: str) -> None:
    raise LostError(
        f"the tape was started over or purged too far: {why}",
        fix="copy the tables again from nothing",
        table=table,
        position=str(mark.change_id),
    )


def purge(connection: Connection, upto: int, table: str) -> int:
    """Forget the changes before `upto`; how many went. Repeating it is harmless.

    The row `upto` itself stays, and so does the last row of the tape whatever is asked: with them stays the number
    the next change gets, and a reader's mark.
    """
    read_version(connection, table)
    with transaction(connection):
        last = connection.execute(f"SELECT max(change_id) FROM {quoted(table)}").fetchone()[0]
        if last is None:
            return 0
        bound = min(upto, int(last))
        count = connection.execute(f"SELECT count(*) FROM {quoted(table)} WHERE change_id < ?", (bound,)).fetchone()[0]
        for name in (table, side_tables(table)[0]):
            if has_table(connection, name):
                connection.execute(f"DELETE FROM {quoted(name)} WHERE change_id < ?", (bound,))
    return int(count)
