"""Polling without Spark: one process that takes changes as they come, and says when they are applied.

with PollConsumer(source, FileWatermarks(Path("shop.watermark"))) as consumer:
    while True:
        for changes in consumer.poll():
            apply(changes)
        consumer.commit()
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Self

from tailrace.change import Changes
from tailrace.errors import DamagedError, TailraceError
from tailrace.source import Limit, Offset, TableDirectives
from tailrace.source.poll.follower import PollFollower
from tailrace.source.poll.source import PollSource
from tailrace.source.poll.watermark import WatermarkStore

log = logging.getLogger(__name__)

LIMIT = Limit(rows=1_000_000, bytes=1 << 30)


class PollConsumer:
    """Gives every change at least once. For one thread of one process; two on one store would undo each other."""

    def __init__(self, source: PollSource, store: WatermarkStore, limit: Limit = LIMIT) -> None:
        self._source = source
        self._store = store
        self._limit = limit
        self._follower: PollFollower | None = None
        self._offset: Offset = {}
        self._planned: Offset | None = None
        self._given = False

    def __enter__(self) -> Self:
        """Go on behind the stored watermark. Raises DamagedError for one of no use, unless the source rewinds it."""
        self._offset = self._load()
        self._follower = self._source.follow()
        return self

    def __exit__(self, *_: object) -> None:
        if self._follower is not None:
            self._follower.stop()
            self._follower = None

    def _load(self) -> Offset:
        start: Offset | None = None
        try:
            start = self._store.load(self._source.name)
        except DamagedError as error:
            if self._source.on_bad_watermark == "strict":
                raise
            log.warning("every table is copied again: %s", error.message)
        return start if start is not None else PollFollower.start()

    def poll(self) -> Iterator[Changes]:
        """What is new in the tables that are due: rows of a copy as `read`, and changes. Nothing, when none is due.

        Until `commit` is called, the same again, as far as the rows did not change since. Raises TableError for a table
        that cannot go on, UnavailableError while the database does not answer; both may be tried again, and the tables
        are looked at anew then.
        """
        assert self._follower is not None
        self._given = False
        if self._planned is None:
            end = self._follower.latest(self._offset, self._limit, TableDirectives())
            if end == self._offset:
                return
            self._planned = end
        try:
            for split in self._follower.plan(self._offset, self._planned):
                yield from self._source.read(split)
        except TailraceError:
            self._planned = None
            raise
        self._given = True

    def commit(self) -> None:
        """Everything that `poll` gave is applied: the watermark moves. Without anything new it stays.

        Raises RuntimeError when `poll` was not read to its end: what is left of it would never come.
        """
        if self._planned is None:
            return
        if not self._given:
            raise RuntimeError("poll() was not read to its end; read it again, then commit")
        self._store.save(self._source.name, self._planned)
        self._offset, self._planned = self._planned, None
        self._source.release(self._offset)
