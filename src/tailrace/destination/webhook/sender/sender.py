"""The sender: a separate process that posts the events of a node's queue, in order, while the node leads.

Of all nodes of a pipeline one leads and sends; the others wait and release from their own queues what it delivered.
Nothing leaves a queue before it was delivered, by this node or another, so nothing is lost. An event is sent twice only
when its answer was lost, or after a change of leader, if the old leader delivered it after it last stored its progress.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

from tailrace.destination.webhook.backlog import Backlog, Parcel, QueuedRows, frame_of, merge, watermark_of
from tailrace.destination.webhook.option import WebhookOptions
from tailrace.destination.webhook.queue import QueueReader
from tailrace.destination.webhook.sender.leader import Leadership, LeaderState, open_engine
from tailrace.destination.webhook.sender.lock import claim_queue, queue_id
from tailrace.destination.webhook.sender.request import EventDelivery
from tailrace.destination.webhook.sender.status import Report
from tailrace.errors import OwnedError, TailraceError, UnavailableError
from tailrace.model.change import START, Position
from tailrace.system.failpoint import reach
from tailrace.system.ticker import Ticker

_log = logging.getLogger(__name__)

POLL_SECONDS = 0.02
FOLLOWED_EVENTS = 5000
TICK_SECONDS = 0.1
GRACE_SECONDS = 1.0
"""How long the current request may go on once the sender is asked to stop."""


class Sender:
    """Sends until `stopping`, or with `until_empty` until the whole queue is delivered. Used once.

    Raises OwnedError, at once, when another process sends from this queue.
    """

    def __init__(
        self, options: WebhookOptions, pipeline: str, stopping: Callable[[], bool], *, until_empty: bool = False
    ) -> None:
        self._options = options
        self._pipeline = pipeline
        self._stopping = stopping
        self._until_empty = until_empty
        self._folder = options.queue.path
        self._closing = ExitStack()
        self._closing.enter_context(claim_queue(self._folder))
        with ExitStack() as failing:
            failing.callback(self._closing.close)
            self._report = Report(self._folder, options.node_id)
            self._closing.callback(self._report.close)
            self._delivery = EventDelivery(options, self._report)
            self._closing.callback(self._delivery.close)
            self._reader = QueueReader(self._folder)
            self._closing.callback(self._reader.close)
            failing.pop_all()
        self._leadership: Leadership | None = None
        self._place = self._reader.released
        self._marks: dict[str, Position] = {}
        self._stored = self._released = self._place
        self._stored_at = 0.0
        # A request may take long, and what was delivered before it is stored meanwhile, by the ticker's thread.
        self._storing = threading.RLock()
        self._leading: Leadership | None = None
        self._blocked: tuple[str, Position] | None = None
        self._asked_to_stop: float | None = None

    def run(self) -> None:
        """Retry while something is unavailable; every other error is raised, and stays in the status."""
        with self._closing:
            try:
                self._report.reached(self._place)
                self._report.publish()
                leadership = self._open()
                if leadership is not None:
                    self._run(leadership)
            except TailraceError as error:
                self._report.failed(error)
                raise
            finally:
                self._report.leads(None)
                self._report.publish()

    def _open(self) -> Leadership | None:
        """The shared store; None when stopped before it could be opened."""
        while not self._is_stopping():
            try:
                engine = open_engine(self._options.leader.lease.reveal())
            except UnavailableError as error:
                self._wait_for_store(error)
            else:
                leadership = Leadership(
                    engine,
                    self._pipeline,
                    node=self._options.node_id,
                    queue=queue_id(self._folder),
                    seconds=self._options.leader.seconds,
                )
                self._closing.callback(leadership.close)
                return leadership
        return None

    def _run(self, leadership: Leadership) -> None:
        self._leadership = leadership
        try:
            with (
                Ticker(self._renew, self._options.leader.seconds / 4) as renewing,
                Ticker(self._tick, TICK_SECONDS) as reporting,
                Ticker(self._store_in_flight, self._options.leader.interval) as storing,
            ):
                while not self._is_stopping() and not self._is_done():
                    renewing.check()
                    reporting.check()
                    storing.check()
                    self._take_turn(leadership)
        finally:
            with suppress(UnavailableError):
                leadership.release()

    def _take_turn(self, leadership: Leadership) -> None:
        """Lead for as long as the lease lasts, or follow for a moment."""
        try:
            standing = leadership.claim()
            if standing is not None:
                self._lead(leadership, standing)
            else:
                self._follow(leadership)
        except UnavailableError as error:
            self._wait_for_store(error)

    def _lead(self, leadership: Leadership, standing: LeaderState) -> None:
        """Send while the lease lasts."""
        self._report.leads(standing.epoch)
        _log.info("this node sends the events of %s now, in epoch %d", self._pipeline, standing.epoch)
        reach("sender.leading")
        self._begin(standing)
        backlog = Backlog(
            self._reader,
            self._place,
            standing.watermarks,
            max_events=self._options.batch.max_events,
            max_bytes=self._options.batch.max_bytes,
        )
        try:
            try:
                self._leading = leadership
                self._send(backlog, leadership)
            finally:
                self._leading = None
                # Also when the queue cannot be read any further: what was delivered is not to be sent again.
                self._store(leadership, at_once=True)
        except OwnedError as error:
            _log.warning("%s", error.message)
            leadership.resign()
        finally:
            self._report.leads(None)

    def _send(self, backlog: Backlog, leadership: Leadership) -> None:
        """One request after the other, until the lease ends, the sender is to stop or nothing is left to send."""
        while leadership.holds() and not self._is_stopping():
            backlog.fill()
            self._report.waits(backlog.oldest)
            if backlog.is_ready(0.0 if self._until_empty else self._options.batch.max_delay):
                if not self._deliver(backlog.take(), leadership):
                    break
            elif self._is_done():
                break
            else:
                self._pause(POLL_SECONDS)
            self._store(leadership)

    def _begin(self, standing: LeaderState) -> None:
        """Where to continue reading: after everything that is known to be delivered from this queue."""
        head = self._reader.head
        stored = standing.place
        if stored > head:
            _log.warning("the queue ends at %s, before the place stored for it; it is sent from its start", head)
            stored = START
        self._place = self._stored = max(self._place, stored)
        self._blocked = None
        self._marks.clear()
        self._stored_at = time.monotonic()
        self._report.reached(self._place)

    def _deliver(self, parcel: Parcel, leadership: Leadership) -> bool:
        """Whether the parcel is done. False: stopped, or no longer certain to lead; then it was not sent."""
        if len(parcel.events):

            def may_go_on() -> bool:
                # Also while the endpoint is down: what it took before is stored meanwhile.
                self._store(leadership)
                return leadership.holds() and not self._is_stopping()

            if not self._delivery.deliver(parcel.events, may_go_on):
                return False
            reach("sender.delivered")
        with self._storing:
            self._place = parcel.place
            merge(self._marks, parcel.watermarks)
        self._report.reached(self._place)
        return True

    def _store(self, leadership: Leadership, *, at_once: bool = False) -> None:
        """Store the progress now and then, and release the queue up to it. Raises OwnedError if another node leads."""
        with self._storing:
            self._store_progress(leadership, at_once=at_once)

    def _store_in_flight(self) -> None:
        """Runs next to a request that takes long."""
        if (leadership := self._leading) is not None:
            with suppress(OwnedError):  # the sending thread finds the same, once its request has its answer
                self._store(leadership)

    def _store_progress(self, leadership: Leadership, *, at_once: bool) -> None:
        due = at_once or time.monotonic() - self._stored_at >= self._options.leader.interval
        if not due or (self._place == self._stored and frame_of(self._stored) == self._released):
            return
        self._stored_at = time.monotonic()
        try:
            if self._place != self._stored:
                leadership.persist(self._marks, self._place)
                reach("sender.stored")
                self._marks.clear()
                self._stored = self._place
            # Also what was stored before a crash: a full queue would wait for ever for the next event to be sent.
            self._reader.release(frame_of(self._stored))
            self._released = frame_of(self._stored)
        except UnavailableError as error:
            # Without the store the lease cannot be renewed either, so this soon ends by itself. Without the disk
            # nothing can be given up, which is no reason to send nothing.
            self._report.failed(error)

    def _follow(self, leadership: Leadership) -> None:
        """Release what the leader has delivered, from this queue or another."""
        self._report.follows()
        watermarks = leadership.watermarks()
        while self._blocked is None or watermark_of(self._blocked[0], watermarks) >= self._blocked[1]:
            frames = self._reader.read(frame_of(self._place), FOLLOWED_EVENTS)
            self._blocked = None
            for last, table in frames:
                rows = QueuedRows(table)
                due = rows.due(watermarks)
                if len(due := due[due >= self._place.ordinal]):
                    self._blocked = rows.at(int(due[0]))
                    break
                self._place = last
            if self._blocked is not None or not frames:
                break
        self._reader.release(frame_of(self._place))
        self._report.reached(self._place)
        self._pause(min(self._options.leader.interval, self._options.leader.seconds / 4))

    def _renew(self) -> None:
        if self._leadership is not None:
            with suppress(UnavailableError):
                self._leadership.renew()

    def _tick(self) -> None:
        """Runs next to everything else: publishes the status, and ends a request that outlasts the grace period."""
        self._report.publish_in_turn()
        if self._is_stopping() and time.monotonic() - (self._asked_to_stop or 0.0) > GRACE_SECONDS:
            self._delivery.abort()

    def _is_stopping(self) -> bool:
        if self._asked_to_stop is None and self._stopping():
            self._asked_to_stop = time.monotonic()
        return self._asked_to_stop is not None

    def _is_done(self) -> bool:
        return self._until_empty and self._place >= self._reader.head

    def _wait_for_store(self, error: UnavailableError) -> None:
        self._report.failed(error)
        self._report.publish()
        self._pause(self._options.leader.interval)

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._is_stopping() and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, POLL_SECONDS))
