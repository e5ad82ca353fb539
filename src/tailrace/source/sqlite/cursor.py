"""How far each reader of a file is, in one small file per reader. Changes that all readers have may be purged."""

from __future__ import annotations

import time
from pathlib import Path
from urllib.parse import quote, unquote

from tailrace.errors import DamagedError
from tailrace.system.atomic_file import make_folder, remove, replace_durably

_SUFFIX = ".cursor"
_PURGED = "purged"


class Cursors:
    """The cursors in a folder, which is made when first needed."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    def begin(self, reader: str, change_id: int) -> None:
        """From now on nothing after this change is purged before the reader has it. A second call changes nothing."""
        if not self._file(reader).exists():
            self.advance(reader, change_id)

    def advance(self, reader: str, change_id: int) -> None:
        """The reader has everything up to this change; durable when this returns."""
        make_folder(self._folder)
        replace_durably(self._file(reader), b"%d" % change_id)

    def lowest(self) -> int | None:
        """What every reader has; None before there is one. Raises DamagedError when a cursor cannot be read."""
        return min(map(_load, self._folder.glob(f"*{_SUFFIX}")), default=None)

    def readers(self) -> list[str]:
        """Those that have a cursor."""
        return [unquote(file.name.removesuffix(_SUFFIX)) for file in self._folder.glob(f"*{_SUFFIX}")]

    def forget(self, reader: str) -> None:
        """Remove the cursor of a reader that is gone or starts over."""
        remove(self._file(reader))

    def is_due(self, seconds: float) -> bool:
        """Whether the last purge is at least that long ago; if so, records a purge now."""
        mark = self._folder / _PURGED
        if mark.exists() and time.time() - mark.stat().st_mtime < seconds:
            return False
        mark.touch()
        return True

    def _file(self, reader: str) -> Path:
        return self._folder / f"{quote(reader, safe='')}{_SUFFIX}"


def _load(file: Path) -> int:
    try:
        return int(file.read_bytes())
    except ValueError as error:
        raise DamagedError(
            f"the cursor {file} holds no number, so nothing may be purged from the tape",
            fix=f"rm {file}, then restart its reader, which puts it back at its own position",
        ) from error
