"""Standard output, and how a command ends when nobody takes what it says."""

from __future__ import annotations

import codecs
import io
import json
import sys
from typing import TYPE_CHECKING

from tailrace.cli.error import UNREAD, print_error
from tailrace.errors import UnavailableError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class Output(io.FileIO):
    """The bytes of standard output. The first write that fails ends the command, and what comes after it is dropped.

    A reader that has seen enough, as `head` has, is no error. By SystemExit, which no layer between takes for its own.
    """

    def __init__(self) -> None:
        super().__init__(sys.stdout.fileno(), "wb", closefd=False)
        self._failed = False

    def write(self, data: ReadableBuffer, /) -> int:
        if self._failed:
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except BrokenPipeError:
            self._failed = True
            raise SystemExit(UNREAD) from None
        except OSError as error:
            self._failed = True
            told = UnavailableError(
                f"the output cannot be written: {error.strerror}", fix="make room there, or send it elsewhere"
            )
            print_error(told)
            raise SystemExit(told.exit_code) from None


def _escape(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error("tailrace.escape", _escape)


def guard_output() -> None:
    """From now on a standard output that fails ends the process with an exit code of ours instead of a traceback.

    A character that its encoding lacks is escaped as in JSON.
    """
    if sys.stdout is not None:  # it may be closed
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(Output()),
            encoding=sys.stdout.encoding,
            errors="tailrace.escape",
            line_buffering=bool(sys.stdout.line_buffering),
        )
