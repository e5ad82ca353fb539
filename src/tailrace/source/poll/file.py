"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tailrace.wholefile import make_folder, sync


@contextmanager
def creating(path: Path) -> Iterator[BinaryIO]:
    """A file to write, durable under its name when the block ends. A block that fails leaves nothing."""
    make_folder(path.parent)
    draft = path.with_name(f".{path.name}")
    try:
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync(path.parent)
