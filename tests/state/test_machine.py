from __future__ import annotations

import itertools

import pytest

from tailrace.state.machine import TRANSITIONS, WAY, TableState, TransitionError, check_move, draw_mermaid


def test_every_table_can_walk_the_way_to_ready() -> None:
    for start, end in itertools.pairwise(WAY):
        check_move(start, end)


def test_a_state_cannot_be_skipped() -> None:
    with pytest.raises(TransitionError, match="Init cannot become Ready"):
        check_move(TableState.INIT, TableState.READY)


def test_every_state_can_fail_and_a_failed_table_can_go_anywhere_on_the_way() -> None:
    assert all(TableState.ERRORED in TRANSITIONS[state] for state in WAY)
    assert TRANSITIONS[TableState.ERRORED] == frozenset(WAY)


def test_a_resync_is_possible_from_every_later_state() -> None:
    assert all(TableState.INIT in TRANSITIONS[state] for state in TableState if state is not TableState.INIT)


def test_the_diagram_holds_every_transition() -> None:
    diagram = draw_mermaid()
    moves = {f"    {start} --> {end}" for start, ends in TRANSITIONS.items() for end in ends}
    assert diagram.startswith("stateDiagram-v2\n")
    assert moves | {"stateDiagram-v2", "    [*] --> Init"} == set(diagram.splitlines())
