"""Batches taken in parts: what a change weighs, and where a batch may be cut."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from tailrace.destination.chunking import ChangePart, parts
from tailrace.model.change import Changes, Op
from tailrace.testing.destination import ITEMS, changes_of, delete, insert, moved, read, update

PART_BYTES = 100_000
ROW_BYTES = 1000


def cut(changes: Iterable[Changes], *, part_bytes: int = PART_BYTES, keep_deleted: bool = False) -> list[ChangePart]:
    found = parts(changes, ITEMS, part_bytes, row_bytes=lambda: ROW_BYTES, keep_deleted=keep_deleted)
    return list(found)


def ids(part: ChangePart) -> list[int]:
    return [row["id"] for chunk in part.chunks for row in chunk.batch.column("row").to_pylist()]


def never() -> int:
    raise AssertionError("no one needs to know how large a row is")


def test_a_change_that_left_values_out_weighs_as_much_as_the_row_that_has_them() -> None:
    changes = changes_of(ITEMS, *(update(id=number, price=1) for number in range(1000)))
    assert sum(chunk.batch.nbytes for chunk in changes) < PART_BYTES
    found = cut(changes)
    assert len(found) > 1
    assert max(len(ids(part)) * ROW_BYTES for part in found) <= 2 * PART_BYTES
    assert [number for part in found for number in ids(part)] == list(range(1000))


def test_the_size_of_a_row_is_queried_once_and_only_for_changes_that_left_values_out() -> None:
    whole = changes_of(ITEMS, read(id=1, name="a", price=1), insert(id=2, name="b", price=2), delete(id=2))
    assert len(list(parts(whole, ITEMS, 1 << 20, row_bytes=never))) == 1
    asked: list[int] = []

    def row_bytes() -> int:
        asked.append(1)
        return 1

    partial = changes_of(ITEMS, update(id=1, price=2))
    assert len(list(parts([*partial, *whole, *partial], ITEMS, 1 << 20, row_bytes=row_bytes))) == 1
    assert asked == [1]


def test_a_delete_weighs_as_much_as_its_row_where_that_is_kept() -> None:
    changes = changes_of(ITEMS, *(delete(id=number) for number in range(1000)))
    assert len(cut(changes)) == 1
    assert len(cut(changes, keep_deleted=True)) > 1


def test_every_part_but_the_last_says_that_others_come() -> None:
    changes = changes_of(ITEMS, *(update(id=number, price=1) for number in range(1000)))
    found = cut(changes)
    assert [part.is_last for part in found] == [False] * (len(found) - 1) + [True]
    assert [part.is_last for part in cut(changes, part_bytes=1 << 30)] == [True]
    assert cut([]) == []


def test_both_halves_of_a_changed_key_are_in_one_part() -> None:
    halves = [half for number in range(100) for half in (delete(id=number), moved(id=number + 1000, price=1))]
    found = cut(changes_of(ITEMS, *halves), part_bytes=1)
    assert [ids(part) for part in found] == [[number, number + 1000] for number in range(100)]


def test_changes_of_one_commit_whose_ordinals_have_no_gaps_are_cut() -> None:
    def page(first: int) -> Changes:
        """As a poll gives it."""
        rows = pa.array([{"id": first + at, "name": "x" * 1000, "price": 1} for at in range(100)], ITEMS.row_type)
        return Changes.build(ITEMS, rows, op=Op.UPDATE, commit=7, ordinal=np.arange(first, first + 100))

    found = cut(page(first) for first in range(0, 2000, 100))
    assert [len(part.chunks) for part in found] == [1] * 20
