"""Records of unexpected errors: the chain of exception types and stack frames, without any message text.

Messages of other libraries may contain anything, even row values and passwords.
"""

from __future__ import annotations

import logging
import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tailrace.errors import TailraceError
from tailrace.system.atomic_file import make_private_folder

FILE = "last-error.txt"

_log = logging.getLogger(__name__)
_NOTE = "its chain is kept in "
_WITHIN = re.compile(
    r"^\s*(?:"
    r"at (?P<java>(?:org|java|javax|jdk|sun|scala|py4j)\.[\w.$/<>]+\([\w$.]+(?::\d+)?\))\s*$"
    r"|(?:Caused by: )?(?P<thrown>(?:org|java|javax|scala|py4j)\.[\w.$]+(?:Exception|Error))\b"
    r"|File \"(?P<file>/[^\"\n]+\.py)\", line (?P<line>\d+), in (?P<function>[\w<>]+)"
    r"|(?P<raised>(?:[A-Za-z_]\w*\.)*[A-Z][A-Za-z]*(?:Error|Exception))(?=:|\s*$)"
    r")",
    re.M,
)


@contextmanager
def kept(folder: Path) -> Iterator[None]:
    """Write the outline of any error that is not a TailraceError to the folder and the log, then raise it again."""
    try:
        yield
    except TailraceError:
        raise
    except Exception as error:
        text = outline(error)
        _log.error("unexpected error:\n%s", text)
        with suppress(OSError):  # a full disk must not hide the error itself
            _write(folder / FILE, text)
            error.add_note(f"{_NOTE}{folder / FILE}")
        raise


def place_of(error: BaseException) -> str | None:
    """The file with the outline of an error, if one was written."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE)]
    return notes[-1].removeprefix(_NOTE) if notes else None


def origin(error: BaseException) -> str:
    """The type of an error and where it was raised, on one line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {frame.filename}:{frame.lineno}"


def outline(error: BaseException) -> str:
    """The types and frames of an error and of all its causes, newest first."""
    lines: list[str] = []
    seen: set[int] = set()
    now: BaseException | None = error
    while now is not None and id(now) not in seen:
        seen.add(id(now))
        lines.append(f"{'caused by ' if lines else ''}{type(now).__module__}.{type(now).__qualname__}")
        frames = traceback.extract_tb(now.__traceback__)
        lines += [f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in reversed(frames)]
        with suppress(Exception):  # py4j asks the JVM for the text, and the JVM may have ended
            lines += [f"  | {part}" for part in _within(str(now))]
        now = now.__cause__ or now.__context__
    return "\n".join(lines) + "\n"


def _within(text: str) -> Iterator[str]:
    """The types and frames in the text of an error that came from another process."""
    for found in _WITHIN.finditer(text):
        if found["file"]:
            yield f"{found['file']}:{found['line']} in {found['function']}"
        else:
            yield found["java"] or found["thrown"] or found["raised"]


def _write(file: Path, text: str) -> None:
    make_private_folder(file.parent)
    draft = file.with_name(f"{file.name}.tmp")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(text)
    draft.replace(file)
