"""A file that a server serves: its current revision, its pages in any revision that is kept, and pushes to it.

The file stays an ordinary SQLite file in WAL mode, which other programs may read and write. An open read transaction
(the pin) keeps SQLite from overwriting the log before its pages are recorded: `advance` opens the next pin, records
what was committed since, and only then ends the last one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import apsw

from tailrace.errors import ConfigError, OwnedError, PreflightError, UnavailableError
from tailrace.sync.file_error import naming
from tailrace.sync.page_history import PageHistory, digest
from tailrace.sync.preflight import require_servable
from tailrace.sync.sql_batch import SqlBatch
from tailrace.sync.wal import WalScan, WalState
from tailrace.system import failpoint, turso_lock
from tailrace.system.file_lock import try_lock
from tailrace.system.side_file import make_side_file

HISTORY_BYTES = 256 << 20
_CHUNK_PAGES = 256
_BUSY_MILLISECONDS = 10_000
_LOG_FRAMES = 1000
"""From how many frames on the log is written back to the file, so that SQLite can begin it again."""


class UnknownRevisionError(ValueError):
    """A client asks for a revision that is not kept any more, or never was."""


class ServedFile:
    """Safe for several threads. Opens or creates the file; raises PreflightError if it cannot be served."""

    def __init__(
        self, path: Path, *, history_bytes: int = HISTORY_BYTES, seconds: float = 60.0, largest_bytes: int = 64 << 20
    ) -> None:
        # SQLite puts the log next to the file that a link leads to.
        self.path = path = path.resolve()
        self._lock = threading.RLock()
        # Apart from the other: a push may wait for a program that writes, and pulls must not wait with it.
        self._pushing = threading.Lock()
        self._pulls: list[int] = []
        # Turso does not see SQLite's locks: what one of them commits, the other would overwrite.
        self._held = ExitStack()
        self._pins: list[apsw.Connection] = []
        self._wal: WalScan | None = None
        self._is_free = False
        try:
            with naming(path):
                _lock_out(path, self._held)
                self._batch = SqlBatch(path, seconds=seconds, largest_bytes=largest_bytes)
                self._prepare()
                self._side = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
                self._side.set_busy_timeout(_BUSY_MILLISECONDS)
                self._pin()
                self._wal = WalScan(path, self._recover)
                history = Path(f"{path}-sync")
                make_side_file(history, path)
                self._history = PageHistory(history, history_bytes)
                self._recorded = self._begin()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file. Its log goes back into it if no other program has it open."""
        if hasattr(self, "_history"):
            self._history.close()
        for pin in self._pins:
            pin.close()
        if hasattr(self, "_side"):
            self._side.close()
        if hasattr(self, "_batch"):
            self._batch.close()
        if self._wal is not None:
            self._wal.close()
        self._held.close()

    @property
    def revision(self) -> str:
        return self._history.current

    def push(self, request: Any) -> dict[str, Any]:
        """Run a push, and record the pages that it changed before anyone learns that it is committed."""
        with self._pushing:
            self._require_in_place()
            try:
                answer = self._batch.pipeline(request)
            finally:
                failpoint.reach("sync.pushed")
                self.advance()
            return answer

    def has_news(self) -> bool:
        """Whether some program committed since the last revision. Costs a read of a hundred bytes."""
        with self._lock:
            self._require_in_place()
            return self._reader.state() != self._recorded or self._holds_log()

    def advance(self) -> bool:
        """Record what was committed since the last revision; whether there is a new one now."""
        with self._lock:
            reader = self._reader
            if reader.state() == self._recorded and self._recorded.frames < _LOG_FRAMES and not self._holds_log():
                return False
            if self._recorded.frames >= _LOG_FRAMES:
                # All of it is recorded. If this writes back the whole log, the next pin lets SQLite begin it again.
                self._side.execute("PRAGMA wal_checkpoint(PASSIVE)")
            before, is_free = reader.state(), reader.is_written_back()
            self._pin()
            state = reader.state()
            numbers = reader.changed(self._recorded, state)
            known = self._recorded.pages
            old = [(number, reader.page(number)) for number in sorted(numbers) if number < known]
            # A shorter database loses pages that no frame mentions.
            old += [(number, reader.page(number)) for number in range(state.pages, known) if number not in numbers]
            try:
                reader.follow(state)
                pages = {number: digest(reader.page(number)) for number in numbers if number < state.pages}
                is_new = self._history.record(state, pages, old)
            except BaseException:
                # The next attempt needs the pages as they were in the last revision again.
                reader.go_back(self._recorded)
                self._pins.pop().close()
                raise
            self._recorded = state
            self._unpin()
            self._is_free = is_free and state == before
            self._history.prune(min(self._pulls, default=self._history.revision))
            return is_new

    @contextmanager
    def pulling(self, since: str, at: str) -> Iterator[tuple[str, int, list[int], int]]:
        """A revision to pull, which is kept during the context: its name, size, changed pages, and number.

        Without `at` it is the current one. A `since` of another history means all pages. Raises UnknownRevisionError
        for an `at` that is not kept.
        """
        with self._lock:
            number = self._history.find(at) if at else self._history.revision
            if number is None or number < self._history.floor:
                raise UnknownRevisionError(f"revision {at[:40]!r} is not kept any more: make the replica again")
            pages = self._history.size_at(number)
            known = self._history.find(since)
            if known is None:
                wanted = list(range(pages))
            elif known >= number:
                wanted = []
            else:
                wanted = self._history.changed_since(known, number, pages)
            name = self._history.name(number)
            self._pulls.append(number)
        try:
            yield name, pages, wanted, number
        finally:
            with self._lock:
                self._pulls.remove(number)

    def read(self, revision: int, numbers: list[int]) -> Iterator[list[tuple[int, bytes]]]:
        """These pages of a revision, some at a time, during `pulling` of it.

        Raises UnknownRevisionError once others wrote so much that keeping it would take twice the bound of the history.
        """
        for start in range(0, len(numbers), _CHUNK_PAGES):
            chunk = numbers[start : start + _CHUNK_PAGES]
            with self._lock:
                if revision < self._history.floor:
                    raise UnknownRevisionError("the pull took so long that its revision is not kept any more")
                old = self._history.old_pages(revision, chunk[0], chunk[-1])
                pages = [(number, old.get(number) or self._reader.page(number)) for number in chunk]
            # Outside of the lock: the next piece may be read by another thread, or never.
            yield pages

    @property
    def _reader(self) -> WalScan:
        assert self._wal is not None
        return self._wal

    def _require_in_place(self) -> None:
        """Raise UnavailableError if the path has another file now: what is written to this one would be lost."""
        if not self._reader.is_file_at(self.path):
            raise UnavailableError(
                f"{self.path} was removed or replaced while it was served",
                fix=f"its log belongs to the file before: delete {self.path}-wal and {self.path}-shm, put the file"
                " there again, then start the server",
            )

    def _holds_log(self) -> bool:
        """Whether the pin alone keeps the log from starting over: a program may wait for that with the write lock."""
        return not self._is_free and self._reader.is_written_back()

    def _recover(self) -> None:
        """A writer died while it wrote the index of the log: SQLite's next reader makes it again."""
        next(self._side.execute("SELECT count(*) FROM sqlite_schema"))

    def _prepare(self) -> None:
        connection = self._batch.connection
        (mode,) = next(connection.execute("PRAGMA journal_mode = WAL"))
        if mode != "wal":
            raise PreflightError(
                f"{self.path} cannot use a write-ahead log ({mode})", fix="serve a file on a local disk"
            )
        (pages,) = next(connection.execute("PRAGMA page_count"))
        if pages == 0:  # a new file gets its first page
            connection.execute("BEGIN IMMEDIATE; PRAGMA user_version = 1; PRAGMA user_version = 0; COMMIT")
        require_servable(connection, self.path)

    def _pin(self) -> None:
        pin = apsw.Connection(str(self.path), flags=apsw.SQLITE_OPEN_READWRITE)
        self._pins.append(pin)
        pin.set_busy_timeout(_BUSY_MILLISECONDS)
        pin.execute("BEGIN; SELECT 1 FROM sqlite_schema LIMIT 1")
        next(pin.execute("SELECT count(*) FROM sqlite_schema"))

    def _unpin(self) -> None:
        while len(self._pins) > 1:
            self._pins.pop(0).close()

    def _begin(self) -> WalState:
        """Record what changed while no server ran: from the log if it still has all of it, else by reading the file."""
        last = self._history.recorded
        state = self._reader.state()
        on_log = self._reader.is_on_log(last)
        numbers = self._reader.changed(last, state) if on_log else range(state.pages)
        self._reader.follow(state)
        pages = {number: digest(self._reader.page(number)) for number in numbers if number < state.pages}
        # No pin kept the old pages, so revisions before this one can no longer be given.
        self._history.record(state, pages, None)
        return state


def _lock_out(path: Path, held: ExitStack) -> None:
    """Keep Turso and a second server from this file until the stack is closed."""
    try:
        path.touch()
        if turso_lock.is_locked_whole(path):
            raise UnavailableError(f"{path} is open in Turso", fix="close it there, then start the server again")
        held.enter_context(turso_lock.shut_out(path, creates=True))
        file = os.open(turso_lock.server_lock(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{path} cannot be served: {error.strerror}", fix="check the path") from None
    held.callback(os.close, file)
    if not try_lock(file):
        raise OwnedError(f"another server serves {path}", fix="stop it first")
