"""Atomic replacement of files: a reader finds the old content or the new, never a mixture."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from tailrace.errors import UnavailableError


def open_alike(file: Path) -> BinaryIO:
    """A new or emptied file to write. In a folder that is closed to all other users, the file is closed to them too."""
    is_private = not file.parent.stat().st_mode & 0o077

    def open_file(path: str, flags: int) -> int:
        return os.open(path, flags, 0o600 if is_private else 0o666)

    return open(file, "wb", opener=open_file)


def replace_text(file: Path, text: str) -> None:
    """Replace a file's content, without syncing it: a power cut may lose it. The folder must exist."""
    draft = _draft(file)
    with open_alike(draft) as opened:
        opened.write(text.encode())
    draft.replace(file)


def replace_durably(file: Path, content: bytes) -> None:
    """Replace a file's content, durable when this returns. The folder must exist."""
    draft = _draft(file)
    with open_alike(draft) as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
    draft.replace(file)
    sync(file.parent)


@contextmanager
def creating(file: Path) -> Iterator[BinaryIO]:
    """A file to write, durable under its name when the block ends. A block that fails leaves no file.

    Creates the folder if it is missing.
    """
    make_folder(file.parent)
    draft = file.with_name(f".{file.name}")
    try:
        with open_alike(draft) as opened:
            yield opened
            opened.flush()
            os.fsync(opened.fileno())
        draft.replace(file)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync(file.parent)


class NoNewNameError(OSError):
    """The file system can give a file a name only by replacing another that has it."""


_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1


def move_new(draft: Path, file: Path) -> None:
    """Give a complete file its name. Raises FileExistsError when another has it, which then stays as it is.

    By a hard link; where the file system has none (exFAT, some network file systems), by a rename that never replaces.
    Raises NoNewNameError where there is neither.
    """
    try:
        os.link(draft, file)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _rename_new(draft, file)
    else:
        draft.unlink()


def _rename_new(draft: Path, file: Path) -> None:
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    paths = _AT_FDCWD, os.fsencode(draft), _AT_FDCWD, os.fsencode(file)
    if rename is not None and rename(*paths, _RENAME_NOREPLACE) == 0:
        return
    code = errno.ENOSYS if rename is None else ctypes.get_errno()
    if code == errno.EEXIST:
        raise FileExistsError(code, os.strerror(code), str(file))
    raise NoNewNameError(
        code, "the file system has neither hard links nor renames that never replace a file", str(file)
    )


def can_move_new(folder: Path) -> bool:
    """Whether `move_new` works in a folder, which is tried. Leaves nothing there; other problems count as a yes."""
    draft = folder / f".tailrace-probe-{uuid.uuid4().hex}"
    file = draft.with_suffix(".new")
    try:
        draft.touch()
        move_new(draft, file)
    except NoNewNameError:
        return False
    except OSError:
        return True
    finally:
        for path in (draft, file):
            with suppress(OSError):
                path.unlink(missing_ok=True)
    return True


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, durable when this returns. An existing folder stays as it is."""
    missing = [each for each in (folder, *folder.parents) if not each.is_dir()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing):
        try:
            sync(each.parent)
        except PermissionError:
            # Without permission to read the folder we cannot open it to sync it, even if we may write in it.
            os.sync()


def make_private_folder(folder: Path) -> None:
    """`make_folder` for what only this user may read: rows, positions, reasons. An existing folder that everyone may
    enter is closed; one that is open to its group alone was shared on purpose, and stays as it is."""
    missing = [each for each in (folder, *folder.parents) if not each.is_dir()]
    make_folder(folder)
    with suppress(PermissionError):  # it belongs to another user, who decides
        if missing or folder.stat().st_mode & 0o007:
            folder.chmod(0o700)


def remove(path: Path, last: str = "") -> None:
    """Remove a file, or a folder with everything in it; in the folder, the file `last` is removed last.

    A missing path is no error, and after an interruption a repeat removes the rest. A folder that is a link or a mount
    point is emptied but stays. Raises UnavailableError when something cannot be removed.
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
            f"{path} cannot be removed: {error.strerror}", fix="check that it belongs to this user, then try again"
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
