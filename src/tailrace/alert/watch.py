"""Watches a pipeline that runs, in a thread of its own, and tells people when it needs them.

What people know is kept in the state store: a restart tells them nothing twice. An alert that cannot be sent is tried
again, after longer and longer waits, for as long as it differs from what they know. Nothing here ends the pipeline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Literal, Self

from tailrace.alert.condition import Condition, conditions, stopped
from tailrace.alert.delivery import Alert, Delivery, open_delivery
from tailrace.alert.option import LEAST_REPEAT, AlertName, AlertOptions
from tailrace.errors import OwnedError, TailraceError, UnavailableError
from tailrace.state.record import text_of
from tailrace.state.report import AlertRecord
from tailrace.state.status import PipelineStatus
from tailrace.state.store import StateStore, StoreAddress
from tailrace.system.backoff import Backoff

LOOK_SECONDS = 5.0
END_SECONDS = 1.0
LAST_ATTEMPTS = 3
"""How often a run that ends tries to tell people why."""

_BACKOFF = Backoff((5.0, 15.0, 60.0, 300.0))
_log = logging.getLogger(__name__)

News = Literal["firing", "resolved"]


@dataclass(frozen=True)
class AlertStep:
    """What is known of an alert now, None when there is nothing to remember, and what people should be told."""

    record: AlertRecord | None
    news: News | None = None


def step(
    name: str, before: AlertRecord | None, found: Condition | None, at: datetime, wait: float, repeat: float | None
) -> AlertStep:
    """One look at one alert. Pure.

    People are told once it has held for `wait` seconds, again after `repeat` or when it concerns more tables, and at
    the end once it has not held for `wait`.
    """
    holds = found is not None
    if before is None:
        if not holds:
            return AlertStep(None)
        before = AlertRecord(name, holds=True, since=at)
    record = before if before.holds == holds else replace(before, holds=holds, since=at)
    is_due = (at - record.since).total_seconds() >= wait
    if found is None:
        if record.told_at is None:
            return AlertStep(None)
        return AlertStep(record, "resolved" if is_due else None)
    if record.told_at is None:
        return AlertStep(record, "firing" if is_due else None)
    ago = (at - record.told_at).total_seconds()
    is_more = not set(found.tables) <= set(record.tables) and ago >= LEAST_REPEAT
    return AlertStep(record, "firing" if is_more or (repeat is not None and ago >= repeat) else None)


class AlertWatch:
    """Looks at the pipeline every few seconds within its `with` block, which may end with the error that stops it.

    With `once` the run is short: what holds at its end is told without a wait.
    """

    def __init__(
        self,
        options: AlertOptions,
        store: StateStore,
        *,
        once: bool = False,
        delivery: Delivery | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._options = options
        self._store = store
        self._once = once
        self._delivery = delivery or open_delivery(options)
        self._clock = clock
        self._pipeline = store.pipeline().name
        self._records = {record.name: record for record in store.alerts() if record.name in options.conditions}
        self._attempts: dict[str, int] = {}
        self._next_attempt: dict[str, datetime] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tailrace-alerts", daemon=True)

    def look(self, *, is_last: bool = False) -> None:
        """See what holds now, and tell people what they should know. Raises OwnedError when a later run has begun."""
        found = conditions(self._options, PipelineStatus.read(self._store, at=self._clock()))
        for name in self._options.conditions:
            self._consider(name, found.get(name), is_last=is_last)
        self._store.put_alerts(list(self._records.values()))

    def stop(self, error: BaseException) -> None:
        """Tell people that this error has ended the run."""
        if "stopped" not in self._options.conditions or isinstance(error, OwnedError):
            return
        for attempt in range(1, LAST_ATTEMPTS + 1):
            if self._consider("stopped", stopped(error), is_last=True):
                return
            if attempt < LAST_ATTEMPTS:
                time.sleep(attempt)

    def _consider(self, name: AlertName, found: Condition | None, *, is_last: bool) -> bool:
        """Whether people know what they should."""
        at, before = self._clock(), self._records.get(name)
        wait = 0.0 if is_last else self._options.conditions[name].for_
        now = step(name, before, found, at, wait, self._options.repeat)
        record, is_told = now.record, True
        if now.news is not None and record is not None:
            if at < self._next_attempt.get(name, at) and not is_last:
                return False
            failure = self._tell(record, now.news, found, at)
            is_told = failure is None
            if is_told and found is None:
                record = None
            elif is_told and found is not None:
                record = replace(record, told_at=at, text=found.text, tables=found.tables, failure=None)
            else:
                record = replace(record, failure=failure)
        if record != before:
            self._records.pop(name, None)
            if record is not None:
                self._records[name] = record
            self._store.put_alerts(list(self._records.values()))
        return is_told

    def _tell(self, record: AlertRecord, news: News, found: Condition | None, at: datetime) -> str | None:
        """Why people could not be told; None when they were."""
        name = record.name
        known = record.text or name
        alert = Alert(
            id=f"{self._pipeline}/{name}/{text_of(record.told_at or record.since)}/{news}",
            pipeline=self._pipeline,
            name=name,
            status=news,
            text=f"{self._pipeline}: {found.text if found else f'resolved: {known}'}",
            since=text_of(record.since),
            at=text_of(at),
            tables=found.tables if found else record.tables,
            fix=found.fix if found else None,
        )
        try:
            self._delivery.send(alert)
        except UnavailableError as error:
            attempt = self._attempts[name] = self._attempts.get(name, 0) + 1
            self._next_attempt[name] = at + timedelta(seconds=_BACKOFF.delay(attempt))
            if attempt == 1:
                _log.warning("the alert %s could not be sent: %s; it is tried again", name, error.message)
            return error.message
        self._attempts.pop(name, None)
        self._next_attempt.pop(name, None)
        return None

    def _run(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            try:
                self.look()
            except OwnedError:
                return
            except TailraceError as error:
                _log.debug("alerts cannot be looked at now: %s", error.message)
            except Exception as error:  # noqa: BLE001 - no alert is worth the pipeline
                _log.warning("alerts cannot be looked at: unexpected %s", type(error).__name__)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        # A delivery that is under way may take its timeout; what it would have told is told again.
        self._thread.join(self._options.timeout + END_SECONDS)
        if self._thread.is_alive():
            return
        with suppress(TailraceError):
            if isinstance(error, Exception):
                self.stop(error)
            elif error is None and self._once:
                self.look(is_last=True)


def tell_refusal(options: AlertOptions | None, address: StoreAddress, error: TailraceError) -> None:
    """Tell people that a run did not begin, unless the pipeline has never run, or runs elsewhere."""
    if options is None:
        return
    with suppress(TailraceError):
        with address.open_reading() as reader:
            if reader.runner() is not None:
                return
        with address.open() as store:
            AlertWatch(options, store).stop(error)
