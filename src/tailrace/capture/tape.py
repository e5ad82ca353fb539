# ruff: noqa: S608 - every name in the SQL here is quoted
"""Read the tape: the changes in a capture table, in order, in batches or in transactions.

It reads through any connection (sqlite3, apsw, pyturso), whether Turso, a captured connection or triggers wrote the
changes.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tailrace.capture import layout
from tailrace.capture.change import CapturedChange, compare_images
from tailrace.capture.layout import (
    COMMIT,
    DEFAULT_TABLE,
    DELETE,
    INSERT,
    UPDATE,
    CaptureConnection,
    CdcVersion,
    has_table,
    quoted,
    read_version,
    side_tables,
    transaction,
)
from tailrace.capture.record import encode
from tailrace.capture.trigger import read_status
from tailrace.errors import DamagedError, LostError, SchemaChangedError

BATCH_CHANGES = 1000
_NAMES = {INSERT: "insert", UPDATE: "update", DELETE: "delete"}


@dataclass(frozen=True)
class TapeTransaction:
    """The changes of one transaction, without its COMMIT row; `last` is the id of the transaction's last row."""

    txn_id: int | None
    changes: tuple[CapturedChange, ...]
    last: int

    @property
    def time(self) -> int | None:
        return self.changes[-1].change_time if self.changes else None


@dataclass(frozen=True)
class Statistics:
    """Counts of what is on the tape. `cdc_operations` counts changes, without COMMIT records, as Turso does."""

    cdc_operations: int
    transactions: int
    first: int | None
    last: int | None
    tables: dict[str, dict[str, int]]


class Tape:
    """Reads a capture table. Raises PreflightError if it does not exist or its version is not known."""

    def __init__(self, connection: CaptureConnection, table: str = DEFAULT_TABLE) -> None:
        self._connection = connection
        self.table = table
        self.version = layout.read_version(connection, table)
        self.by_triggers = self.version is CdcVersion.TRIGGERS

    def require_complete(self) -> None:
        """Raise SchemaChangedError if triggers write this tape and it lacks DDL that was run since `enable`."""
        if self.by_triggers and read_status(self._connection).pending:
            raise SchemaChangedError(
                "the schema was changed after the triggers were created",
                fix="tailrace sqlite enable FILE",
                table=self.table,
            )

    def iterate(
        self, after: int = 0, *, batch: int = BATCH_CHANGES, ignore_schema_changes: bool = True
    ) -> Iterator[list[CapturedChange]]:
        """The changes after `after` in batches of at most `batch` rows. Repeatable, from any change.

        COMMIT rows are included, even when schema changes are left out. If the tape has none (v1, triggers), one is
        added at the end of each batch: whatever a read sees was committed. Raises DamagedError for an invalid row.
        """
        while rows := self._fetch(after, batch):
            after = rows[-1].change_id
            kept = [row for row in rows if not (ignore_schema_changes and row.is_schema)]
            if not self.version.has_commit_record:
                kept.append(CapturedChange(after, rows[-1].change_time, None, COMMIT, None, None, None, None, None))
            yield kept

    def transactions(
        self, after: int = 0, *, batch: int = BATCH_CHANGES, ignore_schema_changes: bool = True
    ) -> Iterator[TapeTransaction]:
        """The complete transactions after `after` that changed something.

        Rows are grouped by transaction id, not by COMMIT row, because triggers and cascades in Turso write a COMMIT
        row in the middle of a transaction. A transaction without a COMMIT row is still open and is left out.
        """
        group: list[CapturedChange] = []
        for rows in self.iterate(after, batch=batch, ignore_schema_changes=ignore_schema_changes):
            for row in rows:
                # A statement that changes nothing commits with the id -1.
                if group and row.txn_id != group[0].txn_id:
                    yield from _close(group)
                    group = []
                group.append(row)
                if row.type == COMMIT and row.txn_id is None:
                    yield from _close(group)
                    group = []
        yield from _close(group)

    def count_after(self, change_id: int) -> int:
        """How many rows come after this change, including COMMIT rows."""
        sql = f"SELECT count(*) FROM {quoted(self.table)} WHERE change_id > ?"
        return int(self._connection.execute(sql, (change_id,)).fetchone()[0])

    def statistics(self) -> Statistics:
        table = quoted(self.table)
        count, first, last = self._connection.execute(
            f"SELECT count(CASE WHEN change_type <> {COMMIT} THEN 1 END), min(change_id), max(change_id) FROM {table}"
        ).fetchone()
        tables: dict[str, dict[str, int]] = {}
        transactions = 0
        for name, kind, rows in self._connection.execute(
            f"SELECT table_name, change_type, count(*) FROM {table} GROUP BY 1, 2 ORDER BY 1, 2"
        ).fetchall():
            if kind in _NAMES:
                tables.setdefault(str(name), {})[_NAMES[kind]] = int(rows)
        if self.version.has_commit_record:
            sql = f"SELECT count(DISTINCT change_txn_id) FROM {table} WHERE change_txn_id > 0"
            transactions = int(self._connection.execute(sql).fetchone()[0])
        return Statistics(int(count), transactions, first, last, tables)

    def _fetch(self, after: int, limit: int) -> list[CapturedChange]:
        names = [f"tape.{quoted(name)}" for name in layout.COLUMNS_V2]
        if self.version is CdcVersion.V1:
            names[2] = "NULL"
        source = f"{quoted(self.table)} AS tape"
        if self.by_triggers:
            image = layout.side_tables(self.table)[0]
            names.append("image.*")
            source += f" LEFT JOIN {quoted(image)} AS image ON image.change_id = tape.change_id"
        sql = f"SELECT {', '.join(names)} FROM {source} WHERE tape.change_id > ? ORDER BY tape.change_id LIMIT ?"
        return [self._read(row) for row in self._connection.execute(sql, (after, limit)).fetchall()]

    def _read(self, row: tuple[Any, ...]) -> CapturedChange:
        change_id, change_time, txn_id, kind, table, rowid, before, after, updates, *image = row
        if kind not in (INSERT, UPDATE, DELETE, COMMIT):
            raise DamagedError(f"a change has the unknown type {kind!r}", table=self.table, position=str(change_id))
        if self.by_triggers and txn_id is not None:
            raise DamagedError(
                "triggers and another capture both write to this tape, so changes are on it twice",
                fix="stop one of them, then copy the tables again from the start",
                table=self.table,
                position=str(change_id),
            )
        if image and image[0] is not None:
            before, after, updates = _native_images(kind, image[1], image[2], image[3:])
        elif self.by_triggers and kind == UPDATE and table != layout.SCHEMA_TABLE:
            updates = compare_images(before, after)
        return CapturedChange(change_id, change_time, txn_id, kind, table, rowid, before, after, updates).normal()


def _native_images(
    kind: int, before_width: int | None, after_width: int | None, cells: list[Any]
) -> tuple[bytes | None, bytes | None, bytes | None]:
    split = before_width or 0
    before = None if before_width is None else encode(cells[:split])
    after = None if after_width is None else encode(cells[split : split + after_width])
    return before, after, compare_images(before, after) if kind == UPDATE else None


def _close(group: list[CapturedChange]) -> Iterator[TapeTransaction]:
    changes = tuple(row for row in group if row.type != COMMIT)
    if changes and len(changes) < len(group):
        yield TapeTransaction(group[0].txn_id, changes, group[-1].change_id)


# Purging consumed changes, and detecting that a tape was started over.
#
# `change_id` starts again at 1 when a capture table is emptied or created again. A reader that stored only a number
# would skip the new changes. So it stores a `TapeMark`, and the row that a mark identifies is never purged.

_ROWS = 8
_BYTES = 64


@dataclass(frozen=True)
class TapeMark:
    """A reader's position: the last change it consumed, and checksums of the last rows up to it, by their ids.

    It takes several rows, because a single row may look like another one of the same second.
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
    """The mark of a change, whether or not the tape still holds the change."""
    sql = (
        'SELECT change_id, change_time, change_type, table_name, id, length("before"), length("after"), '
        f'substr("before", 1, {_BYTES}), substr("after", 1, {_BYTES}) '
        f"FROM {quoted(table)} WHERE change_id <= ? ORDER BY change_id DESC LIMIT {_ROWS}"
    )
    rows = connection.execute(sql, (change_id,)).fetchall()
    return TapeMark(change_id, {str(row[0]): zlib.crc32(repr(tuple(row)).encode()) for row in rows})


def check_sequence(
    connection: CaptureConnection, table: str, mark: TapeMark, *, fix: str = "copy the tables again from the start"
) -> None:
    """Raise LostError if `mark` was read from another tape, or this tape no longer holds all changes after it.

    Missing rows before the tape's first row were purged; that does not make the rest invalid.
    """
    read_version(connection, table)
    first = connection.execute(f"SELECT min(change_id) FROM {quoted(table)}").fetchone()[0]
    why = None
    if not mark.rows:
        why = f"its changes before {first} were purged" if first is not None and first > mark.change_id + 1 else None
    elif first is None or first > mark.change_id:
        why = "it does not hold the last change that was read"
    else:
        now = read_tape_mark(connection, table, mark.change_id).rows
        if any(now.get(row) != checksum for row, checksum in mark.rows.items() if int(row) >= first):
            why = "a different change has the id of one that was read"
    if why is not None:
        raise LostError(
            f"the tape was started over or purged too far: {why}", fix=fix, table=table, position=str(mark.change_id)
        )


def purge(connection: CaptureConnection, upto: int, table: str) -> int:
    """Delete the changes before `upto` and return how many were deleted. Safe to repeat.

    The row `upto` itself always stays, and so does the last row of the tape: they preserve the id of the next change
    and the marks of readers.
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
