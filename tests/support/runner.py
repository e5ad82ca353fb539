"""A pipeline as the process it is in production, to be watched, paused and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tailrace.config.pipeline import load_all
from tailrace.errors import TailraceError
from tailrace.state import TableState
from tailrace.state.status import PipelineStatus
from tailrace.system.failpoint import DIRECTORY_VARIABLE, VARIABLE
from tailrace.testing.wait import PATIENCE_SECONDS
from tests.support.process import command_line, descendants, is_ended, is_paused, processes, send, stat

_POLL_SECONDS = 0.05

Condition = Callable[[PipelineStatus], bool]


class RunningPipeline:
    """One `tailrace run FILE`, in a session of its own: Spark's JVM, its workers and the receiver are all below it.

    `failpoints` are orders of `tailrace.system.failpoint`; marks of those that acted are left next to the file. What
    the process prints goes to `log_file`, over all runs of the file. Leaving the `with` block kills whatever is left.
    """

    def __init__(
        self,
        file: Path,
        *options: str,
        once: bool = False,
        failpoints: str = "",
        environment: Mapping[str, str] = {},
    ) -> None:
        self.file = file
        self.log_file = file.with_suffix(".log")
        self.marks = file.with_suffix(".failpoints")
        self._stores = {config.member: config.store_address for config in load_all(file, connects=False)}
        self._arguments = ["run", str(file), *options, *(["--once"] if once else [])]
        self._environment = {**os.environ, **environment}
        if failpoints:
            self._environment |= {VARIABLE: failpoints, DIRECTORY_VARIABLE: str(self.marks)}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start it and return at once."""
        self.marks.mkdir(exist_ok=True)
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                command(*self._arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        return self

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the run was never started; call start()")
        return self._process.pid

    def wait(self, seconds: float = PATIENCE_SECONDS) -> int:
        """The exit code once it has ended by itself; negative after a signal. Nothing of it is left then."""
        assert self._process is not None
        below = descendants(self.pid)
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:.0f} s; it said last:\n{self.log_tail()}") from None
        _end(below, self.pid)
        return code

    def wait_until(
        self, condition: Condition, seconds: float = PATIENCE_SECONDS, destination: str | None = None
    ) -> PipelineStatus:
        """The first status that meets the condition, of several destinations that of the one named.

        AssertionError when the process ends or the time is over.
        """
        assert self._process is not None
        deadline = time.monotonic() + seconds
        while True:
            status = self.status(destination)
            # A status that an earlier run left does not count.
            ours = status is not None and status.runner is not None and status.runner.pid == self.pid
            if status is not None and ours and condition(status):
                return status
            if (code := self._process.poll()) is not None:
                raise AssertionError(f"it ended with {code}; it said last:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"not so after {seconds:.0f} s: {status}\nit said last:\n{self.log_tail()}")
            time.sleep(_POLL_SECONDS)

    def status(self, destination: str | None = None) -> PipelineStatus | None:
        """What the state store holds now; None before there is one."""
        try:
            with self._stores[destination].open_reading() as store:
                return PipelineStatus.read(store)
        except TailraceError:
            return None

    def kill(self) -> None:
        """SIGKILL to all of it at once, and return when all of it is gone. Does nothing once it has ended."""
        if self._process is None:
            return
        if self._process.poll() is None:
            below = descendants(self.pid)
            self._process.kill()
            _end(below, self.pid)
        self._process.wait()

    def pause(self) -> None:
        """SIGSTOP to all of it."""
        send([self.pid, *descendants(self.pid)], signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT to all of it."""
        send([*descendants(self.pid), self.pid], signal.SIGCONT)

    def terminate(self) -> None:
        """SIGTERM to the process itself, as a service manager does."""
        os.kill(self.pid, signal.SIGTERM)

    def processes(self, program: bytes) -> list[int]:
        """Those below it whose command line holds this."""
        return [pid for pid in descendants(self.pid) if program in command_line(pid)]

    def paused(self) -> list[int]:
        """Its processes that rest, by a failpoint or a SIGSTOP."""
        return [pid for pid in (self.pid, *descendants(self.pid)) if is_paused(pid)]

    def acted(self) -> set[str]:
        """The failpoints that acted so far, over all runs of the file."""
        return {mark.name for mark in self.marks.glob("*")}

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def command(*arguments: str) -> list[str]:
    """`tailrace` with these arguments, by this very Python."""
    return [sys.executable, "-c", "from tailrace.cli import main; main()", *arguments]


def all_ready(status: PipelineStatus) -> bool:
    """Whether every table follows the log."""
    return bool(status.tables) and all(table.state is TableState.READY for table in status.tables)


def _session_members(session: int) -> list[int]:
    # Those whose parent died are no one's descendants any more, but stay in the session.
    return [pid for pid in processes() if stat(pid)[3:4] == [str(session)]]


def _end(pids: list[int], session: int) -> None:
    """SIGKILL to these and to a whole session, with every process that was forked in it meanwhile."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while left := [pid for pid in {*pids, *_session_members(session)} if not is_ended(pid)]:
        if time.monotonic() > deadline:
            raise AssertionError(f"processes outlived SIGKILL: {left}")
        send(left, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
