"""Who runs the pipeline: run numbers that fence off earlier runners, and a lease that keeps later ones out."""

from __future__ import annotations

from datetime import timedelta

from tailrace.errors import OwnedError
from tailrace.state.lock import Owner
from tailrace.state.record import PipelineRecord
from tailrace.state.row import read_pipeline, text_of, time_of
from tailrace.state.session import StateSession

LEASE_SECONDS = 30.0


class LeaseStore:
    """Implements `Lease` over a session."""

    _session: StateSession
    _seconds: float = LEASE_SECONDS

    def pipeline(self) -> PipelineRecord:
        return read_pipeline(self._session.read("SELECT * FROM pipeline WHERE name = :pipeline")[0])

    def claim_run(self, owner: Owner | None = None, *, seconds: float = LEASE_SECONDS, takes_over: bool = False) -> int:
        here = owner or Owner.here()
        with self._session.write(fenced=False) as tx:
            at = time_of(tx.run(self._session.engine.clock)[0]["at"])
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
        with self._session.write() as tx:
            at = time_of(tx.run(self._session.engine.clock)[0]["at"])
            tx.run(
                "UPDATE pipeline SET lease_until = :until WHERE name = :pipeline",
                until=text_of(at + timedelta(seconds=self._seconds)),
            )

    def release_lease(self) -> None:
        with self._session.write(fenced=False) as tx:
            tx.run(
                "UPDATE pipeline SET owner_pid = NULL, owner_host = NULL, owner_started = NULL,"
                " owner_machine = NULL, lease_until = NULL WHERE name = :pipeline AND run = :run",
                run=-1 if self._session.run is None else self._session.run,
            )

    def require_owner(self) -> None:
        self._session.require_run()

    def lease_holder(self) -> Owner | None:
        held = self.pipeline()
        lasts = held.lease_until is not None and held.lease_until > self._session.clock()
        return held.owner if lasts else None
