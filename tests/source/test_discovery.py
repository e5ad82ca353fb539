"""Tables are looked up now and then, and an upstream that does not answer takes none of them away."""

from __future__ import annotations

import pytest

from tailrace.errors import PreflightError, TailraceError, UnavailableError
from tailrace.source import discovery
from tailrace.source.discovery import Discovery


class RecordingDiscovery(Discovery):
    """Records each discovery of the upstream, which may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []
        self.error: TailraceError | None = None

    def _look(self, *, at_once: bool) -> None:
        self.seen.append(at_once)
        if self.error is not None:
            raise self.error


def test_the_upstream_is_discovered_at_intervals_and_at_once_on_request() -> None:
    recording = RecordingDiscovery()
    for _ in range(3):
        recording.refresh()
    assert recording.seen == [True]
    recording.refresh(at_once=True)
    recording.refresh()
    assert recording.seen == [True, True]


def test_an_upstream_that_does_not_answer_is_an_error_only_where_nothing_is_known_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discovery, "DISCOVERY_SECONDS", 0.0)
    recording = RecordingDiscovery()
    recording.error = UnavailableError("out of reach")
    for _ in range(2):
        with pytest.raises(UnavailableError):
            recording.refresh()
    recording.error = None
    recording.refresh()
    recording.error = UnavailableError("out of reach")
    recording.refresh()
    with pytest.raises(UnavailableError):
        recording.refresh(at_once=True)
    assert recording.seen == [True, True, True, False, True]


def test_an_error_that_only_people_can_fix_is_raised_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "DISCOVERY_SECONDS", 0.0)
    recording = RecordingDiscovery()
    recording.refresh()
    recording.error = PreflightError("the publication is gone")
    for _ in range(2):
        with pytest.raises(PreflightError):
            recording.refresh()
