"""Hears from Spark that a batch is in the commit log: the moment when upstream may forget it, also when idle."""

from __future__ import annotations

import json
from collections.abc import Callable

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from tailrace.source import Offset


class CommitListener(StreamingQueryListener):
    """Calls `committed(batch_id, end_offset, seconds)` after each batch that read something."""

    def __init__(self, committed: Callable[[int, Offset, float], None]) -> None:
        self._committed = committed
        self._failure: Exception | None = None

    def raise_failure(self) -> None:
        """Raise, in the caller's thread, what the last call of `committed` raised."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        progress = event.progress
        for source in progress.sources:
            end = source.endOffset
            if end and end != source.startOffset:
                try:
                    self._committed(progress.batchId, json.loads(end), progress.batchDuration / 1000)
                except Exception as error:  # noqa: BLE001 - Spark would swallow it; the pipeline raises it
                    self._failure = error

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        pass
