"""The receiver as a child process of the follower."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from tailrace.errors import UnavailableError, revive
from tailrace.journal import Journal
from tailrace.source.postgres.receiver import JOURNAL_BUSY, ReceiverOptions, read_status

TAKE_OVER_SECONDS = 1.0


class ReceiverProcess:
    """The receiver as a child. It ends with its owner: its standard input is a pipe that only the owner holds.

    One receiver serves every reader of a journal, so none is started while another runs; should that one end, this one
    takes its place. `patience_seconds` is how long one that was started elsewhere may take to begin.
    """

    def __init__(self, options: ReceiverOptions, *, patience_seconds: float = 0.0) -> None:
        self._journal = Path(options.journal)
        self._options = options
        self._looked = time.monotonic() + patience_seconds
        self._started = 0.0
        self._process: subprocess.Popen[str] | None = None
        if not patience_seconds:
            self._take_over()

    def require_alive(self) -> None:
        """Raises the error that ended the receiver, if it has ended."""
        code = self._process.poll() if self._process is not None else JOURNAL_BUSY
        if code is None:
            return
        if code == JOURNAL_BUSY:
            if time.monotonic() - self._looked > TAKE_OVER_SECONDS:
                self._take_over()
            return
        status = read_status(self._journal)
        error = status.get("error") if status.get("at", 0) >= self._started else None
        if error:
            raise revive(error)
        raise UnavailableError(f"the receiver ended with code {code}; its log is {self._journal / 'receiver.log'}")

    def stop(self) -> None:
        """End it, if it is ours. A repeat changes nothing."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _take_over(self) -> None:
        self._looked = time.monotonic()
        if Journal.is_written(self._journal):
            return
        self._started = time.time()
        with (self._journal / "receiver.log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tailrace.source.postgres"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
            )
        assert self._process.stdin is not None
        self._process.stdin.write(self._options.to_json() + "\n")
        self._process.stdin.flush()
