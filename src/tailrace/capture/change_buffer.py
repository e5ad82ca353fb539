"""A buffer for the changes of an open transaction, in order, until they are written to the tape.

Many consecutive changes of one kind in one table form a run. A run keeps its values in one flat list, row after row,
which costs the application least. A run that gets long is encoded as records right away, while it is still in the
processor's cache. Small transactions never import the modules that this needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

from tailrace.capture.change import describe_update
from tailrace.capture.layout import INSERT
from tailrace.capture.record import encode, split

if TYPE_CHECKING:
    from tailrace.capture.record_encode import Records

STREAK = 32
"""A run begins after this number of consecutive changes of one kind in one table."""
LONG = 4096
"""A run of this length is encoded as records at once."""
WORTH = 512
"""At the end of a transaction, shorter runs are not worth encoding together."""

Savepoint = tuple[int, int]
RecordImage = bytes | None
ChangeColumns = tuple[
    Iterable[int], Iterable[str], Iterable[int], Iterable[RecordImage], Iterable[RecordImage], Iterable[RecordImage]
]
"""Types, tables, rowids, and the records before, after and updates. A constant column may be an endless iterable."""


class LooseChanges(list[tuple[int, str, int, Sequence[Any] | None, Sequence[Any] | None]]):
    """Changes of any kind, each as type, table, rowid, old values and new values."""

    def cut(self, length: int) -> None:
        del self[length:]

    def columns(self) -> ChangeColumns:
        kinds, tables, rowids, olds, news = zip(*self, strict=True)
        images = self._describe_by_table() if len(self) >= WORTH else map(_describe, olds, news)
        befores, afters, updates = zip(*images, strict=True)
        return kinds, tables, rowids, befores, afters, updates

    def _describe_by_table(self) -> Iterable[tuple[RecordImage, RecordImage, RecordImage]]:
        runs: dict[tuple[int, str], ChangeRun] = {}
        for kind, table, rowid, old, new in self:
            if (run := runs.get((kind, table))) is None:
                run = runs[kind, table] = ChangeRun(kind, table, keeps_new=False)
            run.add(rowid, old, new)
        described = {key: zip(*_shorten(run).columns()[3:], strict=False) for key, run in runs.items()}
        return (next(described[kind, table]) for kind, table, *_ in self)


def _describe(old: Sequence[Any] | None, new: Sequence[Any] | None) -> tuple[RecordImage, RecordImage, RecordImage]:
    if old is not None and new is not None:
        return describe_update(split(old), split(new))
    return None if old is None else encode(old), None if new is None else encode(new), None


class ChangeRun:
    """Consecutive changes of one kind in one table. `old` and `new` are empty if the mode does not keep them."""

    __slots__ = ("inserts", "kind", "new", "old", "rowids", "table")

    def __init__(self, kind: int, table: str, *, keeps_new: bool) -> None:
        self.kind = kind
        self.table = table
        self.inserts = table if kind == INSERT and keeps_new else None
        self.rowids: list[int] = []
        self.old: list[Any] = []
        self.new: list[Any] = []

    def __len__(self) -> int:
        return len(self.rowids)

    def add(self, rowid: int, old: Sequence[Any] | None, new: Sequence[Any] | None) -> None:
        if old is not None:
            self.old += old
        if new is not None:
            self.new += new
        self.rowids.append(rowid)

    def cut(self, length: int) -> None:
        for values in (self.old, self.new):
            del values[length * (len(values) // len(self.rowids)) :]
        del self.rowids[length:]

    def columns(self) -> ChangeColumns:
        if self.old and self.new:
            befores, afters, updates = zip(*map(_describe, self._rows(self.old), self._rows(self.new)), strict=True)
            return repeat(self.kind), repeat(self.table), self.rowids, befores, afters, updates
        return (
            repeat(self.kind),
            repeat(self.table),
            self.rowids,
            map(encode, self._rows(self.old)) if self.old else repeat(None),
            map(encode, self._rows(self.new)) if self.new else repeat(None),
            repeat(None),
        )

    def _rows(self, values: list[Any]) -> list[list[Any]]:
        width = len(values) // len(self.rowids)
        return [values[at : at + width] for at in range(0, len(values), width)]

    def values(self, values: list[Any]) -> list[list[Any]]:
        """The values of each column of the table."""
        width = len(values) // len(self.rowids)
        return [values[place::width] for place in range(width)]


class ChangeBatch:
    """A run encoded as records, in the same order."""

    def __init__(self, run: ChangeRun, images: tuple[Records | None, Records | None, Records | None]) -> None:
        self.kind, self.table, self.rowids = run.kind, run.table, run.rowids
        self.images = images

    def __len__(self) -> int:
        return len(self.rowids)

    def cut(self, length: int) -> None:
        del self.rowids[length:]
        before, after, updates = (None if image is None else image[:length] for image in self.images)
        self.images = before, after, updates

    def columns(self) -> ChangeColumns:
        before, after, updates = (repeat(None) if image is None else image.to_pylist() for image in self.images)
        return repeat(self.kind), repeat(self.table), self.rowids, before, after, updates


class SingleChange:
    """One change that is already encoded as records."""

    def __init__(self, kind: int, table: str, rowid: int, images: tuple[RecordImage, RecordImage, RecordImage]) -> None:
        before, after, updates = images
        self._columns = [kind], [table], [rowid], [before], [after], [updates]

    def __len__(self) -> int:
        return len(self._columns[0])

    def cut(self, length: int) -> None:
        for column in self._columns:
            del column[length:]

    def columns(self) -> ChangeColumns:
        return self._columns


BufferedChange = LooseChanges | ChangeRun | ChangeBatch | SingleChange


class ChangeBuffer:
    """The changes of one transaction. `run` is the run that the next change may extend."""

    def __init__(self, *, keeps_new: bool) -> None:
        self.entries: list[BufferedChange] = []
        self._keeps_new = keeps_new
        self._none = ChangeRun(0, "", keeps_new=False)
        self.run = self._none
        self._loose: LooseChanges | None = None
        self._last_table, self._last_kind, self._streak = "", 0, 0

    def __len__(self) -> int:
        return sum(map(len, self.entries))

    def add(self, kind: int, table: str, rowid: int, old: Sequence[Any] | None, new: Sequence[Any] | None) -> None:
        run = self.run
        if run.table != table or run.kind != kind:
            self._streak = self._streak + 1 if self._last_table == table and self._last_kind == kind else 1
            if self._streak <= STREAK:
                self._last_table, self._last_kind = table, kind
                if self._loose is None:
                    self.close()
                    self._loose = LooseChanges()
                    self.entries.append(self._loose)
                self._loose.append((kind, table, rowid, old, new))
                if len(self._loose) >= LONG:
                    # Start a new entry: all records of one entry are in memory at the same time.
                    self._loose = None
                return
            self.close()
            run = self.run = ChangeRun(kind, table, keeps_new=self._keeps_new)
            self.entries.append(run)
        run.add(rowid, old, new)
        if len(run.rowids) >= LONG:
            self.close()

    def add_single(self, single: SingleChange) -> None:
        self.close()
        self.entries.append(single)

    def close(self) -> None:
        """Close the current entry, so that the next change starts a new one. A long run is encoded as records."""
        run, self.run, self._loose = self.run, self._none, None
        if run is not self._none:
            self.entries[-1] = _shorten(run)

    def mark(self) -> Savepoint:
        """The current end of the buffer, to `cut` back to."""
        entries = self.entries
        return (len(entries), len(entries[-1])) if entries else (0, 0)

    def cut(self, mark: Savepoint) -> None:
        """Drop the changes that were added after that mark."""
        count, length = mark
        self.run, self._loose, self._streak = self._none, None, 0
        del self.entries[count:]
        if count and len(self.entries[-1]) > length:
            self.entries[-1].cut(length)

    def clear(self) -> None:
        self.cut((0, 0))


def _shorten(run: ChangeRun) -> ChangeRun | ChangeBatch:
    """The run encoded as records; the run itself if it is short or its rows are very wide or long."""
    if len(run) < WORTH:
        return run
    from tailrace.capture.record_encode import describe_updates, encode_columns

    if run.old and run.new:
        images = describe_updates(run.values(run.old), run.values(run.new))
        return run if images is None else ChangeBatch(run, images)
    if not run.old and not run.new:
        return ChangeBatch(run, (None, None, None))
    encoded = encode_columns(run.values(run.old or run.new))
    if encoded is None:
        return run
    return ChangeBatch(run, (encoded, None, None) if run.old else (None, encoded, None))
