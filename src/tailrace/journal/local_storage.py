"""A journal in a local folder: segments that grow, synced with each append, and a lock of the operating system."""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from tailrace.errors import DamagedError, OwnedError, UnavailableError
from tailrace.journal.segment import SUFFIX, SegmentHeader, create_segment, list_segments, read_header
from tailrace.journal.storage import Buffer, JournalStorage, Pace
from tailrace.system.atomic_file import make_folder, make_private_folder, remove, sync
from tailrace.system.failpoint import reach
from tailrace.system.file_lock import is_current, is_locked, try_lock

_LOCK = "lock"
_QUARANTINE = "quarantine"
_VECTOR = 512  # below the operating system's limit on buffers per write


class OpenFile:
    """An open segment file."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.size = os.fstat(handle).st_size

    def read(self, length: int, offset: int) -> bytes:
        return os.pread(self.handle, length, offset)


class LocalStorage(JournalStorage):
    """A folder of segment files."""

    grows = True
    pace = Pace()

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __str__(self) -> str:
        return str(self.folder)

    def names(self) -> list[str]:
        return [name for name, _ in list_segments(self.folder)]

    def sizes(self) -> dict[str, int]:
        return {name: (self.folder / name).stat().st_size for name in self.names()}

    @contextmanager
    def open(self, name: str) -> Iterator[OpenFile]:
        handle = os.open(self.folder / name, os.O_RDONLY)
        try:
            yield OpenFile(handle)
        finally:
            os.close(handle)

    def read_range(self, name: str, offset: int, length: int) -> memoryview | None:
        with self.open(name) as file:
            if offset + length > file.size:
                return None
            stored = memoryview(np.empty(length, np.uint8).data)
            done = 0
            while done < length:
                count = os.preadv(file.handle, [stored[done:]], offset + done)
                if not count:
                    return None
                done += count
        return stored

    def headers(self, names: Sequence[str]) -> dict[str, SegmentHeader | None]:
        found: dict[str, SegmentHeader | None] = {}
        for name in names:
            try:
                with self.open(name) as file:
                    found[name] = read_header(file, name)
            except FileNotFoundError:
                continue
            except DamagedError:
                found[name] = None
        return found

    def remove(self, name: str) -> None:
        # Durable before the next one is deleted, so that a crash never leaves a gap.
        (self.folder / name).unlink(missing_ok=True)
        sync(self.folder)

    def sync(self, name: str) -> None:
        with self.open(name) as file:
            os.fsync(file.handle)

    def set_aside(self, name: str, *, keeps: bool) -> None:
        aside = self.folder / _QUARANTINE
        aside.mkdir(exist_ok=True)
        if not keeps:
            (self.folder / name).rename(aside / name)
            sync(aside)
            sync(self.folder)
            return
        if (aside / name).exists():
            return
        new = aside / f"{name}.new"
        shutil.copyfile(self.folder / name, new)
        sync(new)
        new.rename(aside / name)
        sync(aside)

    def names_aside(self) -> list[str]:
        return [file.name for file in (self.folder / _QUARANTINE).glob(f"*{SUFFIX}")]

    def load(self, name: str) -> bytes | None:
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def replace(self, name: str, content: bytes) -> None:
        file = self.folder / name
        make_folder(file.parent)
        new = file.with_name(f"{file.name}.{os.getpid()}-{threading.get_ident()}.new")
        try:
            with new.open("wb") as opened:
                opened.write(content)
                opened.flush()
                os.fsync(opened.fileno())
            new.replace(file)
        except OSError:
            new.unlink(missing_ok=True)
            raise
        sync(file.parent)

    def drop(self, name: str) -> None:
        file = self.folder / name
        file.unlink(missing_ok=True)
        if file.parent.exists():
            sync(file.parent)

    def small_files(self, folder: str, suffix: str) -> list[str]:
        return sorted(f"{folder}/{file.name}" for file in (self.folder / folder).glob(f"*{suffix}"))

    def acquire(self) -> LocalSink:
        make_private_folder(self.folder)
        lock = _lock(self.folder)
        try:
            sync(self.folder.parent)
            for left in self.folder.glob("*.new"):
                left.unlink()
        except BaseException:
            os.close(lock)
            raise
        return LocalSink(self.folder, lock)

    def is_written(self) -> bool:
        return is_locked(self.folder / _LOCK)

    @contextmanager
    def removing(self) -> Iterator[None]:
        if not self.folder.exists():
            yield
            return
        lock = _lock(self.folder)
        try:
            yield
            # The lock goes last, so that no writer opens a journal that is being removed.
            remove(self.folder, last=_LOCK)
        finally:
            os.close(lock)


class LocalSink:
    """The newest segment file, open for writing, and the lock."""

    is_fenced = False

    def __init__(self, folder: Path, lock: int) -> None:
        self._folder = folder
        self._lock: int | None = lock
        self._file: int | None = None

    def create(self, name: str, content: Sequence[Buffer]) -> None:
        file = create_segment(self._folder, name, content)
        if self._file is not None:
            os.close(self._file)
        self._file = file

    def append(self, pieces: list[Buffer], offset: int) -> None:
        assert self._file is not None
        try:
            _write(self._file, pieces, offset)
            reach("journal.before_fsync")
            os.fdatasync(self._file)
        except OSError:
            # This only frees space; it does not matter if it fails.
            with suppress(OSError):
                os.ftruncate(self._file, offset)
            raise

    def renew(self) -> None:
        """The operating system keeps the lock."""

    def close(self) -> None:
        for file in (self._file, self._lock):
            if file is not None:
                os.close(file)
        self._file = self._lock = None


def _lock(folder: Path) -> int:
    file = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    if not try_lock(file):
        owner = os.pread(file, 200, 0).decode(errors="replace").strip()
        os.close(file)
        raise OwnedError(
            f"journal {folder} is written by {owner or 'another process'}",
            fix="stop that receiver first, or give this pipeline a journal of its own",
        )
    if not is_current(file, folder / _LOCK):
        os.close(file)
        raise UnavailableError(f"journal {folder} is being removed", fix="none needed: tailrace retries")
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return file


def _write(file: int, pieces: list[Buffer], offset: int) -> None:
    at = 0
    while at < len(pieces):
        batch = pieces[at : at + _VECTOR]
        at += len(batch)
        written = os.pwritev(file, batch, offset)
        offset += written
        # A short write is rare (a signal, a nearly full disk). Write the rest; if the disk is full, this raises.
        for piece in batch:
            if written >= len(piece):
                written -= len(piece)
                continue
            rest = memoryview(piece)[written:]
            written = 0
            while rest:
                done = os.pwrite(file, rest, offset)
                offset, rest = offset + done, rest[done:]
