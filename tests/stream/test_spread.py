"""Tables over lanes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.source.split import Split
from tailrace.stream.data_source import spread


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
