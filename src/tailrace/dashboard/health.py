"""How a pipeline does, in a sentence. Pure: from a status to words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tailrace.dashboard.slot import is_at_risk, slot_fix
from tailrace.errors import TailraceError
from tailrace.state import TableState
from tailrace.state.status import PipelineStatus, TableStatus

HealthLevel = Literal["healthy", "degraded", "failing", "stopped", "unknown"]
"""healthy: all is well; degraded: it goes on, and something is not as it should be; failing: someone must act;
stopped: it does not run, and no error ended it; unknown: its state cannot be read."""

LEVELS: tuple[HealthLevel, ...] = ("healthy", "degraded", "failing", "stopped", "unknown")
_HOUR = 3600.0
_FOLLOWING = (TableState.READY, TableState.SYNC_DONE)


@dataclass(frozen=True)
class Health:
    """`sentence` is one line, `detail` the second; `table` is where to look first."""

    level: HealthLevel
    sentence: str
    detail: str = ""
    fix: str | None = None
    table: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return vars(self)

    @classmethod
    def of_error(cls, error: TailraceError) -> Health:
        """Of a pipeline whose state cannot be read."""
        return cls("unknown", error.message, fix=error.fix)

    @classmethod
    def of(cls, status: PipelineStatus) -> Health:
        """The most serious of what there is to say."""
        return _not_running(status) or _source(status) or _tables(status) or _slot(status) or _well(status)


def _not_running(status: PipelineStatus) -> Health | None:
    if status.runner is not None:
        return None
    run, start = status.last_run, "tailrace run FILE"
    if run is not None and run.kind is not None:
        return Health("failing", f"{status.pipeline} stopped: {run.message}", _standing(status), run.fix, run.table)
    if run is not None and run.ended_at is None:
        return Health("failing", f"The process that ran {status.pipeline} has died", _standing(status), start)
    if status.errored:
        return Health("failing", *_errored(status), "", start, status.errored[0].name)
    return Health("stopped", f"{status.pipeline} does not run", _standing(status), start)


def _source(status: PipelineStatus) -> Health | None:
    source, slot, delivery = status.source, status.slot, status.delivery
    if slot is not None and slot.status == "lost":
        text = "The server has given up the slot: changes are lost"
        return Health("failing", text, _standing(status), slot_fix(slot))
    if slot is not None and slot.full_in is not None and slot.full_in < _HOUR:
        return Health("failing", f"The slot is full in {duration(slot.full_in)}", _standing(status), slot_fix(slot))
    if source is not None and source.error is not None:
        level: HealthLevel = "failing" if source.gear == "full" else "degraded"
        return Health(level, f"The source: {source.error}", _standing(status), source.fix)
    if delivery is not None and delivery.error is not None:
        return Health("degraded", f"Nothing is delivered: {delivery.error}", _standing(status), delivery.fix)
    return None


def _tables(status: PipelineStatus) -> Health | None:
    errored = status.errored
    if not errored:
        return None
    waiting = [table for table in errored if table.retry != "timed"]
    first = (waiting or list(errored))[0]
    detail = _others(status)
    if waiting:
        text = _count(len(waiting), status, "needs you", "need you", first)
        return Health("failing", text, detail, first.fix, first.name)
    text = _count(len(errored), status, "is tried again", "are tried again", first)
    return Health("degraded", text, detail, first.fix, first.name)


def _slot(status: PipelineStatus) -> Health | None:
    slot = status.slot
    if slot is None or not is_at_risk(slot):
        return None
    if slot.status == "unreserved":
        text = "The server may give up the slot at its next checkpoint"
        return Health("failing", text, _standing(status), slot_fix(slot))
    text = f"The slot is full in {duration(slot.full_in or 0.0)}"
    return Health("degraded", text, _standing(status), slot_fix(slot))


def _well(status: PipelineStatus) -> Health:
    total, paused = len(status.tables), sum(table.paused_at is not None for table in status.tables)
    following = sum(table.state in _FOLLOWING and table.paused_at is None for table in status.tables)
    if total == 0:
        return Health("healthy", "The pipeline has begun; no table is known yet")
    if following + paused < total:
        text = f"{following} of {total} tables follow, {total - following - paused} are on their way"
    elif paused:
        text = f"{following} of {total} tables follow, {paused} {'is' if paused == 1 else 'are'} paused"
    else:
        text = "The table follows" if total == 1 else f"All {total} tables follow"
    return Health("healthy", text, _lag(status))


def _errored(status: PipelineStatus) -> tuple[str]:
    return (f"{status.pipeline} does not run, and {status.errored[0].name} is in error",)


def _count(count: int, status: PipelineStatus, one: str, many: str, first: TableStatus) -> str:
    if count == 1:
        return f"1 of {len(status.tables)} tables {one}: {first.name}"
    return f"{count} of {len(status.tables)} tables {many}"


def _others(status: PipelineStatus) -> str:
    return f"The others go on. {_lag(status)}".strip()


def _standing(status: PipelineStatus) -> str:
    total, following = len(status.tables), sum(table.state in _FOLLOWING for table in status.tables)
    if total == following == 1:
        return "The table has caught up."
    return f"{following} of {total} tables have caught up." if total else ""


def _lag(status: PipelineStatus) -> str:
    lag = lag_of(status)
    if lag is None:
        return ""
    return "They are up to date." if lag < 1 else f"The last applied change is {duration(lag)} old."


def lag_of(status: PipelineStatus) -> float | None:
    """The lag of the slowest table that follows; None when it is not known of any."""
    known = [table.lag_seconds for table in status.tables if table.state in _FOLLOWING and table.paused_at is None]
    return max((lag for lag in known if lag is not None), default=None)


def duration(seconds: float) -> str:
    """A duration in its two largest units: `3 h 40 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    parts = ((whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s"))
    first = next(index for index, (count, _) in enumerate(parts) if count)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count)


def size(count: float) -> str:
    """Bytes for people: `2.9 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
