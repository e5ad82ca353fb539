"""A process beside the pipeline: a receiver that must not wait for Spark, a sender that must not hold it up.

Its options come as one line on its standard input, so no secret stands in a process list. Only the owner holds that
pipe, and its end asks the child to stop, so a child never outlives its owner. Import-light: children start with it.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from tailrace.errors import UnavailableError, revive
from tailrace.system.status_file import read_file, write_file

BUSY = 75
"""Exit code: another process does this work already, which serves every owner as well."""
TAKE_OVER_SECONDS = 1.0
END_SECONDS = 10.0


class Child:
    """`python -m module`, with its status and its log, as `name`, in `folder`.

    None is started while `is_busy` says that another does its work; should that one end, this one takes its place.
    `patience_seconds` is how long one that was started elsewhere may take to begin. What it prints goes to its log, or
    with `shows_output` to where the owner prints.
    """

    def __init__(
        self,
        module: str,
        options: str,
        folder: Path,
        name: str,
        *,
        is_busy: Callable[[], bool],
        patience_seconds: float = 0.0,
        shows_output: bool = False,
    ) -> None:
        self._module = module
        self._options = options
        self._folder = folder
        self._name = name
        self._is_busy = is_busy
        self._shows_output = shows_output
        self._looked = time.monotonic() + patience_seconds
        self._process: subprocess.Popen[str] | None = None
        if not patience_seconds:
            self._take_over()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def require_alive(self) -> None:
        """Raises the error that ended the child, if it has ended; asked again after a moment, it begins another one."""
        code = self._process.poll() if self._process is not None else BUSY
        if code is None:
            return
        if code == BUSY:
            if time.monotonic() - self._looked > TAKE_OVER_SECONDS:
                self._take_over()
            return
        self.stop()
        status = read_status(self._folder, self._name)
        # What the one before said of itself must not be taken for this one's.
        error = status.get("error") if self._process is not None and status.get("pid") == self._process.pid else None
        self._process, self._looked = None, time.monotonic()
        if error:
            raise revive(error)
        raise UnavailableError(
            f"the {self._name} ended with code {code}",
            fix=f"see {self._log}, or {self._log_before.name} there once another one has begun",
        )

    def stop(self) -> None:
        """End it, if it is ours. A repeat changes nothing."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        with suppress(OSError):  # it died before it had read its options
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def _log(self) -> Path:
        return self._folder / f"{self._name}.log"

    @property
    def _log_before(self) -> Path:
        """What the one before said: why it ended, perhaps."""
        return self._folder / f"{self._name}.log.1"

    def _take_over(self) -> None:
        self._looked = time.monotonic()
        if self._is_busy():
            return
        try:
            self._start()
        except OSError as error:
            raise UnavailableError(
                f"the {self._name} cannot be started in {self._folder}: {error.strerror or type(error).__name__}",
                fix="make room on its disk, and see that this user may write there; it is tried again",
            ) from error

    def _start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._log.exists():
            self._log.replace(self._log_before)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=None if self._shows_output else log,
                stderr=log,
                text=True,
            )
        assert self._process.stdin is not None
        self._process.stdin.write(self._options + "\n")
        self._process.stdin.flush()


class WithoutPandas:
    """Lets pyarrow find no pandas: no child needs it, and loading it takes longer than all the rest."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("this process does without", name=name)


def serve(run: Callable[[str, Callable[[], bool]], int]) -> int:
    """The child's side. `run` gets the options and a function that says whether to stop, and gives the exit code."""
    sys.meta_path.insert(0, WithoutPandas())
    # Ctrl-C reaches the whole process group; the owner decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    options = sys.stdin.readline()

    def stopping() -> bool:
        # Nothing more is ever sent: readable means that the owner closed the pipe or died.
        return bool(select.select([sys.stdin], [], [], 0)[0])

    return run(options, stopping)


def write_status(folder: Path, name: str, status: dict[str, Any]) -> None:
    """What the child says of itself: `at` is when, `error` (from `describe`) what ended it or keeps it waiting.

    Its process id stands there as `pid`. A disk that refuses it does not stop the child.
    """
    write_file(folder / f"{name}.json", {"pid": os.getpid(), **status})


def read_status(folder: Path, name: str) -> dict[str, Any]:
    """The child's last status; empty when it never wrote one."""
    return read_file(folder / f"{name}.json")
