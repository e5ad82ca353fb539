"""The way of a change, as stages: source, slot, journal, batch, destination; and which of them holds the others up.

Pure: from a status to stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tailrace.dashboard.health import duration, lag_of, size
from tailrace.state import BatchRecord
from tailrace.state.status import PipelineStatus

SLOW_SECONDS = 5.0
"""A lag from which on a stage counts as slow."""
BUSY = 0.7
"""The part of the last minute that batches took, from which on they hold the others up."""
_MINUTE = 60.0
_UNRECEIVED_BYTES = 64_000_000
"""Log that is on the server and not received, from which on receiving counts as slow."""
_OF_DESTINATION = ("write", "commit")


@dataclass(frozen=True)
class WayStage:
    """One stage: `value` is its figure, `detail` a second one. `why` says what makes it slow; None where it is not."""

    stage: str
    title: str
    value: str
    detail: str = ""
    why: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "slow": self.why is not None}


def way_of(status: PipelineStatus, batches: Sequence[BatchRecord], source: str, destination: str) -> list[WayStage]:
    """The stages in their order; `source` and `destination` are their types. At most one is slow."""
    stages = [_source(status, source), _slot(status), _journal(status), _batch(status, batches)]
    stages.append(_destination(status, destination))
    known = [stage for stage in stages if stage is not None]
    slow = _slow(status, batches)
    return [replace(stage, why=slow[1]) if slow and stage.stage == slow[0] else stage for stage in known]


def _source(status: PipelineStatus, kind: str) -> WayStage:
    gear = status.source.gear if status.source else None
    return WayStage("source", "Source", kind, f"mode {gear}" if gear else "")


def _slot(status: PipelineStatus) -> WayStage | None:
    slot = status.slot
    if slot is None:
        return None
    kept = size(slot.kept_bytes) if slot.kept_bytes is not None else "-"
    if slot.kept_bytes is not None and slot.safe_bytes is not None:
        share = slot.kept_bytes / max(slot.kept_bytes + slot.safe_bytes, 1)
        return WayStage("slot", "Slot", kept, f"kept by the server, {share:.0%} of what it may")
    return WayStage("slot", "Slot", kept, "kept by the server")


def _journal(status: PipelineStatus) -> WayStage | None:
    source = status.source
    if source is None or source.journal_bytes is None:
        return None
    return WayStage("journal", "Journal", size(source.journal_bytes), "received and durable")


def _batch(status: PipelineStatus, batches: Sequence[BatchRecord]) -> WayStage:
    if not batches:
        return WayStage("batch", "Batch", "-", "none yet")
    last, phase = batches[0], slowest_phase(status)
    detail = f"{phase[0]} takes {phase[1]:.0%} of it" if phase else f"{last.rows:,} rows"
    return WayStage("batch", f"Batch {last.id:,}", duration(last.seconds), detail)


def _destination(status: PipelineStatus, kind: str) -> WayStage:
    delivery = status.delivery
    if delivery is not None:
        waiting = f"{delivery.pending:,} events wait" if delivery.pending else "no event waits"
        return WayStage("destination", f"Destination: {kind}", waiting, _lag_text(status.delivery_lag))
    return WayStage("destination", f"Destination: {kind}", _lag_text(lag_of(status)) or "-", "")


def _lag_text(lag: float | None) -> str:
    if lag is None:
        return ""
    return "up to date" if lag < 1 else f"lags {duration(lag)}"


def slowest_phase(status: PipelineStatus) -> tuple[str, float] | None:
    """The phase that took most of the last batch, and its part of the work."""
    phases = dict(status.phases)
    phases["decode"] = phases.get("decode", 0.0) + phases.pop("wait", 0.0)  # the wait is for what is not decoded yet
    total = sum(phases.values())
    if total <= 0:
        return None
    name = max(phases, key=lambda each: phases[each])
    return name, phases[name] / total


def _slow(status: PipelineStatus, batches: Sequence[BatchRecord]) -> tuple[str, str] | None:
    """The stage that the others wait for, and why."""
    source, delivery = status.source, status.delivery
    if status.runner is None:
        return None
    if source is not None and source.gear == "full":
        return "journal", source.error or "the journal is full"
    if source is not None and source.error is not None:
        return "source", source.error
    if delivery is not None and delivery.error is not None:
        return "destination", delivery.error
    unreceived = _unreceived(status)
    if unreceived is not None and unreceived > _UNRECEIVED_BYTES:
        return "journal", f"{size(unreceived)} of the server's log are not received yet"
    busy, lag = busy_part(status, batches), lag_of(status) or 0.0
    if busy < BUSY and lag < SLOW_SECONDS:
        late = status.delivery_lag
        return ("destination", f"the oldest event waits {duration(late)}") if late and late > SLOW_SECONDS else None
    phase = slowest_phase(status)
    if phase is None:
        return "batch", f"batches take {busy:.0%} of the time"
    stage = "destination" if phase[0] in _OF_DESTINATION else "batch"
    return stage, f"{phase[0]} takes {phase[1]:.0%} of a batch, and batches {busy:.0%} of the time"


def busy_part(status: PipelineStatus, batches: Sequence[BatchRecord]) -> float:
    """The part of the last minute during which a batch was under way."""
    recent = [one for one in batches if one.at is not None and (status.at - one.at).total_seconds() < _MINUTE]
    return min(1.0, sum(one.seconds for one in recent) / _MINUTE)


def _unreceived(status: PipelineStatus) -> int | None:
    source = status.source
    if source is None or source.server is None or source.received is None:
        return None
    return max(0, int(source.server[:16], 16) - int(source.received[:16], 16))
