"""One sender per queue, and the id that distinguishes one queue from another."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tailrace.destination.staging import writing_to
from tailrace.errors import OwnedError
from tailrace.system.atomic_file import make_private_folder, replace_durably
from tailrace.system.file_lock import is_locked, try_lock

_LOCK = "sender.lock"
_ID = "sender.id"


@contextmanager
def claim_queue(folder: Path) -> Iterator[None]:
    """Become the only sender of this queue. Raises OwnedError while another process is."""
    with writing_to(folder):
        make_private_folder(folder)
        file = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not try_lock(file):
            raise OwnedError(
                f"another process sends from the queue {folder}", fix="let it run, or stop its pipeline first"
            )
        yield
    finally:
        os.close(file)


def is_claimed(folder: Path) -> bool:
    """Whether a process sends from this queue now."""
    return is_locked(folder / _LOCK)


def queue_id(folder: Path) -> str:
    """The queue's own name in the shared store, created on the first call and deleted with the folder.

    So a place that was stored for a queue is never mistaken for a place in another queue at the same path.
    """
    place = folder / _ID
    if not place.exists():
        with writing_to(folder):
            replace_durably(place, uuid.uuid4().hex.encode())
    return place.read_text()
