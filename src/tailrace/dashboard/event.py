"""What happened when: moves of tables, requests, runs and dead letters, newest first. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tailrace.state import OperatorRequest, RunRecord, TableState
from tailrace.state.record import DeadLetter
from tailrace.state.status import TableStatus

SHOWN = 50

_ENTERED = {
    TableState.INIT: "is known",
    TableState.DATA_SYNC: "is being copied",
    TableState.FINISHED_COPY: "is copied and has to catch up",
    TableState.READY: "follows",
}
"""What is said of a table that came into a state; of the other states nothing."""


@dataclass(frozen=True)
class TimedEvent:
    """`kind` is one of table, error, pause, request, run and letter."""

    at: datetime
    kind: str
    text: str
    table: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"at": self.at.isoformat(), "kind": self.kind, "table": self.table, "text": self.text}


def events_of(
    tables: Sequence[TableStatus],
    requests: Iterable[OperatorRequest],
    letters: Iterable[DeadLetter],
    run: RunRecord | None = None,
) -> list[TimedEvent]:
    """The newest events, newest first."""
    moves = ((at, table, state) for table in tables for state, at in table.since.items() if _is_shown(table, state))
    found = [
        # Of many tables there are many more moves than are shown.
        *(_of_move(*move) for move in heapq.nlargest(SHOWN, moves, key=lambda move: move[0])),
        *(_of_pause(table, table.paused_at) for table in tables if table.paused_at is not None),
        *(event for request in requests for event in _of_request(request)),
        *map(_of_letter, letters),
        *_of_run(run),
    ]
    return sorted(found, key=lambda event: event.at, reverse=True)[:SHOWN]


def _is_shown(table: TableStatus, state: TableState) -> bool:
    return state in _ENTERED or (state is TableState.ERRORED and table.state is state)


def _of_move(at: datetime, table: TableStatus, state: TableState) -> TimedEvent:
    if state is TableState.ERRORED:
        return TimedEvent(at, "error", f"{table.name} stopped: {table.reason or 'no reason is known'}", table.name)
    return TimedEvent(at, "table", f"{table.name} {_ENTERED[state]}", table.name)


def _of_pause(table: TableStatus, at: datetime) -> TimedEvent:
    return TimedEvent(at, "pause", f"{table.name} was paused", table.name)


def _of_letter(letter: DeadLetter) -> TimedEvent:
    text = f"{letter.table}: dead letter {letter.id} is {letter.status}"
    return TimedEvent(letter.last_at, "letter", text, letter.table)


def _of_request(request: OperatorRequest) -> Iterator[TimedEvent]:
    yield TimedEvent(request.at, "request", f"{request.kind} of {request.table} was asked for", request.table)
    if request.done_at is not None:
        outcome = f": {request.outcome}" if request.outcome else ""
        yield TimedEvent(
            request.done_at, "request", f"{request.kind} of {request.table} is done{outcome}", request.table
        )


def _of_run(run: RunRecord | None) -> Iterator[TimedEvent]:
    if run is None:
        return
    yield TimedEvent(run.begun_at, "run", "a run began")
    if run.ended_at is not None:
        yield TimedEvent(
            run.ended_at, "run", f"the run ended: {run.message}" if run.kind else "the run ended", run.table
        )
