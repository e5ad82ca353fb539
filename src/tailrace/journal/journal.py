"""Open a journal: for its one writer, for any of its readers, or to remove it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tailrace.errors import OwnedError, UnavailableError
from tailrace.journal.reader import JournalReader
from tailrace.journal.recovery import recover
from tailrace.journal.writer import JournalWriter
from tailrace.model.change import START, Position
from tailrace.system.atomic_file import make_private_folder, remove, sync
from tailrace.system.file_lock import is_current, is_locked, try_lock

SEGMENT_BYTES = 64 << 20
MAX_BYTES = 16 << 30

_LOCK = "lock"


class Journal:
    """A directory of segments: the durable log between a receiver and its readers."""

    @classmethod
    def open_writer(
        cls,
        path: str | Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        max_bytes: int = MAX_BYTES,
        origin: Position = START,
    ) -> JournalWriter:
        """Become the journal's only writer, and recover the journal after a crash or a disk failure.

        The torn end of an append that never returned is ignored, and so is the beginning of a transaction whose end
        never arrived. What was durable and is now lost is listed in the writer's `damage`, with a copy of the segment
        under `quarantine/`. A new journal starts at `origin`: readers that ask for earlier positions get LostError.

        Raises OwnedError while another process writes, UnavailableError when the disk does not answer.
        """
        folder = Path(path)
        lock: int | None = None
        try:
            make_private_folder(folder)
            lock = _lock(folder)
            sync(folder.parent)
            found = recover(folder, origin)
            # A full journal needs several segments, because retention removes whole segments only.
            segment_bytes = min(segment_bytes, max(max_bytes // 4, 1))
            return JournalWriter(folder, lock, found, segment_bytes=segment_bytes, max_bytes=max_bytes)
        except BaseException as error:
            if lock is not None:
                os.close(lock)
            if isinstance(error, OSError):
                raise _cannot_open(folder, error) from error
            raise

    @classmethod
    @contextmanager
    def removing(cls, path: str | Path) -> Iterator[None]:
        """Hold the writer's lock during the block, then remove the journal. If the block fails, the journal stays.

        A missing journal is no error. After an interruption a repeat removes the rest. Raises OwnedError while another
        process writes, UnavailableError when the disk does not answer or something cannot be removed.
        """
        folder = Path(path)
        if not folder.exists():
            yield
            return
        try:
            lock = _lock(folder)
        except OSError as error:
            raise _cannot_open(folder, error) from error
        try:
            yield
            remove(folder, last=_LOCK)  # the lock goes last, so that no writer opens a journal that is being removed
        finally:
            os.close(lock)

    @staticmethod
    def is_written(path: str | Path) -> bool:
        """Whether a process is writing the journal now."""
        return is_locked(Path(path) / _LOCK)

    @classmethod
    def open_reader(cls, path: str | Path) -> JournalReader:
        """A reader for this process. There may be any number of them, even before the journal exists."""
        return JournalReader(path)


def _cannot_open(folder: Path, error: OSError) -> UnavailableError:
    return UnavailableError(
        f"journal {folder} cannot be opened: {error.strerror}",
        fix="check that its disk is mounted, writable and not full",
    )


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
