"""Checks while the pipeline runs, in a thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

import pytest

from tailrace.errors import Finding, UnavailableError
from tailrace.stream import inspection
from tailrace.stream.inspection import Inspection
from tailrace.testing.wait import wait_until

PROBLEM = Finding("error", "public.a", "no", None, "public.a")


def found_by(check: Callable[[], list[Finding]]) -> Mapping[str, Finding]:
    with Inspection(check, list, lambda notices: None) as checking:
        since = datetime.now(UTC)
        wait_until(lambda: checking.problems_since(since) is not None)
        found = checking.problems_since(since)
        assert found is not None
        assert checking.problems_since(datetime.now(UTC)) is None
        return found


def test_a_check_that_began_before_the_question_does_not_count() -> None:
    assert found_by(lambda: [PROBLEM, Finding("warning", "public.b", "odd", None, "public.b")]) == {"public.a": PROBLEM}


def test_a_check_that_cannot_be_made_finds_nothing() -> None:
    def check() -> list[Finding]:
        raise UnavailableError("down")

    assert found_by(check) == {}


def test_what_the_source_leaves_out_is_noted_at_once_and_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "NOTICE_SECONDS", 0.01)
    noted: list[list[Finding]] = []
    with Inspection(list, lambda: [PROBLEM], lambda notices: noted.append(list(notices))):
        assert noted[0] == [PROBLEM]
        wait_until(lambda: len(noted) > 2)


def test_a_source_that_takes_long_to_answer_is_asked_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "NOTICE_SECONDS", 0.01)
    asked: list[float] = []

    def look() -> list[Finding]:
        began = time.thread_time()
        while time.thread_time() - began < 0.02:
            pass
        asked.append(time.monotonic())
        return []

    with Inspection(list, look, lambda notices: None):
        wait_until(lambda: len(asked) > 2)
    # The first is made by the caller; each later one waits for a hundred times what the one before took.
    assert asked[2] - asked[1] >= 2.0
