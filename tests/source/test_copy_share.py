"""How copying tables share a batch, and its tasks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.source.copy_share import CopyNeed, group_copies, least_size, share_chunks
from tailrace.source.split import Split

NEEDS = st.dictionaries(
    st.integers(1, 50), st.builds(CopyNeed, chunks=st.integers(0, 100), size=st.integers(1, 100)), max_size=20
)


@given(NEEDS, st.integers(0, 2000))
def test_a_batch_spends_its_budget_and_no_table_gets_more_than_it_has(needs: dict[int, CopyNeed], budget: int) -> None:
    taken = share_chunks(needs, budget)
    assert taken.keys() == needs.keys()
    assert all(0 <= taken[name] <= need.chunks for name, need in needs.items())
    spent = sum(taken[name] * need.size for name, need in needs.items())
    # Only the last chunk may exceed the budget.
    assert spent < budget + max((need.size for need in needs.values()), default=1)
    assert spent >= min(budget, sum(need.chunks * need.size for need in needs.values()))


@given(NEEDS, st.integers(0, 2000))
def test_a_table_waits_only_for_smaller_ones_and_for_equal_shares(needs: dict[int, CopyNeed], budget: int) -> None:
    taken = share_chunks(needs, budget)
    for name, need in needs.items():
        for other, more in needs.items():
            if need.chunks * need.size < more.chunks * more.size and taken[name] < need.chunks:
                assert taken[other] <= taken[name]


def test_small_tables_are_copied_in_the_first_batch_next_to_a_huge_one_with_a_low_number() -> None:
    taken = share_chunks({1: CopyNeed(1000, 32), 2: CopyNeed(1, 1), 3: CopyNeed(1, 1)}, 8 * 32)
    assert taken == {1: 8, 2: 1, 3: 1}


def test_hundreds_of_tiny_tables_fit_into_a_batch_of_eight_chunks() -> None:
    chunk = 32_000_000
    needs = {number: CopyNeed(1, least_size(0, chunk)) for number in range(10_000)}
    assert sum(share_chunks(needs, 8 * chunk).values()) == 512


@given(st.lists(st.one_of(st.none(), st.integers(0, 100))), st.integers(1, 8), st.one_of(st.none(), st.integers(1, 5)))
def test_every_chunk_is_read_by_one_task_and_there_are_no_more_tasks_than_allowed(
    sizes: list[int | None], cores: int, most: int | None
) -> None:
    splits = [Split(weights={str(number): 0}, size=size) for number, size in enumerate(sizes)]
    groups = group_copies(splits, cores, most)
    dealt = [name for group in groups for split in group for name in split.weights]
    assert sorted(dealt) == sorted(name for split in splits for name in split.weights)
    assert all(groups)
    if most is not None:
        assert len(groups) <= most
    else:
        assert len(groups) <= sizes.count(None) + cores
