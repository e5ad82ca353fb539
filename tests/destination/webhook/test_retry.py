"""When a request is made again."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.destination.webhook.option import RetryOptions
from tailrace.destination.webhook.retry import PATIENCE_SECONDS, asked_pause, is_delivered, is_over, pause_seconds

NOON = datetime(2026, 5, 4, 12, 0, 0, tzinfo=UTC)


def test_linear_pauses_grow_by_the_first_one_and_exponential_ones_double() -> None:
    linear, exponential = (
        RetryOptions(policy="linear", min=1, max=30),
        RetryOptions(policy="exponential", min=1, max=30),
    )
    assert [pause_seconds(linear, attempts, 0.5) for attempts in (1, 2, 3, 40)] == [1, 2, 3, 30]
    assert [pause_seconds(exponential, attempts, 0.5) for attempts in (1, 2, 3, 4, 5000)] == [1, 2, 4, 8, 30]


@given(
    st.sampled_from(["linear", "exponential"]),
    st.floats(0.001, 10),
    st.floats(0, 100),
    st.integers(1, 10**6),
    st.floats(0, 1),
    st.none() | st.floats(0, 1e9),
)
def test_a_pause_is_never_shorter_than_min_nor_longer_than_max_unless_it_is_asked_for(
    policy: Literal["linear", "exponential"],
    least: float,
    more: float,
    attempts: int,
    chance: float,
    asked: float | None,
) -> None:
    schedule = RetryOptions(policy=policy, min=least, max=least + more)
    pause = pause_seconds(schedule, attempts, chance, asked)
    assert least <= pause <= max(least + more, PATIENCE_SECONDS)
    if asked is None:
        assert pause <= least + more
    else:
        assert pause >= min(asked, PATIENCE_SECONDS)


def test_pauses_are_spread() -> None:
    schedule = RetryOptions(policy="exponential", min=1, max=30)
    assert [pause_seconds(schedule, 3, chance) for chance in (0.0, 0.5, 1.0)] == [3, 4, 5]


def test_a_request_is_given_up_after_as_many_attempts_as_configured_or_never() -> None:
    assert [is_over(RetryOptions(limit=3), attempts) for attempts in (1, 2, 3, 4)] == [False, False, True, True]
    assert not is_over(RetryOptions(), 10**9)


@pytest.mark.parametrize("status", [100, 301, 302, 304, 307, 400, 401, 404, 410, 413, 422, 429, 500, 503])
def test_only_2xx_means_delivered(status: int) -> None:
    assert not is_delivered(status)
    assert is_delivered(200)
    assert is_delivered(204)


def test_retry_after_is_read_in_both_its_forms() -> None:
    assert asked_pause("7") == 7
    assert asked_pause(" 0 ") == 0
    assert asked_pause("Mon, 04 May 2026 12:00:30 GMT", NOON) == 30
    assert asked_pause("Mon, 04 May 2026 11:00:00 GMT", NOON) == 0
    assert asked_pause("9" * 400) == 999_999_999


DATES = st.from_regex(r"Wed, [0-9]{1,20} Oct [0-9]{1,20} [0-9]{1,20}:[0-9]{2}:[0-9]{2} [+-][0-9]{1,20}", fullmatch=True)


@given(st.none() | st.text() | DATES)
def test_a_retry_after_that_makes_no_sense_asks_for_nothing_or_for_a_pause(text: str | None) -> None:
    asked = asked_pause(text, NOON)
    assert asked is None or asked >= 0
    assert asked_pause("soon") is None
    assert asked_pause("-5") is None
    assert asked_pause("²") is None
