"""Files that are replaced as a whole, so that whoever reads one finds the old content or the new."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from tailrace.errors import UnavailableError


def replace_text(file: Path, text: str) -> None:
    """Give a file new content that need not outlive a power cut. Its folder must be there."""
    draft = _draft(file)
    draft.write_text(text)
    draft.replace(file)


def replace_durably(file: Path, content: bytes) -> None:
    """Give a file new content, durable when this returns. Its folder must be there."""
    draft = _draft(file)
    with draft.open("wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
    draft.replace(file)
    sync(file.parent)


@contextmanager
def creating(file: Path) -> Iterator[BinaryIO]:
    """A file to write, durable under its name when the block ends. A block that fails leaves nothing.

    Its folder is made where it is missing.
    """
    make_folder(file.parent)
    draft = file.with_name(f".{file.name}")
    try:
        with draft.open("wb") as opened:
            yield opened
            opened.flush()
            os.fsync(opened.fileno())
        draft.replace(file)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync(file.parent)


def make_folder(folder: Path) -> None:
    """Make a folder, with those above it that are missing, durable when this returns. One that is there stays."""
    missing = [each for each in (folder, *folder.parents) if not each.is_dir()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing):
        try:
            sync(each.parent)
        except PermissionError:
            # Who may write in a folder may be kept from opening it.
            os.sync()


def remove(path: Path, last: str = "") -> None:
    """Remove a file, or a folder with all that is in it, of which the file `last` goes last.

    What is not there is no error, and a repeat, also after an interruption, does the rest. A folder that is a link, or
    that a disk is mounted on, stays where it is, empty. Raises UnavailableError when something cannot be removed.
    """
    try:
        if not path.is_dir():
            path.unlink(missing_ok=True)
            return
        for each in sorted(path.iterdir(), key=lambda each: each.name == last):
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each)
            else:
                each.unlink()
    except OSError as error:
        raise UnavailableError(
            f"{path} cannot be removed: {error.strerror}", fix="see that it belongs to this user; then try again"
        ) from error
    with suppress(OSError):
        path.rmdir()


def _draft(file: Path) -> Path:
    return file.with_name(f"{file.name}.tmp")


def sync(path: str | Path) -> None:
    """Make a file's bytes, or a directory's creations, renames and deletions, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
