"""Copies WAL files to our own folder as they appear, for readers slower than the writer's garbage collector.

Each file becomes an Arrow file of its rows under its number, complete or not at all. A thread of the follower copies;
tasks read the copies, which costs a fraction of reading the WAL itself.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from tailrace.errors import RESYNC, LostError, TailraceError, UnavailableError
from tailrace.source.slatedb.expiry_index import write_durably
from tailrace.source.slatedb.object_store import CollectedError, SlateDbDatabase
from tailrace.source.slatedb.wal import ROWS, FileSummary, read_files
from tailrace.source.slatedb.wal_tail import WalTail
from tailrace.system.atomic_file import make_folder, replace_durably

_PAUSE_SECONDS = 1.0
_LEAST_POLL_SECONDS = 0.01
_AT_ONCE = 64
_FLOOR = "floor"
"""Names the file after which nothing is deleted while a table is copied."""


def archived_file(folder: str | Path, number: int) -> Path:
    return Path(folder) / f"{number:020}.arrow"


def read_archived(folder: str | Path, number: int) -> pa.RecordBatch:
    """The rows of a file that was kept. Raises LostError when it is gone."""
    try:
        with pa.memory_map(str(archived_file(folder, number))) as file:
            table = pa.ipc.open_file(file).read_all()
    except FileNotFoundError as error:
        raise LostError(
            f"the copy of WAL file {number} is gone from {folder}", fix=f"put it back, or {RESYNC}"
        ) from error
    found: list[pa.RecordBatch] = table.combine_chunks().to_batches()
    return found[0] if found else pa.RecordBatch.from_arrays([pa.array([], f.type) for f in ROWS], schema=ROWS)


def archived_numbers(folder: str | Path) -> list[int]:
    return sorted(int(path.stem) for path in Path(folder).glob("[0-9]*.arrow"))


def remove_archived(folder: str | Path, upto: int, *, keep_last: bool = True) -> None:
    """Remove the copies up to a number; `keep_last` keeps the very last one, which shows where to continue."""
    with suppress(FileNotFoundError):
        upto = min(upto, int((Path(folder) / _FLOOR).read_text()))
    numbers = archived_numbers(folder)
    for number in numbers[:-1] if keep_last else numbers:
        if number <= upto:
            archived_file(folder, number).unlink(missing_ok=True)


def archived_bytes(folder: str | Path) -> int:
    """How much disk the copies take; files that are deleted meanwhile do not count."""
    total = 0
    for path in Path(folder).glob("[0-9]*.arrow"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


class WalArchive:
    """Copies the files after `after`, or after the last existing copy if that is newer, in a thread of its own.

    There may be older copies before a gap: they are read as long as something needs them.
    """

    def __init__(
        self, database: SlateDbDatabase, folder: str, after: int, poll_seconds: float, *, is_past_gap: bool = False
    ) -> None:
        self._database = database
        self._folder = Path(folder)
        self._poll_seconds = max(poll_seconds, _LEAST_POLL_SECONDS)
        make_folder(self._folder)
        # Without a gap the last copy is where it continues, even if SlateDB has flushed more meanwhile.
        self.head = max([*archived_numbers(folder), *([after] if is_past_gap else [])], default=after)
        self._end = WalTail(database)
        self._error: TailraceError | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._archive, name="tailrace-keep-wal", daemon=True)
        self._thread.start()

    def tail(self, after: int) -> int:
        """The last file that is kept. Raises the error that stopped the copying, once everything before it is read."""
        if self._error is not None and self.head <= after:
            raise self._error
        return self.head

    def summary(self, number: int) -> FileSummary:
        try:
            return FileSummary.of(read_archived(self._folder, number))
        except LostError as error:
            raise CollectedError(error.message, fix=error.fix) from error

    def kept(self, after: int) -> int:
        return max(after, self.head)

    def hold(self, after: int) -> None:
        """Keep the files after `after`, including those before the first copy, until `release`."""
        replace_durably(self._folder / _FLOOR, b"%d" % after)
        first = self.head + 1
        while archived_file(self._folder, first - 1).exists():
            first -= 1
        # Backwards, so that an interruption leaves no gap between the copies.
        for number in range(first - 1, after, -1):
            [rows] = read_files(self._database, number, number)
            write_durably(archived_file(self._folder, number), rows)

    def release(self) -> None:
        (self._folder / _FLOOR).unlink(missing_ok=True)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _archive(self) -> None:
        while not self._stopping.is_set():
            try:
                tail = self._end.find(self.head)
                self._error = None
                if tail <= self.head:
                    self._stopping.wait(self._poll_seconds)
                    continue
                last = min(tail, self.head + _AT_ONCE)
                for number, rows in enumerate(read_files(self._database, self.head + 1, last), self.head + 1):
                    write_durably(archived_file(self._folder, number), rows)
                    self.head = number
            except TailraceError as error:
                self._error = error
                if not error.retried:
                    return
                self._stopping.wait(_PAUSE_SECONDS)
            except OSError as error:
                self._error = UnavailableError(f"cannot copy WAL files to {self._folder}: {error.strerror}")
                self._stopping.wait(_PAUSE_SECONDS)
