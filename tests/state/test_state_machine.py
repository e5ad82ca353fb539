from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from tailrace.state.record import RETRIES
from tailrace.state.state_machine import (
    MEANINGS,
    PASSING,
    TRANSITIONS,
    WAY,
    TableState,
    TransitionError,
    check_move,
    durable,
)

PAGE = Path(__file__).parents[2] / "docs" / "states.md"


def test_every_table_can_walk_the_way_to_ready() -> None:
    for start, end in itertools.pairwise(WAY):
        check_move(start, end)


def test_a_state_cannot_be_skipped() -> None:
    with pytest.raises(TransitionError, match="Init cannot become Ready"):
        check_move(TableState.INIT, TableState.READY)


def test_every_state_can_fail_and_a_failed_table_can_go_back_to_any_that_is_stored() -> None:
    assert all(TableState.ERRORED in TRANSITIONS[state] for state in WAY)
    assert TRANSITIONS[TableState.ERRORED] == {durable(state) for state in WAY}


def test_a_transient_state_is_stored_as_the_finished_copy() -> None:
    assert {durable(state) for state in PASSING} == {TableState.FINISHED_COPY}
    assert all(durable(state) is state for state in set(TableState) - PASSING)


def test_a_resync_is_possible_from_every_later_state() -> None:
    assert all(TableState.INIT in TRANSITIONS[state] for state in TableState if state is not TableState.INIT)


def test_the_page_of_the_documentation_says_what_the_code_does() -> None:
    page = PAGE.read_text(encoding="utf-8")
    states = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)
    assert states == [
        (state, text, ", ".join(end for end in TableState if end in TRANSITIONS[state]))
        for state, text in MEANINGS.items()
    ]
    assert dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|$", page, re.MULTILINE)) == dict(RETRIES)


def test_the_picture_of_the_documentation_shows_every_state() -> None:
    picture = (PAGE.parent / "states.svg").read_text(encoding="utf-8")
    assert [state for state in TableState if f">{state}</text>" not in picture] == []
