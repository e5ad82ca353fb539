"""The values that go into the state store and come out of it. Times are UTC; positions are their text."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from tailrace.advice import Retry as Retry
from tailrace.model.source_status import SourceStatus as SourceStatus
from tailrace.state.database import Row
from tailrace.state.state_machine import TableState


@dataclass(frozen=True)
class Owner:
    """The process that runs a pipeline."""

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


RETRIES: Mapping[Retry, str] = {
    "timed": "It is tried again by itself at `next_try`, each time after a longer wait.",
    "manual": "It waits until someone fixes the cause and asks for a retry.",
    "none": "A retry cannot help; the table has to be copied again.",
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

    @property
    def entered_at(self) -> datetime:
        """When the table came into the state it is in."""
        return self.since[self.state]


@dataclass(frozen=True)
class ChangeCounts:
    """Rows that were copied, and changes as the upstream made them."""

    copied: int = 0
    inserts: int = 0
    updates: int = 0
    deletes: int = 0

    def __add__(self, other: ChangeCounts) -> ChangeCounts:
        return ChangeCounts(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))

    def __bool__(self) -> bool:
        return any(astuple(self))

    @property
    def changes(self) -> int:
        return self.inserts + self.updates + self.deletes


@dataclass(frozen=True)
class TableUpdate:
    """What one batch did to one table: counts are added, the rest replaces what was there unless it is None.

    Changes are a success, and so are rows that complete a copy: they set the table's `attempts` back to 0, as a copy
    does that begins because someone `asked` for it. `steps` are states the table went through, in order. `total`
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
    counts: ChangeCounts = field(default_factory=ChangeCounts)


@dataclass(frozen=True)
class BatchRecord:
    """A micro-batch: the offset it ended at (the source's own JSON), the position up to which the log is applied.

    `bytes` is the size of its changes in memory and of its copied rows as they were staged. `phases` are kept with its
    `BatchDetail`: a batch that is read back has none.
    """

    id: int
    offset: Mapping[str, Any]
    position: str | None = None
    rows: int = 0
    bytes: int = 0
    seconds: float = 0.0
    at: datetime | None = None
    phases: Mapping[str, float] = field(default_factory=dict)


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


# Rows of the store as values and values as rows. Times are stored as text: ISO 8601 in UTC.

TABLE_COLUMNS = (
    "upstream_id",
    "name",
    "state",
    "since",
    "reason",
    "fix",
    "retry",
    "attempts",
    "next_try",
    "paused_at",
    "resume",
    "failed_in",
    "rows_copied",
    "rows_total",
    "chunks_done",
    "chunks_total",
    "changes_applied",
    "position",
    "last_change_committed_at",
    "last_applied_at",
)
"""The columns of `table_state` that `write_table` fills."""

STATUS_COLUMNS = (
    "gear",
    "received",
    "journal_bytes",
    "server",
    "slot_restart",
    "slot_confirmed",
    "error",
    "fix",
    "at",
)
"""The columns of `source_status` that `write_source_status` fills."""

_REQUEST_COLUMNS = ("id", "kind", "table", "at", "argument", "done_at", "outcome")

LETTER_COLUMNS = (
    "id",
    "upstream_id",
    "table",
    "position",
    "kind",
    "reason",
    "fix",
    "raw",
    "version",
    "tries",
    "first_at",
    "last_at",
    "status",
)

_TIMES = frozenset(
    {
        "at",
        "done_at",
        "first_at",
        "last_applied_at",
        "last_at",
        "last_change_committed_at",
        "next_try",
        "paused_at",
    }
)
"""The columns of these tables that hold a time."""


def now() -> datetime:
    return datetime.now(UTC)


def text_of(at: datetime) -> str:
    return at.astimezone(UTC).isoformat()


def time_of(value: str | datetime) -> datetime:
    at = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    return at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)


def storable(text: str) -> str:
    """An error's text without what not every database takes in a text."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")


def read_pipeline(row: Row) -> PipelineRecord:
    owner = None
    if row["owner_pid"] is not None:
        owner = Owner(row["owner_pid"], row["owner_host"], time_of(row["owner_started"]), row["owner_machine"])
    return PipelineRecord(
        row["name"],
        time_of(row["created_at"]),
        row["epoch"],
        row["run"],
        owner,
        _time_or_none(row["lease_until"]),
    )


def read_table(row: Row) -> TableRecord:
    values = _read(row, (*TABLE_COLUMNS, "version"))
    values["state"] = TableState(row["state"])
    values["since"] = {TableState(state): time_of(at) for state, at in json.loads(row["since"]).items()}
    values["failed_in"] = TableState(row["failed_in"]) if row["failed_in"] else None
    return TableRecord(**values)


def write_table(table: TableRecord) -> dict[str, Any]:
    values = _write(table, TABLE_COLUMNS)
    values["since"] = json.dumps({state.value: text_of(at) for state, at in table.since.items()})
    return values


def read_request(row: Row) -> OperatorRequest:
    return OperatorRequest(**_read(row, _REQUEST_COLUMNS))


def read_dead_letter(row: Row) -> DeadLetter:
    return DeadLetter(**_read(row, LETTER_COLUMNS))


def read_batch(row: Row) -> BatchRecord:
    return BatchRecord(
        row["batch_id"],
        json.loads(row["offset"]),
        row["position"],
        row["rows"],
        row["bytes"],
        row["seconds"],
        time_of(row["at"]),
    )


def read_source_status(row: Row) -> SourceStatus:
    return SourceStatus(**_read(row, STATUS_COLUMNS))


def write_source_status(status: SourceStatus) -> dict[str, Any]:
    values = _write(status, STATUS_COLUMNS)
    values["error"] = storable(status.error) if status.error else status.error
    values["at"] = text_of(status.at or now())
    return values


def _read(row: Row, columns: Iterable[str]) -> dict[str, Any]:
    """The columns, each under the name that its record has for it."""
    return {column: _time_or_none(row[column]) if column in _TIMES else row[column] for column in columns}


def _write(record: object, columns: Iterable[str]) -> dict[str, Any]:
    return {column: _stored(vars(record)[column]) for column in columns}


def _stored(value: object) -> object:
    if isinstance(value, datetime):
        return text_of(value)
    return value.value if isinstance(value, TableState) else value


def _time_or_none(value: str | None) -> datetime | None:
    return time_of(value) if value else None
