"""The values that go into the state store and come out of it. Times are UTC; positions are their text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from tailrace.state.machine import TableState

Retry = Literal["automatic", "manual"]
"""Whether an errored table is tried again by itself or waits for somebody to mend it."""


@dataclass(frozen=True)
class PipelineRecord:
    """The pipeline that owns the state. `epoch` tells one life of it from the next; `run` counts its runners."""

    name: str
    created_at: datetime
    epoch: str
    fingerprint: str
    run: int


@dataclass(frozen=True)
class TableRecord:
    """Everything known about one table. `since` holds when each state was last entered."""

    upstream_id: str
    name: str
    state: TableState
    since: Mapping[TableState, datetime]
    reason: str | None = None
    fix: str | None = None
    retry: Retry | None = None
    resume: str | None = None
    failed_in: TableState | None = None
    rows_copied: int = 0
    rows_total: int | None = None
    chunks_done: int = 0
    chunks_total: int | None = None
    changes_applied: int = 0
    position: str | None = None
    last_change_committed_at: datetime | None = None
    last_applied_at: datetime | None = None


@dataclass(frozen=True)
class TableUpdate:
    """What one batch did to one table: counts are added, the rest replaces what was there unless it is None.

    `steps` are states the table went through, in order. `total` values are those of the whole copy.
    """

    upstream_id: str
    steps: tuple[TableState, ...] = ()
    rows_copied: int = 0
    rows_total: int | None = None
    chunks_done: int = 0
    chunks_total: int | None = None
    changes_applied: int = 0
    position: str | None = None
    last_change_committed_at: datetime | None = None


@dataclass(frozen=True)
class BatchRecord:
    """A micro-batch: the offset it ended at (the source's own JSON), the position up to which the log is applied."""

    id: int
    offset: Mapping[str, Any]
    position: str | None = None
    rows: int = 0
    bytes: int = 0
    seconds: float = 0.0
    at: datetime | None = None


@dataclass(frozen=True)
class SourceStatus:
    """What the receiving half last said of itself. `error` holds its last error, None once it is over."""

    gear: str | None = None
    received: str | None = None
    journal_bytes: int | None = None
    server: str | None = None
    slot_restart: str | None = None
    slot_confirmed: str | None = None
    error: str | None = None
    fix: str | None = None
    at: datetime | None = None


@dataclass(frozen=True)
class Request:
    """Something an operator asked of the runner. `table` is its name."""

    id: int
    kind: Literal["resync"]
    table: str
    at: datetime
    done_at: datetime | None = field(default=None)
