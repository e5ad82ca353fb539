"""The states of a table and the moves between them.

Init → DataSync → FinishedCopy → SyncWait → Catchup → SyncDone → Ready is the way of every table. Any state may fail;
an Errored table goes back to where it was or starts over. Starting over (a resync) is possible from everywhere.
"""

from __future__ import annotations

from enum import StrEnum


class TableState(StrEnum):
    """What people see. The texts are stored; they never change their meaning."""

    INIT = "Init"  # known, nothing copied
    DATA_SYNC = "DataSync"  # its rows are being copied
    FINISHED_COPY = "FinishedCopy"  # every row of the snapshot is at the destination
    SYNC_WAIT = "SyncWait"  # waits for a batch that may read its part of the log
    CATCHUP = "Catchup"  # reads its changes since the snapshot
    SYNC_DONE = "SyncDone"  # has met the position of the other tables
    READY = "Ready"  # follows the log with them
    ERRORED = "Errored"  # stopped, with a reason and a fix


WAY = (
    TableState.INIT,
    TableState.DATA_SYNC,
    TableState.FINISHED_COPY,
    TableState.SYNC_WAIT,
    TableState.CATCHUP,
    TableState.SYNC_DONE,
    TableState.READY,
)

TRANSITIONS: dict[TableState, frozenset[TableState]] = {
    TableState.INIT: frozenset({TableState.DATA_SYNC, TableState.ERRORED}),
    TableState.DATA_SYNC: frozenset({TableState.FINISHED_COPY, TableState.INIT, TableState.ERRORED}),
    TableState.FINISHED_COPY: frozenset({TableState.SYNC_WAIT, TableState.INIT, TableState.ERRORED}),
    TableState.SYNC_WAIT: frozenset({TableState.CATCHUP, TableState.INIT, TableState.ERRORED}),
    TableState.CATCHUP: frozenset({TableState.SYNC_DONE, TableState.INIT, TableState.ERRORED}),
    TableState.SYNC_DONE: frozenset({TableState.READY, TableState.INIT, TableState.ERRORED}),
    TableState.READY: frozenset({TableState.INIT, TableState.ERRORED}),
    TableState.ERRORED: frozenset(WAY),
}


class TransitionError(ValueError):
    """A move that the table of transitions does not have: a fault in the caller, not in the data."""


def check_move(start: TableState, end: TableState) -> None:
    """Raises TransitionError unless a table may go from `start` to `end` in one step."""
    if end not in TRANSITIONS[start]:
        allowed = ", ".join(sorted(TRANSITIONS[start]))
        raise TransitionError(f"a table in {start} cannot become {end}; from there it can become {allowed}")


def draw_mermaid() -> str:
    """The states as a mermaid diagram, for the documentation."""
    lines = ["stateDiagram-v2", f"    [*] --> {TableState.INIT}"]
    lines += [f"    {start} --> {end}" for start in TableState for end in TableState if end in TRANSITIONS[start]]
    return "\n".join(lines) + "\n"
