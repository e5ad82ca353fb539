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

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        progress = event.progress
        for source in progress.sources:
            end = source.endOffset
            if end and end != source.startOffset:
                self._committed(progress.batchId, json.loads(end), progress.batchDuration / 1000)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        pass
