"""Cursors: one small file per reader with its position; retention keeps everything after it."""

from __future__ import annotations

import os
import threading
import zlib
from pathlib import Path
from urllib.parse import quote, unquote

from tailrace.errors import DamagedError
from tailrace.model.change import START, Position
from tailrace.system.atomic_file import make_folder, sync

_FOLDER = "cursors"
_SUFFIX = ".cursor"


class Cursor:
    """The durable position of one named reader. Retention keeps every segment with changes after it.

    A new cursor is at START. It counts for retention from its first `advance` on, even one to START. Only one process
    at a time may advance a cursor.
    """

    def __init__(self, path: str | Path, name: str) -> None:
        if not name:
            raise ValueError("a cursor needs a name")
        # Quoted, because a cursor's name may hold characters that a file name may not.
        self._file = Path(path) / _FOLDER / (quote(name, safe="") + _SUFFIX)
        self.name = name
        self._stored = _load(self._file)

    @property
    def position(self) -> Position:
        return START if self._stored is None else self._stored

    def advance(self, position: Position) -> None:
        """Declare that everything up to `position` is no longer needed. Durable on return; never moves backwards."""
        if self._stored is not None and position <= self._stored:
            return
        make_folder(self._file.parent)
        text = str(position)
        new = self._file.with_name(f"{self._file.name}.{os.getpid()}-{threading.get_ident()}.new")
        try:
            with new.open("w") as file:
                file.write(f"{text} {zlib.crc32(text.encode()):08x}\n")
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._file)
        except OSError:
            new.unlink(missing_ok=True)
            raise
        sync(self._file.parent)
        self._stored = position

    def drop(self) -> None:
        """Remove the cursor, so that retention no longer waits for it. No error if it does not exist."""
        self._file.unlink(missing_ok=True)
        if self._file.parent.exists():
            sync(self._file.parent)
        self._stored = None


def cursors(path: str | Path) -> dict[str, Position]:
    """Every reader's position by name. Raises DamagedError when one is unreadable: then nothing may be removed."""
    folder = Path(path) / _FOLDER
    if not folder.exists():
        return {}
    found = {}
    for file in sorted(folder.glob(f"*{_SUFFIX}")):
        position = _load(file)
        if position is not None:
            found[unquote(file.name.removesuffix(_SUFFIX))] = position
    return found


def _load(file: Path) -> Position | None:
    try:
        text, crc = file.read_bytes().split()
        if zlib.crc32(text) != int(crc, 16):
            raise ValueError("checksum")
        return Position.parse(text.decode())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DamagedError(
            f"journal cursor {file} does not match its checksum, so nothing may be removed from the journal",
            fix=f"rm {file}, then restart its reader, which writes it again with its own position",
        ) from error
