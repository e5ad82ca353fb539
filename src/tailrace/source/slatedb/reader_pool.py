"""Additional processes that read WAL files, because SlateDB's binding limits a process to one core.

A process reads one split at a time itself. A large split that arrives meanwhile goes to another process; these are
started when they are needed, end when they are not, and never outlive the process that started them.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from tailrace.errors import TailraceError
from tailrace.model.change import Changes
from tailrace.source.slatedb.log_split import WalSplit, read_wal
from tailrace.source.slatedb.reader_process import receive_rows, send_split
from tailrace.system import environment

if TYPE_CHECKING:
    from tailrace.source.slatedb.source import SlateDbSource

WORTHWHILE_BYTES = 4 << 20
"""Reading a smaller split here takes less time than starting a process."""
_MOST = 4
"""This many processes decode faster than a destination can write."""


class ReaderProcess:
    """One additional process. `read` is called by one thread at a time."""

    def __init__(self) -> None:
        # Everything importable here, such as a user's own merge operator, must be importable there.
        child = {**environment.for_children(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        program = [sys.executable, "-m", "tailrace.source.slatedb.reader_process"]
        self.process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child)

    def read(self, source: SlateDbSource, split: WalSplit) -> list[Changes] | None:
        """The changes of a split; None when the process ended before it had them. Raises what reading raised."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            send_split(self.process.stdin, source, split)
            answer = receive_rows(self.process.stdout)
        except (EOFError, BrokenPipeError):
            self.close()
            return None
        except TailraceError:
            raise
        except BaseException:
            # The next request would read the rest of this answer as its own.
            self.process.kill()
            self.close()
            raise
        return [Changes(split.ranges[name].schema, batch) for name, batch in answer]

    def close(self) -> None:
        """End the process. A second call changes nothing."""
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()
        self.process.wait()


class ReaderPool:
    """The additional processes of this one. Threads share it."""

    def __init__(self) -> None:
        # Reentrant: an abandoned `read` ends when it is garbage collected, which may happen inside `_take`.
        self._lock = threading.RLock()
        self._here = 0
        self._idle: list[ReaderProcess] = []
        self._busy: set[ReaderProcess] = set()

    def read(self, source: SlateDbSource, split: WalSplit) -> Iterator[Changes]:
        """The changes of `read_wal`, read here or in another process. Raises the same errors."""
        process = self._take(_helpers(source, split))
        try:
            found = process.read(source, split) if process is not None else None
            # If a process ends early, read here instead: reading is repeatable.
            yield from read_wal(source, split) if found is None else found
        finally:
            self._give_back(process)

    def _take(self, most: int) -> ReaderProcess | None:
        """A free process; None when this one is free, or the limit is reached."""
        with self._lock:
            if self._here and most:
                for gone in [process for process in self._idle if process.process.poll() is not None]:
                    self._idle.remove(gone)
                    gone.close()
                if self._idle or len(self._busy) < most:
                    process = self._idle.pop() if self._idle else ReaderProcess()
                    self._busy.add(process)
                    return process
            self._here += 1
            return None

    def _give_back(self, process: ReaderProcess | None) -> None:
        with self._lock:
            if process is None:
                self._here -= 1
            elif process in self._busy:
                self._busy.remove(process)
                if process.process.poll() is None:
                    self._idle.append(process)

    def close(self) -> None:
        """End the idle processes."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.close()


def _helpers(source: SlateDbSource, split: WalSplit) -> int:
    """How many additional processes may read this split and similar ones at the same time."""
    if split.bytes < WORTHWHILE_BYTES or source.keep_wal is not None or not source.database.is_shared:
        return 0
    # Up to one task per table may read the same files, each with processes of its own.
    return max(0, min((os.cpu_count() or 1) // split.readers, _MOST) - 1)


_pools: dict[int, ReaderPool] = {}


def reader_pool() -> ReaderPool:
    """The pool of this process: a forked process must not use its parent's processes."""
    return _pools.setdefault(os.getpid(), ReaderPool())


@atexit.register
def _close_pools() -> None:
    reader_pool().close()
