"""Tables over lanes."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tailrace.source.split import Split
from tailrace.stream.data_source import lanes_for, note_cores, read_cores, spread


@given(st.dictionaries(st.text(min_size=1), st.integers(0, 10**9)), st.integers(1, 8))
def test_every_table_has_one_lane_and_none_is_overloaded(weights: dict[str, int], lanes: int) -> None:
    chosen = spread([Split(weights=weights)], lanes)
    assert chosen.keys() == weights.keys()
    assert all(0 <= lane < lanes for lane in chosen.values())
    load = [sum(weights[name] for name, lane in chosen.items() if lane == each) for each in range(lanes)]
    if weights:
        # Giving the heaviest to the emptiest is never further off than one table.
        assert max(load) <= sum(weights.values()) / lanes + max(weights.values()) + len(weights)


def test_two_heavy_tables_go_to_different_lanes() -> None:
    chosen = spread([Split(weights={"a": 100, "b": 90}), Split(weights={"a": 5, "c": 1})], 2)
    assert chosen["a"] != chosen["b"]


@given(st.sets(st.text(min_size=1), min_size=1, max_size=12), st.sets(st.text(min_size=1), max_size=12))
def test_heavy_tables_keep_their_lanes_whatever_light_ones_come_and_go(tables: set[str], others: set[str]) -> None:
    heavy = {f"heavy {number}": 10**6 for number in range(40)}
    one = spread([Split(weights=heavy | dict.fromkeys(tables, 1))], 4)
    two = spread([Split(weights=heavy | dict.fromkeys(others, 1) | dict.fromkeys(tables, 1))], 4)
    assert len({one[name] for name in heavy}) == 4
    assert [one[name] for name in heavy] == [two[name] for name in heavy]


def test_lanes_follow_the_cores_that_were_noted_last(tmp_path: Path) -> None:
    assert read_cores(tmp_path) == 0
    for cores in (2, 16, 16, 1):
        note_cores(tmp_path, cores)
        assert read_cores(tmp_path) == cores
        assert lanes_for(read_cores(tmp_path)) == max(2, cores)
