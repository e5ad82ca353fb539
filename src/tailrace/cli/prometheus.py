"""A pipeline's status as Prometheus metrics: names of tables, never a row value."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tailrace.destination.capability import QueueStatus
from tailrace.state import TableState
from tailrace.state.status import PipelineStatus, TableStatus

StatusAndQueue = tuple[PipelineStatus, QueueStatus | None]
"""Of the pipeline, and of its destination's queue where it has one."""


@dataclass(frozen=True)
class MetricSpec:
    """One metric. `value` gets its subject: a `PipelineStatus`, a `TableStatus` or a `QueueStatus`. None: not known."""

    name: str
    meaning: str
    value: Callable[[Any], float | None]

    def of(self, subjects: Iterable[tuple[Mapping[str, str], Any]]) -> Iterator[Metric]:
        """The metric of every subject whose value is known, under its labels. Nothing where none is known."""
        known = [(labels, value) for labels, one in subjects if (value := self.value(one)) is not None]
        if known:
            kind = CounterMetricFamily if self.name.endswith("_total") else GaugeMetricFamily
            family = kind(self.name, self.meaning)
            for labels, value in known:
                # Not all have the same labels: `destination` is only there where a pipeline has several.
                family.add_sample(self.name, dict(labels), value)
            yield family


UP: Final = MetricSpec("tailrace_up", "1 when the state could be read", lambda is_up: is_up)
PIPELINE: Final = (
    MetricSpec("tailrace_running", "1 while a runner owns the pipeline", lambda status: status.runner is not None),
    MetricSpec("tailrace_batch", "The number of the last batch that is done", lambda status: status.batch),
    MetricSpec(
        "tailrace_rows_per_second", "Rows and changes of the last minute", lambda status: status.rows_per_second
    ),
    MetricSpec("tailrace_copied_per_second", "Rows copied, of the last minute", lambda one: one.copied_per_second),
    MetricSpec("tailrace_changes_per_second", "Changes of the last minute", lambda one: one.changes_per_second),
    MetricSpec(
        "tailrace_bytes_per_second", "Size of what was applied in the last minute", lambda one: one.bytes_per_second
    ),
    MetricSpec(
        "tailrace_batch_seconds", "How long the last batch took", lambda one: one.last_batch and one.last_batch.seconds
    ),
    MetricSpec(
        "tailrace_batch_rows", "Rows and changes of the last batch", lambda one: one.last_batch and one.last_batch.rows
    ),
    MetricSpec(
        "tailrace_batch_bytes", "The size of the last batch", lambda one: one.last_batch and one.last_batch.bytes
    ),
    MetricSpec("tailrace_lag_bytes", "Log of the server that is not applied", lambda status: status.lag_bytes),
    MetricSpec("tailrace_lag_seconds", "Age of the last change while more waits", lambda status: status.lag_seconds),
    MetricSpec(
        "tailrace_alerts",
        "Alerts that people were told of and that still hold",
        lambda status: sum(alert.told_at is not None for alert in status.alerts),
    ),
    MetricSpec("tailrace_notices", "Things that the run leaves out", lambda status: len(status.notices)),
    MetricSpec("tailrace_requests", "Requests of operators that are open", lambda status: len(status.requests)),
    MetricSpec(
        "tailrace_journal_bytes",
        "The size of the journal",
        lambda status: status.source.journal_bytes if status.source else None,
    ),
    MetricSpec(
        "tailrace_source_failing",
        "1 while receiving fails",
        lambda status: status.source.error is not None if status.source else None,
    ),
    MetricSpec(
        "tailrace_slot_bytes",
        "Log that the server keeps for the slot",
        lambda status: status.slot.kept_bytes if status.slot else None,
    ),
    MetricSpec(
        "tailrace_slot_safe_bytes",
        "Log that the server can write before it gives the slot up",
        lambda status: status.slot.safe_bytes if status.slot else None,
    ),
    MetricSpec(
        "tailrace_slot_growth_bytes",
        "By how many bytes a second the slot grew in the last ten minutes",
        lambda status: status.slot.growth if status.slot else None,
    ),
    MetricSpec(
        "tailrace_slot_full_seconds",
        "Seconds until then, if the slot grows as it did",
        lambda status: status.slot.full_in if status.slot else None,
    ),
)
PHASE: Final = MetricSpec("tailrace_batch_phase_seconds", "Seconds of work in a phase of the last batch", float)
TABLE: Final = (
    MetricSpec("tailrace_table_rows_copied_total", "Rows of the copy", lambda table: table.rows_copied),
    MetricSpec("tailrace_table_changes_applied_total", "Changes", lambda table: table.changes_applied),
    MetricSpec("tailrace_table_inserts_total", "Inserts among them", lambda table: table.counts.inserts),
    MetricSpec("tailrace_table_updates_total", "Updates among them", lambda table: table.counts.updates),
    MetricSpec("tailrace_table_deletes_total", "Deletes among them", lambda table: table.counts.deletes),
    MetricSpec("tailrace_table_lag_bytes", "Log of the server that is not applied", lambda table: table.lag_bytes),
    MetricSpec(
        "tailrace_table_lag_seconds", "Age of the last change while more waits", lambda table: table.lag_seconds
    ),
    MetricSpec("tailrace_table_paused", "1 while it is paused", lambda table: table.paused_at is not None),
    MetricSpec("tailrace_table_attempts", "Failures in a row", lambda table: table.attempts),
    MetricSpec("tailrace_table_dead_letters", "Changes that wait as dead letters", lambda table: table.letters),
)
SLOT: Final = MetricSpec("tailrace_slot_status", "1 for what the server says of the slot", lambda is_so: is_so)
_SLOT_STATUS = ("reserved", "extended", "unreserved", "lost")
STATE: Final = MetricSpec("tailrace_table_state", "1 for the state a table is in", lambda is_in: is_in)
QUEUE: Final = (
    MetricSpec("tailrace_queue_running", "1 while a sender runs on this node", lambda queue: queue.running),
    MetricSpec("tailrace_queue_leader", "1 while this node sends", lambda queue: queue.leader),
    MetricSpec("tailrace_queue_pending", "Events that wait", lambda queue: queue.pending),
    MetricSpec("tailrace_queue_bytes", "The size of the queue", lambda queue: queue.bytes),
    MetricSpec("tailrace_queue_delivered_total", "Events delivered", lambda queue: queue.delivered),
    MetricSpec("tailrace_queue_dropped_total", "Events given up", lambda queue: queue.dropped),
    MetricSpec("tailrace_queue_failures", "Failed requests in a row", lambda queue: queue.failures),
    MetricSpec("tailrace_queue_lag_seconds", "Age of the oldest event that waits", lambda queue: _lag(queue)),
)


def _lag(queue: QueueStatus) -> float | None:
    if queue.pending == 0:
        return 0.0
    return max(0.0, time.time() - datetime.fromisoformat(queue.oldest).timestamp()) if queue.oldest else None


class PipelineMetrics(Collector):
    """Reads the status of pipelines at each request. That one cannot be read is a metric too: `tailrace_up` is 0.

    `read` gives the pipelines by name; None for one whose state cannot be read.
    """

    def __init__(self, read: Callable[[], Mapping[str, StatusAndQueue | None]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        found = self._read()
        known = [(_labels(name), *each) for name, each in found.items() if each is not None]
        yield from UP.of((_labels(name), each is not None) for name, each in found.items())
        for figure in PIPELINE:
            yield from figure.of((own, status) for own, status, _ in known)
        yield from PHASE.of(
            (own | {"phase": name}, spent) for own, status, _ in known for name, spent in status.phases.items()
        )
        yield from SLOT.of(
            (own | {"status": name}, name == status.slot.status)
            for own, status, _ in known
            if status.slot
            for name in _SLOT_STATUS
        )
        tables = [(own | {"table": name}, table) for own, status, _ in known for name, table in _tables(status)]
        for figure in TABLE:
            yield from figure.of(tables)
        yield from STATE.of(
            (labels | {"state": state}, state is table.state) for labels, table in tables for state in TableState
        )
        for figure in QUEUE:
            yield from figure.of((own, queue) for own, _, queue in known if queue is not None)


def _labels(name: str) -> dict[str, str]:
    """Of a pipeline and, after a dot in its name, of one of its destinations."""
    pipeline, _, destination = name.partition(".")
    return {"pipeline": pipeline, "destination": destination} if destination else {"pipeline": pipeline}


def _tables(status: PipelineStatus) -> list[tuple[str, TableStatus]]:
    # A table that was dropped and created again has two entries of its name for a while; a line may come only once.
    by_name = {table.name: table for table in sorted(status.tables, key=lambda table: table.entered_at)}
    return sorted(by_name.items())


def text_of(read: Callable[[], Mapping[str, StatusAndQueue | None]]) -> bytes:
    """The metrics as Prometheus reads them."""
    registry = CollectorRegistry()
    registry.register(PipelineMetrics(read))
    return generate_latest(registry)
