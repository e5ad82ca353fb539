"""The way into a journal: one writer, many readers."""

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
from tailrace.system.atomic_file import make_folder, remove, sync
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
        """Become the journal's only writer, and recover what a crash or a failing disk left.

        The torn end of an append that never returned is passed over, and so is the beginning of a transaction whose
        end never came. What was durable and is not any more is in the writer's `damage`, with a copy under
        `quarantine/`. A new journal starts at `origin`: readers that want anything before it get LostError.

        Raises OwnedError while another process writes, UnavailableError when the disk does not answer.
        """
        folder = Path(path)
        lock: int | None = None
        try:
            make_folder(folder)
            lock = _lock(folder)
            sync(folder.parent)
            found = recover(folder, origin)
            # Several segments to a full journal: only whole ones are ever removed.
            segment_bytes = min(segment_bytes, max(max_bytes // 4, 1))
            return JournalWriter(folder, lock, found, segment_bytes=segment_bytes, max_bytes=max_bytes)
        except BaseException as error:
            if lock is not None:
                os.close(lock)
            if isinstance(error, OSError):
                raise _unopened(folder, error) from error
            raise

    @classmethod
    @contextmanager
    def removing(cls, path: str | Path) -> Iterator[None]:
        """No one writes the journal during the block, and it is gone afterwards; a block that fails leaves it.

        A journal that is not there is no error, and a repeat, also after an interruption, does the rest. Raises
        OwnedError while another process writes, UnavailableError when the disk does not answer or something cannot be
        removed.
        """
        folder = Path(path)
        if not folder.exists():
            yield
            return
        try:
            lock = _lock(folder)
        except OSError as error:
            raise _unopened(folder, error) from error
        try:
            yield
            remove(folder, last=_LOCK)  # until then no writer begins what is being removed
        finally:
            os.close(lock)

    @staticmethod
    def is_written(path: str | Path) -> bool:
        """Whether some process is the journal's writer now."""
        return is_locked(Path(path) / _LOCK)

    @classmethod
    def open_reader(cls, path: str | Path) -> JournalReader:
        """A view of the journal for this process. Any number of them, also before the writer has made anything."""
        return JournalReader(path)


def _unopened(folder: Path, error: OSError) -> UnavailableError:
    return UnavailableError(
        f"journal {folder} cannot be opened: {error.strerror}",
        fix="see that its disk is mounted, writable and not full",
    )


def _lock(folder: Path) -> int:
    file = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    if not try_lock(file):
        owner = os.pread(file, 200, 0).decode(errors="replace").strip()
        os.close(file)
        raise OwnedError(
            f"journal {folder} is written by {owner or 'another process'}",
            fix="stop that receiver first, or give this pipeline a journal of its own",
        )
    if not is_current(file, folder / _LOCK):
        os.close(file)
        raise UnavailableError(f"journal {folder} is being removed", fix="none needed: it is tried again")
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return file
