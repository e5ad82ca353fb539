# ruff: noqa: S608 - every name in the SQL here is quoted
"""The numbering of a tape: forgetting what was consumed, and noticing when it was started over.

`change_id` begins again at 1 when a capture table is emptied or made anew. A reader that only remembers a number would
skip the new changes; so it remembers a `Mark`, and the row a mark stands for is never purged.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from tailrace.errors import LostError
from tailrace.sqlite.layout import CaptureConnection, has_table, quoted, read_version, side_tables, transaction

_ROWS = 8
_BYTES = 64


@dataclass(frozen=True)
class TapeMark:
    """How far a reader came: the last change it consumed, with checksums of the last rows up to it, by their ids.

    One row may look like another of the same second; several do not.
    """

    change_id: int
    rows: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return json.dumps([self.change_id, dict(self.rows)])

    @classmethod
    def parse(cls, text: str) -> TapeMark:
        """The inverse of `str`. Raises ValueError for any other text."""
        change_id, rows = json.loads(text)
        return cls(int(change_id), {str(row): int(checksum) for row, checksum in rows.items()})

    @property
    def is_on_tape(self) -> bool:
        """Whether the tape held the change itself when the mark was read."""
        return str(self.change_id) in self.rows


def read_tape_mark(connection: CaptureConnection, table: str, change_id: int) -> TapeMark:
    """The mark of a change, whether or not the tape holds it (any more)."""
    sql = (
        'SELECT change_id, change_time, change_type, table_name, id, length("before"), length("after"), '
        f'substr("before", 1, {_BYTES}), substr("after", 1, {_BYTES}) '
        f"FROM {quoted(table)} WHERE change_id <= ? ORDER BY change_id DESC LIMIT {_ROWS}"
    )
    rows = connection.execute(sql, (change_id,)).fetchall()
    return TapeMark(change_id, {str(row[0]): zlib.crc32(repr(tuple(row)).encode()) for row in rows})


def check_sequence(
    connection: CaptureConnection, table: str, mark: TapeMark, *, fix: str = "copy the tables again from nothing"
) -> None:
    """Raises LostError if the tape is not the one `mark` was read from, or no longer holds what comes after it.

    Rows before the first one there is now were purged, which is no reason to doubt the rest.
    """
    read_version(connection, table)
    first = connection.execute(f"SELECT min(change_id) FROM {quoted(table)}").fetchone()[0]
    why = None
    if not mark.rows:
        why = f"its changes before {first} were purged" if first is not None and first > mark.change_id + 1 else None
    elif first is None or first > mark.change_id:
        why = "the last change that was read is not on it"
    else:
        now = read_tape_mark(connection, table, mark.change_id).rows
        if any(now.get(row) != checksum for row, checksum in mark.rows.items() if int(row) >= first):
            why = "another change has the number of one that was read"
    if why is not None:
        raise LostError(
            f"the tape was started over or purged too far: {why}", fix=fix, table=table, position=str(mark.change_id)
        )


def purge(connection: CaptureConnection, upto: int, table: str) -> int:
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
