"""The values that go into the state store and come out of it. Times are UTC; positions are their text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, Literal

from tailrace.advice import Retry as Retry
from tailrace.state.lock import Owner
from tailrace.state.machine import TableState

RETRIES: Mapping[Retry, str] = {
    "timed": "It is tried again by itself at `next_try`, each time after a longer wait.",
    "manual": "It waits for somebody to mend the cause and to ask for a retry.",
    "none": "A retry cannot help; the table has to be copied anew.",
}

RequestKind = Literal["resync", "pause", "resume", "retry", "skip"]
DeadLetterStatus = Literal["waiting", "skipped", "resolved"]


@dataclass(frozen=True)
class PipelineRecord:
    """The pipeline that owns the state. `epoch` tells one life of it from the next; `run` counts its runners.

    `owner` took the lease last and has it until `lease_until`, by the clock of the store; None once it let go.
    """

    name: str
    created_at: datetime
    epoch: str
    fingerprint: str
    run: int
    owner: Owner | None
    lease_until: datetime | None


@dataclass(frozen=True)
class TableRecord:
    """Everything known about one table. `since` holds when each state was last entered.

    `attempts` counts failures since a batch of the table last succeeded or a copy was asked for, `next_try` is when
    a timed retry is due. `paused_at` is set while the table is paused. `version` is that of its newest schema. `resume`
    is the position where it goes on after the fix, `failed_in` the state it goes back to.
    """

    upstream_id: str
    name: str
    state: TableState
    since: Mapping[TableState, datetime]
    reason: str | None = None
    fix: str | None = None
    retry: Retry | None = None
    attempts: int = 0
    next_try: datetime | None = None
    paused_at: datetime | None = None
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
    version: int | None = None


@dataclass(frozen=True)
class TableUpdate:
    """What one batch did to one table: counts are added, the rest replaces what was there unless it is None.

    Changes are a success, and so are rows that complete a copy: they set the table's `attempts` back to 0, as a copy
    does that begins because somebody `asked` for it. `steps` are states the table went through, in order. `total`
    values are those of the whole copy.
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
    asked: bool = False


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

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> SourceStatus:
        """What a source says of itself. Words that are not known here are left out: sources may say more."""
        known = {each.name for each in fields(cls)}
        return cls(**{word: value for word, value in said.items() if word in known})


@dataclass(frozen=True)
class OperatorRequest:
    """Something an operator asked of the runner. `table` is its name, `outcome` what came of it."""

    id: int
    kind: RequestKind
    table: str
    at: datetime
    argument: str | None = None
    done_at: datetime | None = None
    outcome: str | None = None


@dataclass(frozen=True)
class DeadLetter:
    """A change that could not be applied, kept as its upstream sent it. `version` is the schema it was read with.

    `raw` holds row values: it is stored and handed out, never shown.
    """

    id: int
    upstream_id: str
    table: str
    position: str
    kind: str
    reason: str
    fix: str | None
    raw: bytes | None = field(repr=False)
    version: int | None
    tries: int
    first_at: datetime
    last_at: datetime
    status: DeadLetterStatus = "waiting"
