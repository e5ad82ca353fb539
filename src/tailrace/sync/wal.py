"""Which pages a transaction changed, from SQLite's write-ahead log, without reading the database.

The header of the WAL index (`FILE-shm`) says up to which frame the log is committed; the frames say which page each
holds. Only frames that the index counts are read: behind them may lie frames of a writer that died, which the next
writer overwrites.

All files stay open until `close`: closing one releases every lock that SQLite holds on it in this process.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tailrace.errors import DamagedError
from tailrace.sync.protobuf import PAGE_BYTES

_WAL_HEADER = 32
_FRAME_HEADER = 24
_INDEX_HEADER = 48
_ATTEMPTS = 1000


@dataclass(frozen=True)
class WalState:
    """The committed end of the log: its generation (`salt`), frames, checksum, and the size of the database."""

    salt: bytes
    frames: int
    checksum: bytes
    pages: int


class WalScan:
    """Reads the log of one database, while a connection of this process has it open in WAL mode.

    `recover` reads the database with a connection, which repairs an index that a writer left half written.
    """

    def __init__(self, path: Path, recover: Callable[[], None]) -> None:
        self._recover = recover
        self._database = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._index = os.open(f"{path}-shm", os.O_RDONLY | os.O_CLOEXEC)
        self._log = os.open(f"{path}-wal", os.O_RDONLY | os.O_CLOEXEC)
        self._salt = b""
        self._frames: dict[int, int] = {}
        self._known = 0

    def close(self) -> None:
        """Call it only after every connection of this process to the database is closed."""
        for file in (self._database, self._index, self._log):
            os.close(file)

    def is_file_at(self, path: Path) -> bool:
        """Whether the path still leads to the database."""
        try:
            return os.path.samestat(path.stat(), os.fstat(self._database))
        except FileNotFoundError:
            return False

    def state(self) -> WalState:
        """The committed end of the log now."""
        for attempt in range(_ATTEMPTS):
            if attempt in (_ATTEMPTS // 4, _ATTEMPTS // 2):
                self._recover()
            header = os.pread(self._index, 2 * _INDEX_HEADER, 0)
            # A writer changes the second copy first: as long as they differ, it is not done.
            if len(header) == 2 * _INDEX_HEADER and header[:_INDEX_HEADER] == header[_INDEX_HEADER:]:
                frames, pages = struct.unpack_from("=II", header, 16)
                if not frames:  # an empty log says nothing about the size
                    pages = os.fstat(self._database).st_size // PAGE_BYTES
                return WalState(header[32:40], frames, header[24:32], pages)
        raise DamagedError("the index of the write-ahead log cannot be read", fix="start the server again")

    def is_written_back(self) -> bool:
        """Whether the database has every frame of the log, so that a new reader needs nothing of the log."""
        (written,) = struct.unpack("=I", os.pread(self._index, 4, 2 * _INDEX_HEADER))
        return bool(written == self.state().frames)

    def is_on_log(self, state: WalState) -> bool:
        """Whether the log still begins with everything up to this state."""
        now = self.state()
        if not state.frames or state.salt != now.salt or state.frames > now.frames:
            return False
        frame = os.pread(self._log, _FRAME_HEADER, self._offset(state.frames))
        # The index has numbers of this machine, the log has them in network order.
        return struct.unpack(">II", frame[16:]) == struct.unpack("=II", state.checksum)

    def changed(self, since: WalState, upto: WalState) -> set[int]:
        """The pages, from 0, that frames after `since` hold; all frames of a new generation are after it."""
        first = since.frames + 1 if since.salt == upto.salt else 1
        return {self._page_of(frame) for frame in range(first, upto.frames + 1)}

    def follow(self, upto: WalState) -> None:
        """From now on `page` returns pages as of this state."""
        if upto.salt != self._salt:
            self._salt, self._frames, self._known = upto.salt, {}, 0
        for frame in range(self._known + 1, upto.frames + 1):
            self._frames[self._page_of(frame)] = frame
        self._known = max(self._known, upto.frames)

    def go_back(self, upto: WalState) -> None:
        """Follow an earlier state again, whose read transaction is still open."""
        self._salt, self._frames, self._known = b"", {}, 0
        # On another log than this, the database has all pages of that state: no log starts over before.
        if upto.salt == self.state().salt:
            self.follow(upto)

    def page(self, number: int) -> bytes:
        """A page as of the state that was followed last. A read transaction at that state must be open."""
        frame = self._frames.get(number)
        if frame is not None:
            data = os.pread(self._log, PAGE_BYTES, self._offset(frame) + _FRAME_HEADER)
            # A log whose frames are all in the database may start over at any time; then the database has the page.
            if self.state().salt == self._salt:
                return data
        data = os.pread(self._database, PAGE_BYTES, number * PAGE_BYTES)
        if len(data) != PAGE_BYTES:
            raise DamagedError(f"page {number} of the served file cannot be read", fix="check its disk")
        return data

    def _page_of(self, frame: int) -> int:
        (number,) = struct.unpack(">I", os.pread(self._log, 4, self._offset(frame)))
        return int(number) - 1

    @staticmethod
    def _offset(frame: int) -> int:
        return _WAL_HEADER + (frame - 1) * (_FRAME_HEADER + PAGE_BYTES)
