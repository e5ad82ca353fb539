"""Cursors: one small file per reader with its position; retention keeps everything after it."""

from __future__ import annotations

import zlib
from urllib.parse import quote, unquote

from tailrace.errors import DamagedError
from tailrace.journal.storage import JournalPlace, JournalStorage, open_storage
from tailrace.model.change import START, Position

_FOLDER = "cursors"
_SUFFIX = ".cursor"


class Cursor:
    """The durable position of one named reader. Retention keeps every segment with changes after it.

    A new cursor is at START. It counts for retention from its first `advance` on, even one to START. Only one process
    at a time may advance a cursor.
    """

    def __init__(self, path: JournalPlace, name: str) -> None:
        if not name:
            raise ValueError("a cursor needs a name")
        self._storage = open_storage(path)
        # Quoted, because a cursor's name may hold characters that a file name may not.
        self._file = f"{_FOLDER}/{quote(name, safe='')}{_SUFFIX}"
        self.name = name
        self._stored = _load(self._storage, self._file)

    @property
    def position(self) -> Position:
        return START if self._stored is None else self._stored

    def advance(self, position: Position) -> None:
        """Declare that everything up to `position` is no longer needed. Durable on return; never moves backwards."""
        if self._stored is not None and position <= self._stored:
            return
        text = str(position)
        self._storage.replace(self._file, f"{text} {zlib.crc32(text.encode()):08x}\n".encode())
        self._stored = position

    def drop(self) -> None:
        """Remove the cursor, so that retention no longer waits for it. No error if it does not exist."""
        self._storage.drop(self._file)
        self._stored = None


def cursors(path: JournalPlace | JournalStorage) -> dict[str, Position]:
    """Every reader's position by name. Raises DamagedError when one is unreadable: then nothing may be removed."""
    storage = path if isinstance(path, JournalStorage) else open_storage(path)
    found = {}
    for file in storage.small_files(_FOLDER, _SUFFIX):
        position = _load(storage, file)
        if position is not None:
            found[unquote(file.removeprefix(f"{_FOLDER}/").removesuffix(_SUFFIX))] = position
    return found


def _load(storage: JournalStorage, file: str) -> Position | None:
    stored = storage.load(file)
    if stored is None:
        return None
    try:
        text, crc = stored.split()
        if zlib.crc32(text) != int(crc, 16):
            raise ValueError("checksum")
        return Position.parse(text.decode())
    except ValueError as error:
        raise DamagedError(
            f"journal cursor {storage}/{file} does not match its checksum, so nothing may be removed from the journal",
            fix=f"delete {storage}/{file}, then restart its reader, which writes it again with its own position",
        ) from error
