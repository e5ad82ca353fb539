"""The states of a table and the moves between them.

Init → DataSync → FinishedCopy → SyncWait → Catchup → SyncDone → Ready is the way of every table. Any state may fail;
an Errored table goes back to where it was or starts over. Starting over (a resync) is possible from everywhere.
Whether a table is paused is no state. A table that stood still, paused or in error, lags when it goes on: a
Ready table does so from FinishedCopy.
"""

from __future__ import annotations

from enum import StrEnum


class TableState(StrEnum):
    """What people see. The texts are stored; they never change their meaning."""

    INIT = "Init"
    DATA_SYNC = "DataSync"
    FINISHED_COPY = "FinishedCopy"
    SYNC_WAIT = "SyncWait"
    CATCHUP = "Catchup"
    SYNC_DONE = "SyncDone"
    READY = "Ready"
    ERRORED = "Errored"


MEANINGS = {
    TableState.INIT: "The table is known and nothing of it is copied.",
    TableState.DATA_SYNC: "Its rows are being copied.",
    TableState.FINISHED_COPY: "Every row of the snapshot is at the destination, and it is behind the others.",
    TableState.SYNC_WAIT: "It waits for a batch that may read its part of the log.",
    TableState.CATCHUP: "It reads its changes since the snapshot.",
    TableState.SYNC_DONE: "It has met the position of the other tables.",
    TableState.READY: "It follows the log with the other tables.",
    TableState.ERRORED: "It is stopped, with a reason and a fix; the other tables go on.",
}
"""Each state in a sentence, for people."""

WAY = (
    TableState.INIT,
    TableState.DATA_SYNC,
    TableState.FINISHED_COPY,
    TableState.SYNC_WAIT,
    TableState.CATCHUP,
    TableState.SYNC_DONE,
    TableState.READY,
)

PASSING = frozenset({TableState.SYNC_WAIT, TableState.CATCHUP})
"""States that only a runner's memory knows: the next runner begins the catch-up again, from FinishedCopy."""

TRANSITIONS: dict[TableState, frozenset[TableState]] = {
    TableState.INIT: frozenset({TableState.DATA_SYNC, TableState.ERRORED}),
    TableState.DATA_SYNC: frozenset({TableState.FINISHED_COPY, TableState.INIT, TableState.ERRORED}),
    TableState.FINISHED_COPY: frozenset({TableState.SYNC_WAIT, TableState.INIT, TableState.ERRORED}),
    TableState.SYNC_WAIT: frozenset({TableState.CATCHUP, TableState.INIT, TableState.ERRORED}),
    TableState.CATCHUP: frozenset({TableState.SYNC_DONE, TableState.INIT, TableState.ERRORED}),
    TableState.SYNC_DONE: frozenset({TableState.READY, TableState.INIT, TableState.ERRORED}),
    TableState.READY: frozenset({TableState.INIT, TableState.FINISHED_COPY, TableState.ERRORED}),
    TableState.ERRORED: frozenset(WAY) - PASSING,
}


class TransitionError(ValueError):
    """A move that the table of transitions does not have: a fault in the caller, not in the data."""


def check_move(start: TableState, end: TableState) -> None:
    """Raises TransitionError unless a table may go from `start` to `end` in one step."""
    if end not in TRANSITIONS[start]:
        allowed = ", ".join(sorted(TRANSITIONS[start]))
        raise TransitionError(f"a table in {start} cannot become {end}; from there it can become {allowed}")


def durable(state: TableState) -> TableState:
    """What is stored for a table in `state`."""
    return TableState.FINISHED_COPY if state in PASSING else state


def resumed(state: TableState) -> TableState:
    """Where a table goes on that stood still in `state`: it has to catch up before it is Ready again."""
    return min(durable(state), TableState.FINISHED_COPY, key=WAY.index)
