"""WAL files in place, and copies of those that appear while a table is copied.

SlateDB deletes WAL files after `min_age`, whether or not a copy still runs. So the log is buffered from the moment a
copy begins until the table has caught up; each file is deleted once it is applied.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from tailrace.errors import LostError, TailraceError
from tailrace.source.slatedb.expiry_index import write_durably
from tailrace.source.slatedb.object_store import CollectedError, SlateDbDatabase
from tailrace.source.slatedb.wal import FileSummary, RemoteLog, read_files
from tailrace.source.slatedb.wal_archive import archived_bytes, archived_file, read_archived
from tailrace.source.slatedb.wal_tail import WalTail
from tailrace.system.atomic_file import make_folder

_PAUSE_SECONDS = 1.0
_LEAST_POLL_SECONDS = 0.01
_AT_ONCE = 16


def read_buffered(database: SlateDbDatabase, folder: str, first: int, last: int) -> list[pa.RecordBatch]:
    """The rows of the files first … last: the copies where there are some, else the files themselves.

    Raises CollectedError when one is gone.
    """
    found: dict[int, pa.RecordBatch] = {}
    for number in range(first, last + 1) if Path(folder).exists() else ():
        with suppress(LostError):
            found[number] = read_archived(folder, number)
    number = first
    while number <= last:
        end = number
        while end <= last and end not in found:
            end += 1
        if end > number:
            found |= dict(enumerate(read_files(database, number, end - 1), number))
        number = end + 1
    return [found[number] for number in range(first, last + 1)]


class BufferedLog(RemoteLog):
    """The log in place; from `hold` to `release`, a thread copies the files that appear, as long as there is room."""

    def __init__(self, database: SlateDbDatabase, folder: str, limit_bytes: int, poll_seconds: float) -> None:
        super().__init__(database)
        self._folder = Path(folder)
        self._limit = limit_bytes
        self._end = WalTail(database)
        self._poll_seconds = max(poll_seconds, _LEAST_POLL_SECONDS)
        self._floor = self._head = -1
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def tail(self, after: int) -> int:
        kept = self.kept(after)
        try:
            return max(kept, self._end.find(kept))
        except CollectedError:
            if kept == after:
                raise
            return kept

    def kept(self, after: int) -> int:
        return self._head if self._floor <= after < self._head else after

    def _summary(self, number: int) -> FileSummary:
        if self._floor < number <= self._head:
            with suppress(LostError):
                return FileSummary.of(read_archived(self._folder, number))
        return super()._summary(number)

    def hold(self, after: int) -> None:
        """Copy the files after `after`, beginning now. A second call goes on from what is there."""
        if self._thread is not None or not self._limit:
            return
        make_folder(self._folder)
        head = after
        while archived_file(self._folder, head + 1).exists():
            head += 1
        self._head, self._floor = head, after
        self._stopping.clear()
        self._thread = threading.Thread(target=self._fill, name="tailrace-wal-buffer", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Copy no more; what is there is read, and deleted once it is applied."""
        if self._thread is not None:
            self._stopping.set()
            self._thread.join()
            self._thread = None

    def stop(self) -> None:
        self.release()

    def _fill(self) -> None:
        end = WalTail(self._database)
        while not self._stopping.is_set():
            try:
                tail = end.find(self._head)
                if tail <= self._head:
                    self._stopping.wait(self._poll_seconds)
                    continue
                if archived_bytes(self._folder) >= self._limit:
                    self._stopping.wait(_PAUSE_SECONDS)
                    continue
                last = min(tail, self._head + _AT_ONCE)
                for number, rows in enumerate(read_files(self._database, self._head + 1, last), self._head + 1):
                    write_durably(archived_file(self._folder, number), rows)
                    self._head = number
            except TailraceError as error:
                if not error.retried:
                    return  # the reader finds the same gap where the buffer ends
                self._stopping.wait(_PAUSE_SECONDS)
            except OSError:
                # A full disk: the reader goes on with the files in place, as long as SlateDB keeps them.
                self._stopping.wait(_PAUSE_SECONDS)
