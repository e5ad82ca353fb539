"""Power cuts, as far as a test can have them."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest


class Disk:
    """What a power cut would leave: files as they were when last synced, under the names their folder had then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._files: dict[int, bytes] = {}
        self._folders: dict[Path, dict[str, int]] = {}
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, partial(self._sync, getattr(os, name)))

    def _sync(self, sync: Callable[[int], None], handle: int) -> None:
        sync(handle)
        path = Path(f"/proc/self/fd/{handle}").resolve()
        if path.is_dir():
            self._folders[path] = {one.name: one.stat().st_ino for one in path.iterdir()}
        else:
            self._files[os.fstat(handle).st_ino] = path.read_bytes()

    def left(self, folder: Path, to: Path) -> Path:
        """A copy of what would be left of the folder."""
        to.mkdir()
        for name, inode in self._folders.get(folder, {}).items():
            if folder / name in self._folders:
                self.left(folder / name, to / name)
            elif not (folder / name).is_dir():
                (to / name).write_bytes(self._files.get(inode, b""))
        return to
