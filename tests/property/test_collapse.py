"""Collapsing and applying equals replaying."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.model.collapse import Collapsed, collapse
from tests.support.history import (
    KINDS,
    SHIFTING,
    Key,
    Row,
    as_changes,
    histories,
    migrate,
    replay,
    replay_steps,
    shifting_histories,
    step_changes,
    table_of,
)


def apply(collapsed: Collapsed, before: dict[Key, Row]) -> dict[Key, Row]:
    """What any destination does with a collapsed batch, row by row."""
    key = collapsed.table.key
    rows = {} if collapsed.truncated else dict(before)
    for old in collapsed.deletes.to_pylist():
        rows.pop(tuple(old.values()), None)
    lookup = dict(zip(collapsed.incomplete.tolist(), collapsed.lookup.to_pylist(), strict=True))
    for index, row in enumerate(collapsed.rows.to_pylist()):
        if index in lookup:
            assert collapsed.unchanged is not None
            old = before[tuple(lookup[index].values())]
            left_out = collapsed.unchanged[index]
            row = {name: old[name] if left_out[i] else value for i, (name, value) in enumerate(row.items())}
        rows[tuple(row[name] for name in key)] = row
    return rows


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(data=st.data(), size=st.integers(1, 9))
def test_collapse_then_apply_equals_replaying_one_by_one(kind: str, data: Any, size: int) -> None:
    types, keys = KINDS[kind]
    table = table_of(*types)
    first, second = data.draw(histories(table, keys, cuts=2))
    before = replay(table, first, {})
    collapsed = collapse(as_changes(table, second, size), table)
    assert apply(collapsed, before) == replay(table, second, before)
    assert collapsed.changes == len(second)


@settings(max_examples=60)
@given(data=st.data())
def test_collapsing_keeps_deleted_rows_with_their_last_values_when_asked(data: Any) -> None:
    table = table_of(pa.int64())
    (events,) = data.draw(histories(table, [(1,), (2,), (3,), (4,)]))
    events = [event for event in events if event.op.name != "TRUNCATE"]
    collapsed = collapse(as_changes(table, events, 4), table, keep_deleted=True)
    last: dict[Key, Row] = {}
    for count in range(len(events) + 1):
        last |= replay(table, events[:count], {})
    assert not collapsed.deletes.num_rows
    if collapsed.unchanged is None:
        assert {(row["k0"],): row for row in collapsed.rows.to_pylist()} == last


@settings(max_examples=300)
@given(batches=shifting_histories(cuts=2), size=st.integers(1, 9))
def test_changes_of_many_versions_collapse_to_what_replaying_them_gives(batches: Any, size: int) -> None:
    first, second = batches
    table = second[-1].table
    before = replay_steps(first, SHIFTING, {})
    collapsed = collapse(step_changes(second, size), table)
    at_destination = migrate(before, first[-1].table, table)
    assert apply(collapsed, at_destination) == replay_steps(second, first[-1].table, before)
