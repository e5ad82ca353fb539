"""Standard output, and how a command ends when it cannot be written."""

from __future__ import annotations

import codecs
import io
import json
import logging
import sys
from typing import TYPE_CHECKING

from tailrace.cli.error import UNREAD, print_error
from tailrace.cli.text import LineFormatter
from tailrace.errors import UnavailableError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class Output(io.FileIO):
    """The bytes of standard output. The first write that fails ends the command, and later ones are dropped.

    A reader that closes early, as `head` does, is not an error. Raises SystemExit, which no layer in between catches.
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
            failure = UnavailableError(
                f"the output cannot be written: {error.strerror}",
                fix="free some space there, or write the output elsewhere",
            )
            print_error(failure)
            raise SystemExit(failure.exit_code) from None


def _escape(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error("tailrace.escape", _escape)


def guard_output() -> None:
    """From now on, a failing standard output ends the process with an exit code instead of a traceback.

    A character that its encoding lacks is escaped as in JSON. What is logged is escaped like all text of a command.
    """
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(LineFormatter())
    if sys.stdout is not None:  # it may be closed
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(Output()),
            encoding=sys.stdout.encoding,
            errors="tailrace.escape",
            line_buffering=bool(sys.stdout.line_buffering),
        )
