"""The receiver as a child process of the follower."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from tailrace.errors import UnavailableError, revive
from tailrace.source.postgres.receiver import JOURNAL_BUSY, ReceiverOptions, read_status

TAKE_OVER_SECONDS = 1.0


class ReceiverProcess:
    """The receiver as a child. It ends with its owner: its standard input is a pipe that only the owner holds."""

    def __init__(self, options: ReceiverOptions) -> None:
        self._journal = Path(options.journal)
        self._options = options
        self._started = time.time()
        self._process = self._spawn()

    def _spawn(self) -> subprocess.Popen[str]:
        with (self._journal / "receiver.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tailrace.source.postgres"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
            )
        assert process.stdin is not None
        process.stdin.write(self._options.to_json() + "\n")
        process.stdin.flush()
        return process

    def require_alive(self) -> None:
        """Raises the error that ended the receiver, if it has ended."""
        code = self._process.poll()
        if code is None:
            return
        if code == JOURNAL_BUSY:
            # Whoever receives into this journal serves us too; should it end, the next attempt takes over.
            if time.time() - self._started > TAKE_OVER_SECONDS:
                self._started = time.time()
                self._process = self._spawn()
            return
        status = read_status(self._journal)
        error = status.get("error") if status.get("at", 0) >= self._started else None
        if error:
            raise revive(error)
        raise UnavailableError(f"the receiver ended with code {code}; its log is {self._journal / 'receiver.log'}")

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
