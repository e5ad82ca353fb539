"""How the pipeline reads Spark's progress events, without Spark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tailrace.errors import UnavailableError
from tailrace.source.follower import Offset
from tailrace.stream.commit_listener import CommitListener

DURATIONS = {"latestOffset": 10, "queryPlanning": 20, "walCommit": 5, "addBatch": 200}
PHASES = {"plan": 0.03, "checkpoint": 0.005}


def progress(name: str | None, batch_id: int, start: Any, end: Any) -> dict[str, Any]:
    """An event as Spark writes it, as far as the listener reads it."""
    sources = [{"description": "a source", "startOffset": start, "endOffset": end}]
    return {"name": name, "batchId": batch_id, "batchDuration": 250, "sources": sources, "durationMs": DURATIONS}


def test_a_batch_is_reported_once_it_is_done_and_one_that_read_nothing_is_not() -> None:
    reported: list[tuple[int, Offset, float, Mapping[str, float]]] = []
    listener = CommitListener("shop", lambda *batch: reported.append(batch))
    listener.record(progress("shop", 0, None, {"at": 1}))
    listener.record(progress("shop", 1, {"at": 1}, {"at": 1}))
    listener.record(progress("shop", 1, {"at": 1}, {"at": 2}))
    assert reported == [(0, {"at": 1}, 0.25, PHASES), (1, {"at": 2}, 0.25, PHASES)]


@pytest.mark.parametrize("name", ["office", "", None])
def test_the_progress_of_other_queries_in_the_session_is_not_ours(name: str | None) -> None:
    reported: list[tuple[int, Offset, float, Mapping[str, float]]] = []
    listener = CommitListener("shop", lambda *batch: reported.append(batch))
    for end in (7, {"at": 1}):
        listener.record(progress(name, 0, None, end))
    assert reported == []


def test_an_error_while_a_batch_is_reported_is_raised_once() -> None:
    def fail(*_: object) -> None:
        raise UnavailableError("the store is away")

    listener = CommitListener("shop", fail)
    listener.record(progress("shop", 0, None, {"at": 1}))
    with pytest.raises(UnavailableError, match="the store is away"):
        listener.raise_failure()
    listener.raise_failure()
