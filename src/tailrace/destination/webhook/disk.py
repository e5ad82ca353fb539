"""What the file system refuses: nothing is lost by it, and it is tried again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tailrace.errors import UnavailableError


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Surrounds what is written to a queue's folder: a full or failing disk raises UnavailableError."""
    try:
        yield
    except OSError as error:
        raise UnavailableError(
            f"cannot write to the queue {folder}: {error.strerror or type(error).__name__}",
            fix="make room on its disk, and see that this user may write there; what waits stays as it is",
        ) from error
