"""Listens to Spark for committed batches, so that the upstream can discard them at once, even if no batch follows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from pyspark import SparkContext
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from tailrace.source.follower import Offset


class CommitListener(StreamingQueryListener):
    """Calls `committed(batch_id, end_offset, seconds, phases)` after each batch of a query that read something.

    `phases` are the seconds in which Spark itself planned the batch and kept its checkpoint.
    """

    def __init__(self, query: str, committed: Callable[[int, Offset, float, Mapping[str, float]], None]) -> None:
        self._query = query
        self._committed = committed
        self._failure: Exception | None = None
        self._java: Any = None

    def raise_failure(self) -> None:
        """Raise, in the caller's thread, the error that the last call of `committed` raised."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    @property
    def _jlistener(self) -> Any:
        if self._java is None:
            self._java = SparkContext._jvm.PythonStreamingQueryListenerWrapper(_JavaListener(self))  # type: ignore[union-attr]
        return self._java

    def record(self, progress: Mapping[str, Any]) -> None:
        """Handle the progress of a batch, in Spark's JSON form."""
        if progress["name"] != self._query:
            return  # another query of the same session
        for source in progress["sources"]:
            end = source.get("endOffset")
            if end and end != source.get("startOffset"):
                try:
                    self._committed(progress["batchId"], end, progress["batchDuration"] / 1000, _phases(progress))
                except Exception as error:  # noqa: BLE001 - Spark would swallow it; the pipeline raises it
                    self._failure = error

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        self.record(json.loads(event.progress.json))

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        pass


_PHASES = {"plan": ("latestOffset", "getBatch", "queryPlanning"), "checkpoint": ("walCommit", "commitOffsets")}


def _phases(progress: Mapping[str, Any]) -> dict[str, float]:
    spent = progress.get("durationMs", {})
    return {name: sum(spent.get(part, 0) for part in parts) / 1000 for name, parts in _PHASES.items()}


class _JavaListener:
    """Called by Spark directly, instead of PySpark's wrapper: that one makes a separate call for every field of an
    event, which keeps two threads busy for about 100 ms per batch."""

    def __init__(self, listener: CommitListener) -> None:
        self._listener = listener

    def onQueryStarted(self, event: Any) -> None:
        pass

    def onQueryProgress(self, event: Any) -> None:
        self._listener.record(json.loads(event.progress().json()))

    def onQueryIdle(self, event: Any) -> None:
        pass

    def onQueryTerminated(self, event: Any) -> None:
        pass

    class Java:
        implements = ("org.apache.spark.sql.streaming.PythonStreamingQueryListener",)
