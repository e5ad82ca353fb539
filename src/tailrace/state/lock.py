"""One runner per state folder."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tailrace.errors import OwnedError, PreflightError
from tailrace.filelock import is_locked, try_lock
from tailrace.wholefile import make_folder

_FILE = "runner.lock"


@dataclass(frozen=True)
class Owner:
    """Who runs a pipeline."""

    pid: int
    host: str
    started: datetime
    machine: str = field(default="", repr=False)
    """Where process ids mean the same: one boot of a machine and, in it, one container. Empty: not known."""

    @classmethod
    def here(cls) -> Owner:
        """This process, from now on."""
        return cls(os.getpid(), socket.gethostname(), datetime.now(UTC), _machine())

    @property
    def gone(self) -> bool:
        """Whether it is certain that it runs no more: its id belongs to no process here, or to this one."""
        # Host names are not enough: two containers, or a pod and its successor elsewhere, may share one.
        if not self.machine or self.machine != _machine():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return self.pid == os.getpid()


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


class RunnerLock:
    """Held by the one process that runs a pipeline; the system lets it go when that process dies, however it dies.

    Child processes do not inherit it. `acquire` raises OwnedError, naming the holder, while another one has it.
    """

    def __init__(self, state_dir: Path) -> None:
        self._path = Path(state_dir) / _FILE
        self._descriptor: int | None = None

    def acquire(self) -> Self:
        try:
            make_folder(self._path.parent)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise PreflightError(
                f"{self._path} cannot be written: {error.strerror}",
                fix="let this user write there, or set `state` to another folder",
            ) from error
        if not try_lock(descriptor):
            os.close(descriptor)
            who = _read(self._path)
            held = f"process {who.pid} on {who.host} since {who.started:%Y-%m-%d %H:%M:%S} UTC" if who else "a process"
            stop = f"stop it with `kill {who.pid}`" if who else "stop that process"
            raise OwnedError(
                f"{self._path.parent} is run by {held}",
                fix=f"{stop}, or give this pipeline a `state` folder of its own",
            )
        here = Owner.here()
        text = {"pid": here.pid, "host": here.host, "started": here.started.isoformat()}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(text).encode(), 0)
        self._descriptor = descriptor
        _held.add(self)
        _release_after_fork()
        return self

    def release(self) -> None:
        """Let go. A repeat changes nothing. The file stays: removing it would let two processes lock two files."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            _held.discard(self)

    def __enter__(self) -> Self:
        return self if self._descriptor is not None else self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


_held: set[RunnerLock] = set()
"""The locks that this process holds."""


@cache
def _release_after_fork() -> None:
    """From now on forked children let go of the locks. Only the first call in a process does something.

    A child shares a lock until it closes its copy: it must not outlive the runner holding it.
    """

    def release() -> None:
        for lock in list(_held):
            lock.release()

    os.register_at_fork(after_in_child=release)


def find_owner(state_dir: Path) -> Owner | None:
    """Who runs the pipeline now; None when nobody does. Changes nothing and needs no right to write."""
    path = Path(state_dir) / _FILE
    return _read(path) if is_locked(path) else None


def _read(path: Path) -> Owner | None:
    try:
        raw: Any = json.loads(path.read_text())
        return Owner(int(raw["pid"]), str(raw["host"]), datetime.fromisoformat(raw["started"]))
    except (OSError, ValueError, KeyError, TypeError):
        # The holder is between locking the file and writing into it.
        return None
