# ruff: noqa: S608 - every name in the SQL here is quoted
"""Write the changes of a transaction to the tape, inside that transaction.

One statement inserts a whole batch: SQLite iterates over an array of numbers, one per change, and cuts each record out
of one large blob. That costs less than half as much as binding every value from Python.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import repeat
from typing import TYPE_CHECKING, Any

from tailrace.capture import layout
from tailrace.capture.change_buffer import BufferedChange, ChangeBatch
from tailrace.capture.layout import COMMIT, CdcVersion, quoted

if TYPE_CHECKING:
    import apsw

_IMAGES = ("before", "after", "updates")
_BITS = 63
_RECORD = "substr(:records, (value >> :length_bits & :start_mask) + 1, value & :length_mask)"


@cache
def _insert(table: str, version: CdcVersion) -> tuple[str, str]:
    """The beginning of an INSERT into the tape, and the whole INSERT of a single row."""
    columns = layout.COLUMNS[version]
    into = f"INSERT INTO {quoted(table)} ({', '.join(map(quoted, columns))})"
    return into, f"{into} VALUES ({', '.join('?' * len(columns))})"


class TapeWriter:
    """Writes one transaction to a capture table of this version."""

    def __init__(self, connection: apsw.Connection, table: str, version: CdcVersion) -> None:
        self._connection = connection
        self._table = table
        self._columns = layout.COLUMNS[version]
        self._has_transactions = version.has_commit_record
        self._into, self._one = _insert(table, version)
        self._first = self._next = 0
        self._now = int(time.time())
        self._packed: tuple[str, dict[str, Any]] | None = None

    @property
    def _longest(self) -> int:
        """The maximum size of one value on this connection, in bytes."""
        import apsw

        return self._connection.limit(apsw.SQLITE_LIMIT_LENGTH)

    def next_id(self) -> int:
        """The id of the next change, one that was never used before."""
        sql = (
            "SELECT max(coalesce((SELECT seq FROM sqlite_sequence WHERE name = ?), 0), "
            f"coalesce((SELECT max(change_id) FROM {quoted(self._table)}), 0)) + 1"
        )
        return int(next(self._connection.execute(sql, (self._table,)))[0])

    def erase(self, first: int) -> None:
        """Delete this change and all later ones from the tape."""
        self._connection.execute(f"DELETE FROM {quoted(self._table)} WHERE change_id >= ?", (first,))

    def write(self, entries: Iterable[BufferedChange], first: int) -> None:
        """Write all changes, with ids from `first` on, and the COMMIT row if the tape has transaction ids."""
        self._first = self._next = first
        remaining = iter(entries)
        self._connection.executemany(self._one, self._rows(remaining))
        while self._packed is not None:
            self._connection.execute(*self._packed)
            self._connection.executemany(self._one, self._rows(remaining))

    def _rows(self, entries: Iterator[BufferedChange]) -> Iterator[tuple[Any, ...]]:
        """The rows to insert one by one, up to the next batch that can be packed into one statement."""
        self._packed = None
        same = (self._now, self._first) if self._has_transactions else (self._now,)
        for entry in entries:
            if isinstance(entry, ChangeBatch) and (packed := self._pack(entry)) is not None:
                self._packed = packed
                return
            begin, self._next = self._next, self._next + len(entry)
            yield from zip(range(begin, self._next), *map(repeat, same), *entry.columns(), strict=False)
        if self._has_transactions:
            yield self._next, *same, COMMIT, None, None, None, None, None

    def _pack(self, batch: ChangeBatch) -> tuple[str, dict[str, Any]] | None:
        """The statement that writes this batch, and its bindings; None if the batch cannot be packed."""
        if not _has_arrays() or (places := _place(batch)) is None or len(places["records"]) > self._longest:
            return None
        terms = {
            "change_id": "rowid + :change",
            "change_time": ":now",
            "change_txn_id": ":first",
            "change_type": ":kind",
            "table_name": ":table",
            "id": ":lowest + (value >> :id_shift)",
            **{name: "NULL" if image is None else _RECORD for name, image in zip(_IMAGES, batch.images, strict=True)},
        }
        same = {
            "change": self._next - 1,
            "now": self._now,
            "first": self._first,
            "kind": batch.kind,
            "table": batch.table,
        }
        self._next += len(batch)
        sql = f"{self._into} SELECT {', '.join(terms[name] for name in self._columns)} FROM carray(:places)"
        return sql, same | places


def _has_arrays() -> bool:
    import apsw

    return hasattr(apsw, "carray") and "ENABLE_CARRAY" in apsw.compile_options


def _place(batch: ChangeBatch) -> dict[str, Any] | None:
    """One number per change that holds its rowid and the location of its record; None if they do not fit.

    From the highest bits to the lowest: the rowid minus the lowest rowid, the offset of the record, its length.
    """
    import apsw
    import numpy as np

    images = [image for image in batch.images if image is not None]
    if len(images) > 1:
        return None
    rowids = np.array(batch.rowids, np.int64)
    lowest, highest = int(rowids.min()), int(rowids.max())
    bounds, records = np.zeros(len(rowids) + 1, np.int64), b""
    if images:
        _, offsets, records = images[0].buffers()
        bounds = np.frombuffer(offsets, np.int32, len(rowids) + 1).astype(np.int64)
    lengths = np.diff(bounds)
    length_bits = int(lengths.max()).bit_length()
    id_shift = length_bits + int(bounds[-1]).bit_length()
    if (highest - lowest).bit_length() + id_shift > _BITS:
        return None
    places = (rowids - lowest) << id_shift | bounds[:-1] << length_bits | lengths
    return {
        "places": apsw.carray(places),
        "records": records,
        "lowest": lowest,
        "id_shift": id_shift,
        "length_bits": length_bits,
        "start_mask": (1 << (id_shift - length_bits)) - 1,
        "length_mask": (1 << length_bits) - 1,
    }
