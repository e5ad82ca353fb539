"""A batch as one stream of events, in the order of the upstream's commits."""

from __future__ import annotations

import pyarrow as pa

from tailrace.destination import BeginEvent, CommitEvent, CopyBeginEvent, CopyEndEvent, Event, RelationEvent
from tailrace.destination.event import event_stream
from tailrace.model.change import Changes, Op
from tailrace.model.schema import Column
from tailrace.testing.destination import ITEMS, PLAIN, RowChange, changes_of, insert, read, with_columns


def said(events: list[Event]) -> list[object]:
    """Each event in short: changes as their table and ids."""
    found: list[object] = []
    for event in events:
        if isinstance(event, Changes):
            found.append((event.table.table.name, [row["id"] for row in event.row.to_pylist()]))
        elif isinstance(event, RelationEvent):
            found.append(f"relation {event.table.table.name} {event.table.version}")
        elif isinstance(event, CopyBeginEvent):
            found.append(f"copying {event.table.table.name}")
        elif isinstance(event, CopyEndEvent):
            found.append(f"copied {event.table.table.name}")
        else:
            found.append(f"{type(event).__name__.removesuffix('Event').lower()} {event.commit}")
    return found


def test_changes_of_several_tables_come_in_the_order_of_their_commits() -> None:
    items = changes_of(ITEMS, insert(id=1), RowChange(Op.INSERT, {"id": 2}, 2), insert(id=3))
    plain = changes_of(PLAIN, RowChange(Op.INSERT, {"id": 7}, 1), commit=2)
    events = list(event_stream((), [*items, *plain]))
    assert said(events) == [
        "begin 2",
        "relation items 1",
        ("items", [1]),
        "relation plain 1",
        ("plain", [7]),
        ("items", [2]),
        "commit 2",
        "begin 3",
        ("items", [3]),
        "commit 3",
    ]
    assert isinstance(events[0], BeginEvent)
    assert events[0].committed_at is not None
    assert isinstance(events[-1], CommitEvent)


def test_copied_rows_come_first_and_outside_any_transaction() -> None:
    copied = changes_of(PLAIN, read(id=1), read(id=2))
    assert said(list(event_stream(copied, changes_of(ITEMS, insert(id=3)), [PLAIN], [PLAIN]))) == [
        "copying plain",
        "relation plain 1",
        ("plain", [1, 2]),
        "copied plain",
        "begin 2",
        "relation items 1",
        ("items", [3]),
        "commit 2",
    ]


def test_other_columns_are_announced_before_the_changes_that_have_them() -> None:
    wider = with_columns(ITEMS, Column("size", pa.int64(), number=4))
    chunks = [*changes_of(ITEMS, insert(id=1)), *changes_of(wider, insert(id=2), commit=5)]
    assert said(list(event_stream((), chunks)))[5:] == ["relation items 2", ("items", [2]), "commit 6"]


def test_a_batch_without_changes_has_no_events() -> None:
    assert list(event_stream((), [])) == []
