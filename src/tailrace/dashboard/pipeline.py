"""A pipeline as the dashboard sees it: its store is read at most once a second, however many look."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from tailrace.config.pipeline import PipelineConfig
from tailrace.dashboard.answer import JsonAnswer, encode
from tailrace.dashboard.event import events_of
from tailrace.dashboard.fix import fix_of
from tailrace.dashboard.health import Health, lag_of
from tailrace.dashboard.record import batch_to_dict, letter_to_dict, request_to_dict
from tailrace.dashboard.row import GROUPS, RowLog, group_of, rounded, row_of
from tailrace.dashboard.series import series_of
from tailrace.dashboard.shared import SharedReadings
from tailrace.dashboard.slot import slot_to_dict
from tailrace.dashboard.table import TableView
from tailrace.dashboard.way import way_of
from tailrace.errors import PipelinePlace, TailraceError, name_file
from tailrace.state import StateStore
from tailrace.state.operation import Asked, leave_requests
from tailrace.state.record import RequestKind
from tailrace.state.status import PipelineStatus, StatusReader, TableStatus

READ_SECONDS = 1.0
"""How old a reading may be that is shown."""
ROW_HOURS = 24
"""Of so many hours each table's counts are in its row."""
_SERIES_SECONDS = 5.0
_HOURS_SECONDS = 60.0
"""How often the counts by hour are read: of many tables they are many."""
_READ_BATCHES = 50
_SHOWN_BATCHES = 20
_SHOWN_LETTERS = 20
_SHOWN_REQUESTS = 20

T = TypeVar("T")


@dataclass(frozen=True)
class Snapshot:
    """A pipeline at one moment. `status` is None where `error` says why its state cannot be read. Later readings have
    higher numbers."""

    number: int
    at: datetime
    health: Health
    status: PipelineStatus | None = None
    error: TailraceError | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    detail: dict[str, Any] = field(default_factory=dict)
    rows: Mapping[str, str] = field(default_factory=dict)
    """The tables by their ids, each as JSON."""
    answers: dict[int, JsonAnswer] = field(default_factory=dict)
    """What was encoded of it, by the hours of its series."""

    def require(self) -> PipelineStatus:
        """The status. Raises the error for which there is none."""
        if self.error is not None:
            raise self.error
        assert self.status is not None
        return self.status


class WatchedPipeline:
    """One pipeline of the dashboard, for one event loop."""

    def __init__(self, config: PipelineConfig, file: Path) -> None:
        self.config = config
        self.file = PipelinePlace(file, config.member)
        self._readings = SharedReadings()
        self._status = StatusReader()
        self._rows = RowLog()
        self._listed = 0
        self._hours: Mapping[str, Sequence[int]] = {}
        self._hours_read = float("-inf")
        self._numbers = itertools.count(1)

    @property
    def name(self) -> str:
        return self.config.name

    async def snapshot(self) -> Snapshot:
        """The newest reading. Never raises: a state that cannot be read is one to show."""
        return await self._readings.get("snapshot", self._read, READ_SECONDS)

    async def summary(self) -> dict[str, Any]:
        """What the list of pipelines has of it."""
        return (await self.snapshot()).summary

    async def rows(self, since: str | None) -> JsonAnswer:
        """The tables, or those that changed since a version. Raises TailraceError if the state cannot be read."""
        snapshot = await self.snapshot()
        snapshot.require()
        # A later one may have been listed meanwhile.
        if snapshot.number > self._listed:
            self._listed = snapshot.number
            self._rows.update(snapshot.rows)
        return self._rows.since(since)

    async def detail(self, hours: int) -> JsonAnswer:
        """All but the tables, with series of so many hours. Raises TailraceError if the state cannot be read."""
        snapshot = await self.snapshot()
        snapshot.require()
        series = await self._readings.get(f"series {hours}", lambda: self._read_series(hours), _SERIES_SECONDS)
        if hours not in snapshot.answers:
            value = snapshot.summary | snapshot.detail | {"series": series}
            snapshot.answers[hours] = JsonAnswer.of(value, without="at")
        return snapshot.answers[hours]

    async def table(self, name: str) -> JsonAnswer | None:
        """Everything about one table; None if the pipeline has none of this name. Raises TailraceError as `rows`."""
        status = (await self.snapshot()).require()
        # A table that was dropped and created again has two entries of its name for a while.
        found = max((one for one in status.tables if one.name == name), key=lambda one: one.entered_at, default=None)
        if found is None:
            return None
        view = TableView(self.config, self.file, found)
        return await self._readings.get(f"table {name}", lambda: self._using(view.read), READ_SECONDS)

    async def request(self, request_id: int) -> dict[str, Any] | None:
        """One request and what became of it; None if there is none of this number."""

        def read(store: StateStore) -> dict[str, Any] | None:
            found = store.request(request_id)
            return request_to_dict(found) if found else None

        return await self._readings.get(f"request {request_id}", lambda: self._using(read), READ_SECONDS / 2)

    def ask(self, kind: RequestKind, table: str, argument: str | None) -> Asked:
        """Leave a request, as the command of this name does; blocks. Raises what `leave_requests` does."""
        return leave_requests(self.config.store_address, kind, table, argument)

    # -- reading the store, in threads --------------------------------------------------------------------------

    def _using(self, read: Callable[[StateStore], T]) -> T:
        # Opened each time: the file may have been moved, upgraded or made since.
        with self.config.store_address.open_reading() as store:
            return read(store)

    def _read(self) -> Snapshot:
        """Read the state, and make of it whatever takes its time with many tables."""
        try:
            return self._using(self._read_all)
        except TailraceError as error:
            at, health = datetime.now(UTC), Health.of_error(error)
            summary = self._summary(at, health, None)
            return Snapshot(next(self._numbers), at, health, error=error, summary=summary)

    def _read_all(self, store: StateStore) -> Snapshot:
        status = self._status.read(store)
        if time.monotonic() - self._hours_read >= _HOURS_SECONDS:
            self._hours, self._hours_read = read_hours(store, status.at), time.monotonic()
        health = Health.of(status)
        return Snapshot(
            next(self._numbers),
            status.at,
            health,
            status,
            summary=self._summary(status.at, health, status),
            detail=self._detail(store, status),
            rows={one.upstream_id: encode(row_of(one, self._hours.get(one.upstream_id, ()))) for one in status.tables},
        )

    def _read_series(self, hours: int) -> dict[str, Any]:
        since = datetime.now(UTC) - timedelta(hours=hours)
        return self._using(lambda store: series_of(store.samples(since)))

    # -- as values ----------------------------------------------------------------------------------------------

    def _summary(self, at: datetime, health: Health, status: PipelineStatus | None) -> dict[str, Any]:
        return {
            "name": self.name,
            "file": str(self.file),
            "at": at.isoformat(),
            "health": {
                "level": health.level,
                "sentence": name_file(health.sentence, self.file),
                "detail": health.detail,
                "table": health.table,
                "fix": fix_of(health.fix, self.file, health.table),
            },
            "tables": count_groups(status.tables if status else ()),
            "copied_per_second": rounded(status.copied_per_second) if status else None,
            "changes_per_second": rounded(status.changes_per_second) if status else None,
            "bytes_per_second": rounded(status.bytes_per_second) if status else None,
            "lag_seconds": rounded(lag_of(status)) if status else None,
            "lag_bytes": status.lag_bytes if status else None,
        }

    def _detail(self, store: StateStore, status: PipelineStatus) -> dict[str, Any]:
        batches, letters = store.recent_batches(_READ_BATCHES), store.recent_letters(_SHOWN_LETTERS)
        details = {one.id: one for one in store.batch_details(_SHOWN_BATCHES)}
        # The tables are in the rows.
        values = {key: each for key, each in replace(status, tables=()).to_dict().items() if key in _FROM_STATUS}
        for part in filter(None, (values["source"], values["last_run"], values["delivery"], *values["notices"])):
            part["fix"] = fix_of(part.get("fix"), self.file, part.get("table"))
        source, destination = self.config.source.type, self.config.destination.type
        return {
            **values,
            "source_type": source,
            "destination_type": destination,
            "way": [stage.to_dict() for stage in way_of(status, batches, source, destination)],
            "slot": slot_to_dict(status, getattr(self.config.source, "slot", None), self.file),
            "batches": [batch_to_dict(one, details.get(one.id)) for one in batches[:_SHOWN_BATCHES]],
            "requests": [request_to_dict(one) for one in status.recent_requests[:_SHOWN_REQUESTS]],
            "letters": [letter_to_dict(one, self.file) for one in letters],
            "events": [
                one.to_dict() for one in events_of(status.tables, status.recent_requests, letters, status.last_run)
            ],
        }


_FROM_STATUS = ("runner", "batch", "position", "source", "last_run", "notices", "alerts", "delivery", "phases")
"""What the answer has in the words of `tailrace status --json`."""


def count_groups(tables: Iterable[TableStatus]) -> dict[str, int]:
    """How many tables there are, and how many in each group."""
    groups = [group_of(table) for table in tables]
    return {"total": len(groups), **{group: groups.count(group) for group in GROUPS}}


def read_hours(store: StateStore, now: datetime) -> dict[str, list[int]]:
    """By table, the changes of each of the last hours; rows of copies would hide them."""
    first = now.replace(minute=0, second=0, microsecond=0) - timedelta(hours=ROW_HOURS - 1)
    found: dict[str, list[int]] = {}
    for one in store.activity(first):
        place = round((one.hour - first).total_seconds() / 3600)
        if 0 <= place < ROW_HOURS:
            found.setdefault(one.upstream_id, [0] * ROW_HOURS)[place] += one.counts.changes
    return found
