"""Child processes of a pipeline: a receiver that must not wait for Spark, a sender that must not delay it.

A child gets its options as one line on its standard input, so that no secret appears in a process list. Only the owner
holds the other end of that pipe. When it is closed the child stops, so a child never outlives its owner. This module
imports little, because every child loads it at its start.
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
from tailrace.system import environment
from tailrace.system.atomic_file import make_private_folder
from tailrace.system.status_file import read_file, write_file

BUSY = 75
"""Exit code: another process does this work already. It serves every owner, so this is not an error."""
TAKE_OVER_SECONDS = 1.0
END_SECONDS = 10.0


class Child:
    """Runs `python -m module`. Its status file and its log are in `folder`, under `name`.

    No child is started while `is_busy` reports that another process does the work; when that process ends, a child is
    started. `patience_seconds` is how long a process that was started elsewhere may take to begin its work. The child
    prints to its log, or with `shows_output` to the owner's standard output.
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
        self._checked_at = time.monotonic() + patience_seconds
        self._process: subprocess.Popen[str] | None = None
        if not patience_seconds:
            self._take_over()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def require_alive(self) -> None:
        """Raise the error that ended the child, if it has ended. A later call starts a new child."""
        code = self._process.poll() if self._process is not None else BUSY
        if code is None:
            return
        if code == BUSY:
            if time.monotonic() - self._checked_at > TAKE_OVER_SECONDS:
                self._take_over()
            return
        self.stop()
        status = read_status(self._folder, self._name)
        # Ignore a status file that the previous process left.
        error = status.get("error") if self._process is not None and status.get("pid") == self._process.pid else None
        self._process, self._checked_at = None, time.monotonic()
        if error:
            raise revive(error)
        raise UnavailableError(
            f"the {self._name} ended with code {code}",
            fix=f"see {self._log}, or {self._log_before.name} in the same folder once a new one has started",
        )

    def stop(self) -> None:
        """Stop the child, if this owner started one. A repeat does nothing."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        with suppress(OSError):  # the child died before it read its options
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
        """The log of the previous child, which may show why it ended."""
        return self._folder / f"{self._name}.log.1"

    def _take_over(self) -> None:
        self._checked_at = time.monotonic()
        if self._is_busy():
            return
        try:
            self._start()
        except OSError as error:
            raise UnavailableError(
                f"the {self._name} cannot be started in {self._folder}: {error.strerror or type(error).__name__}",
                fix="check that the disk has space and that this user may write there; tailrace retries by itself",
            ) from error

    def _start(self) -> None:
        make_private_folder(self._folder)
        if self._log.exists():
            self._log.replace(self._log_before)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=None if self._shows_output else log,
                stderr=log,
                text=True,
                env=environment.for_children(),
            )
        assert self._process.stdin is not None
        self._process.stdin.write(self._options + "\n")
        self._process.stdin.flush()


class WithoutPandas:
    """Hides pandas from pyarrow: no child needs it, and importing it takes longer than all other imports together."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("this process does not import pandas", name=name)


def serve(run: Callable[[str, Callable[[], bool]], int]) -> int:
    """Run in the child. `run` gets the options and a function that tells whether to stop; it returns the exit code."""
    sys.meta_path.insert(0, WithoutPandas())
    # Ctrl-C is sent to the whole process group, and a service manager's SIGTERM to every process of the service. The
    # owner decides when the child stops.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.umask(0o077)
    options = sys.stdin.readline()

    def stopping() -> bool:
        # Nothing is sent after the options: if the pipe is readable, the owner closed it or died.
        return bool(select.select([sys.stdin], [], [], 0)[0])

    return run(options, stopping)


def write_status(folder: Path, name: str, status: dict[str, Any]) -> None:
    """Write the child's status: `at` is the time, `error` (from `describe`) what ended it or makes it wait.

    Adds the process id as `pid`. If the disk refuses the write, the child continues.
    """
    write_file(folder / f"{name}.json", {"pid": os.getpid(), **status})


def read_status(folder: Path, name: str) -> dict[str, Any]:
    """The child's last status; empty when it never wrote one."""
    return read_file(folder / f"{name}.json")
