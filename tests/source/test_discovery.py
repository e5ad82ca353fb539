"""Tables are looked up now and then, and an upstream that does not answer takes none of them away."""

from __future__ import annotations

import pytest

from tailrace.errors import PreflightError, TailraceError, UnavailableError
from tailrace.source import discovery
from tailrace.source.discovery import Discovery


class Looks(Discovery):
    """Notes each look at the upstream, which may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []
        self.error: TailraceError | None = None

    def _look(self, *, at_once: bool) -> None:
        self.seen.append(at_once)
        if self.error is not None:
            raise self.error


def test_the_upstream_is_looked_at_once_in_a_while_and_whenever_it_must_be() -> None:
    looks = Looks()
    for _ in range(3):
        looks.refresh()
    assert looks.seen == [True]
    looks.refresh(at_once=True)
    looks.refresh()
    assert looks.seen == [True, True]


def test_an_upstream_that_does_not_answer_is_an_error_only_where_nothing_is_known_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discovery, "DISCOVERY_SECONDS", 0.0)
    looks = Looks()
    looks.error = UnavailableError("out of reach")
    for _ in range(2):
        with pytest.raises(UnavailableError):
            looks.refresh()
    looks.error = None
    looks.refresh()
    looks.error = UnavailableError("out of reach")
    looks.refresh()
    with pytest.raises(UnavailableError):
        looks.refresh(at_once=True)
    assert looks.seen == [True, True, True, False, True]


def test_what_only_people_can_fix_is_raised_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "DISCOVERY_SECONDS", 0.0)
    looks = Looks()
    looks.refresh()
    looks.error = PreflightError("the publication is gone")
    for _ in range(2):
        with pytest.raises(PreflightError):
            looks.refresh()
