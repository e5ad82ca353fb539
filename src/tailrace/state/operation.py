"""What an operator can ask for a table: when it does something, what it does, and leaving the request for the runner.

Commands and the dashboard ask through `leave_requests`, so that both mean the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from tailrace.errors import ConfigError, suggest
from tailrace.state.record import OperatorRequest, Owner, RequestKind, TableRecord
from tailrace.state.state_machine import TableState
from tailrace.state.store import StoreAddress

EFFECTS: Mapping[RequestKind, str] = {
    "resync": "will be copied again; its old rows stay until the new copy is complete",
    "pause": "will be paused; its changes are kept until it is resumed",
    "resume": "will go on where it was paused",
    "retry": "will be tried again",
    "skip": "will go on without the changes that stopped it, which are kept as dead letters",
}
"""What becomes of a table, after its name."""

NEEDS: Mapping[RequestKind, tuple[str, str]] = {
    "retry": ("in error", "not in error"),
    "resume": ("paused", "not paused"),
    "pause": ("running", "paused already"),
}
"""What a table must be for a request to do something, and what the one that was named is instead."""

OpenRequests = Set[tuple[RequestKind, str]]
"""Kind and table of what was asked and is not done yet."""


def open_requests(requests: list[OperatorRequest]) -> OpenRequests:
    return {(request.kind, request.table) for request in requests if request.done_at is None}


def is_of_use(kind: RequestKind, table: TableRecord, opened: OpenRequests) -> bool:
    """Whether a request does something for the table: in its state, or after what was asked before is done."""
    if kind == "retry":
        return table.state is TableState.ERRORED
    if kind in ("pause", "resume"):
        will_pause = ("pause", table.name) in opened or (
            table.paused_at is not None and ("resume", table.name) not in opened
        )
        return will_pause == (kind == "resume") or (kind, table.name) in opened
    return True


@dataclass(frozen=True)
class Asked:
    """What was asked of the runner, and which process that is now; `needless` says why nothing was."""

    requests: tuple[OperatorRequest, ...]
    runner: Owner | None = None
    needless: str | None = None

    @property
    def when(self) -> str:
        """When the runner does it."""
        if self.runner is None:
            return "the pipeline does not run now: at its next start"
        return f"process {self.runner.pid} does it before its next batch"


def leave_requests(address: StoreAddress, kind: RequestKind, table: str | None, argument: str | None = None) -> Asked:
    """Record a request for one table, or for all that it can do something for.

    A table that needs none of it, such as a retry of one that is not in error, is said so and nothing is asked. Raises
    ConfigError for a table the pipeline does not know, and where nothing waits to be skipped. The `argument` of a skip
    is the number of the one dead letter that is meant.
    """
    with address.open_reading() as reader:
        pipeline = reader.pipeline().name
        records = {record.name: record for record in reader.tables()}
        known = list(records)
        opened = open_requests(reader.open_requests())
        waiting = reader.dead_letters(table, "waiting") if kind == "skip" else []
    if table is not None and table not in known:
        raise ConfigError(
            f"pipeline {pipeline} has no table {table}{suggest(table, known)}",
            fix="`tailrace status FILE` lists its tables",
        )
    if kind == "skip" and not any(argument is None or str(letter.id) == argument for letter in waiting):
        which = "no change" if argument is None else f"no change {argument}"
        raise ConfigError(
            f"{which} of {table} waits to be skipped",
            fix="`tailrace errors list FILE` lists what waits; `tailrace status FILE` says why a table is in error",
        )
    wanted = [name for name in ([table] if table is not None else known) if is_of_use(kind, records[name], opened)]
    if not wanted:
        which = f"{table} is" if table is not None else f"no table of pipeline {pipeline} is"
        return Asked((), needless=f"{which} {NEEDS[kind][table is not None]}: nothing to do")
    with address.open() as store:
        return Asked(tuple(store.ask(kind, name, argument) for name in wanted), store.runner())
