"""The process that runs the pipeline: the lock on its folder, run numbers that fence, the lease."""

from __future__ import annotations

import json
import os
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tailrace.errors import OwnedError, PreflightError
from tailrace.state.record import Owner, PipelineRecord, read_pipeline, text_of, time_of
from tailrace.state.transaction import StateSession
from tailrace.system.atomic_file import make_private_folder
from tailrace.system.file_lock import is_locked, try_lock

_FILE = "runner.lock"


class RunnerLock:
    """Held by the one process that runs a pipeline; the system lets it go when that process dies, however it dies.

    Child processes do not inherit it. `acquire` raises OwnedError, naming the holder, while another one has it.
    """

    def __init__(self, state_dir: Path) -> None:
        self._path = Path(state_dir) / _FILE
        self._descriptor: int | None = None

    def acquire(self) -> Self:
        try:
            make_private_folder(self._path.parent)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
    """The process that runs the pipeline now; None when there is none. Changes nothing and needs no right to write."""
    path = Path(state_dir) / _FILE
    return _read(path) if is_locked(path) else None


def _read(path: Path) -> Owner | None:
    try:
        raw: Any = json.loads(path.read_text())
        return Owner(int(raw["pid"]), str(raw["host"]), datetime.fromisoformat(raw["started"]))
    except (OSError, ValueError, KeyError, TypeError):
        # The holder is between locking the file and writing into it.
        return None


# The runner of a pipeline: run numbers that fence off earlier runners, and a lease that keeps later ones out.

LEASE_SECONDS = 30.0


class LeaseStore:
    """The runner of the pipeline. Its number fences; its lease, by the store's own clock, keeps a second runner out."""

    _session: StateSession
    _seconds: float = LEASE_SECONDS

    def pipeline(self) -> PipelineRecord:
        return read_pipeline(self._session.read("SELECT * FROM pipeline WHERE name = :pipeline")[0])

    def claim_run(self, owner: Owner | None = None, *, seconds: float = LEASE_SECONDS, takes_over: bool = False) -> int:
        """Become the runner for `seconds`: from now on writes through any earlier runner's store raise OwnedError.

        Raises OwnedError, naming the holder and the end of its lease, while another process has it; not for a holder
        that is known to be dead (its process is not on this machine, or `takes_over` says so).
        """
        here = owner or Owner.here()
        with self._session.write(fenced=False) as tx:
            at = time_of(tx.run(self._session.database.clock)[0]["at"])
            held = read_pipeline(tx.run("SELECT * FROM pipeline WHERE name = :pipeline")[0])
            holder, until = held.owner, held.lease_until
            if holder and until and until > at and not (takes_over or holder == here or holder.gone):
                raise OwnedError(
                    f"pipeline {held.name} is run by process {holder.pid} on {holder.host};"
                    f" its lease ends at {until:%Y-%m-%d %H:%M:%S} UTC unless it is renewed",
                    fix=f"stop it with `kill {holder.pid}` on {holder.host}; if it is dead, try again after that time",
                )
            row = tx.run(
                "UPDATE pipeline SET run = run + 1, owner_pid = :pid, owner_host = :host, owner_started = :started,"
                " owner_machine = :machine, lease_until = :until WHERE name = :pipeline RETURNING run, changed",
                pid=here.pid,
                host=here.host,
                started=text_of(here.started),
                machine=here.machine,
                until=text_of(at + timedelta(seconds=seconds)),
            )[0]
        self._seconds = seconds
        self._session.become(int(row["run"]), int(row["changed"]))
        return int(row["run"])

    def renew_lease(self) -> None:
        """Another `seconds` from now. Raises OwnedError when a later run has begun."""
        with self._session.write() as tx:
            at = time_of(tx.run(self._session.database.clock)[0]["at"])
            tx.run(
                "UPDATE pipeline SET lease_until = :until WHERE name = :pipeline",
                until=text_of(at + timedelta(seconds=self._seconds)),
            )

    def release_lease(self) -> None:
        """Let go, so that the next runner need not wait. Does nothing when a later run has begun."""
        with self._session.write(fenced=False) as tx:
            tx.run(
                "UPDATE pipeline SET owner_pid = NULL, owner_host = NULL, owner_started = NULL,"
                " owner_machine = NULL, lease_until = NULL WHERE name = :pipeline AND run = :run",
                run=-1 if self._session.run is None else self._session.run,
            )

    def require_owner(self) -> None:
        """Raises OwnedError when a later run has begun. Cheap: called before every batch."""
        self._session.require_run()

    def lease_holder(self) -> Owner | None:
        """The process whose lease lasts now; None when there is none."""
        held = self.pipeline()
        lasts = held.lease_until is not None and held.lease_until > self._session.clock()
        return held.owner if lasts else None
