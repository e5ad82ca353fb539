"""Delta tables that keep a row for each change, or the versions of their rows."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tailrace.config import registry
from tailrace.config.pipeline import from_dict
from tailrace.config.registry import open_destination, open_source
from tailrace.destination import Batch, TableBatch
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.destination.delta.option import CompactOptions
from tailrace.errors import SchemaChangedError
from tailrace.model.change import Changes
from tailrace.model.schema import Column
from tailrace.testing.destination import ITEMS, TRUNCATE, changes_of, delete, insert, moved, read, update
from tests.support.delta_table import queried
from tests.support.destination_writing import write


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


def history_at(lake: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = DeltaTable(str(lake / "shop" / "items")).to_pyarrow_table().to_pylist()
    return sorted(rows, key=lambda row: row["_tailrace_position"])


def history_rows(lake: Path, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in ("_tailrace_op", *names)) for row in history_at(lake)]


def test_every_change_is_a_row_and_a_repeated_batch_adds_none(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake), history=["shop.*"])
    staged = destination.write_rows(ITEMS, changes_of(ITEMS, read(id=1, name="a", price=1), commit=0))
    write(destination, 0, staged=[staged], begins_copy=True, completes_copy=True)
    changes = update(id=1, name="b", price=1), insert(id=2, name="c", price=2), update(id=2, name="d", price=2)
    write(destination, 1, *changes, delete(id=2), TRUNCATE)
    assert write(destination, 1, *changes).repeated
    assert history_rows(lake, "id", "name") == [
        ("read", 1, "a"),
        ("update", 1, "b"),
        ("insert", 2, "c"),
        ("update", 2, "d"),
        ("delete", 2, None),
        ("truncate", None, None),
    ]
    positions = [row["_tailrace_position"] for row in history_at(lake)]
    assert len(set(positions)) == len(positions)
    assert all(row["_tailrace_committed_at"] is not None for row in history_at(lake))


def test_columns_that_a_change_left_out_are_named_and_not_taken_for_null(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake), history=["shop.items"])
    write(
        destination, 0, insert(id=1, name="large", price=1), update(id=1, price=2), delete(id=1), moved(id=7, price=2)
    )
    assert history_rows(lake, "id", "name", "_tailrace_unchanged") == [
        ("insert", 1, "large", None),
        ("update", 1, None, ["name"]),
        ("delete", 1, None, None),
        ("insert", 7, None, ["name"]),
    ]
    title = replace(ITEMS.column("name"), name="title")
    renamed = replace(ITEMS, columns=tuple(title if c.name == "name" else c for c in ITEMS.columns), version=2)
    changes = changes_of(renamed, update(id=7, title="small", price=2), commit=50)
    destination.write_changes(TableBatch(renamed, Batch("p", 1), changes))
    assert history_rows(lake, "title", "_tailrace_unchanged") == [
        ("insert", "large", None),
        ("update", None, ["title"]),
        ("delete", None, None),
        ("insert", None, ["title"]),
        ("update", "small", None),
    ]


def test_a_change_from_before_a_new_column_says_that_it_left_the_column_alone(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake), history=["shop.items"])
    later = replace(ITEMS, columns=(*ITEMS.columns, Column("size", pa.int32(), number=9)), version=2)
    old = changes_of(ITEMS, insert(id=1, name="a", price=1), update(id=1, name="b", price=1))
    new = changes_of(later, update(id=1, name="b", price=1, size=3), commit=50)
    destination.write_changes(TableBatch(later, Batch("p", 0), [*old, *new]))
    assert history_rows(lake, "size", "_tailrace_unchanged") == [
        ("insert", None, None),
        ("update", None, ["size"]),
        ("update", 3, None),
    ]


def test_only_the_tables_that_are_named_keep_their_history(lake: Path) -> None:
    config = {
        "name": "p",
        "source": {"type": "postgres", "dsn": "dbname=shop"},
        "destination": {"type": "delta", "path": str(lake), "history": ["audit.*"]},
    }
    destination = open_destination(from_dict(config))
    write(destination, 0, insert(id=1, name="a", price=1), update(id=1, name="b", price=1))
    assert DeltaTable(str(lake / "shop" / "items")).to_pyarrow_table().to_pylist() == [
        {"id": 1, "name": "b", "price": 1}
    ]
    [*_, finding] = destination.check([ITEMS])
    assert (finding.level, finding.message) == ("warning", "history names audit.*, but no table matches it")


def test_no_pattern_of_a_history_is_taken_for_wrong_while_the_tables_are_not_known(lake: Path) -> None:
    config = {
        "name": "p",
        "source": {"type": "sqlite", "path": str(lake.parent / "not there.db")},
        "destination": {"type": "delta", "path": str(lake), "history": ["shop.*"]},
    }
    pipeline = from_dict(config)
    destination = open_destination(pipeline)
    findings = registry.check(open_source(pipeline), destination)
    assert {finding.level for finding in findings} == {"error", "ok"}
    assert [finding.level for finding in destination.check([])] == ["ok", "warning"]


def test_current_rows_and_a_history_are_never_mixed_and_a_copy_changes_from_one_to_the_other(lake: Path) -> None:
    current, history = DeltaDestination(path=str(lake)), DeltaDestination(path=str(lake), history=["*.*"])
    write(current, 0, insert(id=1, name="a", price=1))
    with pytest.raises(SchemaChangedError, match="holds current rows") as refused:
        write(history, 1, update(id=1, name="b", price=1))
    assert "tailrace resync FILE shop.items" in (refused.value.fix or "")
    copied(history, 1, name="b")
    write(history, 2, update(id=1, name="c", price=1))
    assert sorted(history_rows(lake, "name")) == [("read", "b"), ("update", "c")]
    with pytest.raises(SchemaChangedError, match="holds a changelog"):
        write(current, 3, delete(id=1))
    copied(current, 3, name="c")
    write(current, 4, update(id=1, name="d", price=1))
    assert DeltaTable(str(lake / "shop" / "items")).to_pyarrow_table().to_pylist() == [
        {"id": 1, "name": "d", "price": 1}
    ]


def test_a_copy_of_current_rows_that_was_interrupted_is_no_part_of_a_history(lake: Path) -> None:
    current, history = DeltaDestination(path=str(lake)), DeltaDestination(path=str(lake), history=["*.*"])
    write(current, 0, insert(id=1, name="a", price=1))
    rows = changes_of(ITEMS, read(id=1, name="b", price=1))
    write(current, 1, staged=[current.write_rows(ITEMS, rows)], begins_copy=True)
    with pytest.raises(SchemaChangedError, match="holds current rows"):
        write(history, 2, staged=[history.write_rows(ITEMS, rows)], completes_copy=True)
    copied(history, 3, name="b")
    assert history_rows(lake, "name") == [("read", "b")]


def test_the_query_of_the_documentation_gives_the_table_at_each_moment(lake: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "delta.md").read_text("utf-8")
    [query, _] = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    destination = DeltaDestination(path=str(lake), history=["*.*"])
    copy = [unstamped(chunk) for chunk in changes_of(ITEMS, *(read(id=n, name="a", price=n) for n in (1, 2, 3)))]
    staged = destination.write_rows(ITEMS, copy)
    write(destination, 0, staged=[staged], begins_copy=True, completes_copy=True)
    days: list[set[tuple[int, str]]] = [{(1, "a"), (2, "a"), (3, "a")}]
    for day, (change, left) in enumerate(
        [
            (update(id=1, name="b", price=1), {(1, "b"), (2, "a"), (3, "a")}),
            (delete(id=2), {(1, "b"), (3, "a")}),
            (TRUNCATE, set()),
            (insert(id=3, name="c", price=1), {(3, "c")}),
        ],
        start=1,
    ):
        days.append(left)
        changes = [stamped(chunk, day) for chunk in changes_of(ITEMS, change, commit=10 * day)]
        destination.write_changes(TableBatch(ITEMS, Batch("p", day), changes))
    [found_late] = changes_of(ITEMS, delete(id=3), commit=100)
    destination.write_changes(TableBatch(ITEMS, Batch("p", 5), [unstamped(found_late)]))
    prices = DeltaTable(str(lake / "shop" / "items")).to_pyarrow_table()
    with duckdb.connect() as connection:
        connection.register("prices", prices)
        for day, expected in enumerate(days):
            then = query.replace("2026-05-04T12:00:00Z", f"2024-03-{1 + day:02}T12:00:00Z")
            assert {row[:2] for row in connection.execute(then).fetchall()} == expected
        assert connection.execute(query.replace("2026", "9999")).fetchall() == []


def stamped(changes: Changes, day: int) -> Changes:
    """The changes as if they had been committed on that day."""
    at = pa.scalar(datetime(2024, 3, 1 + day, tzinfo=UTC), pa.timestamp("us", "UTC"))
    return committed(changes, pa.repeat(at, len(changes)))


def unstamped(changes: Changes) -> Changes:
    """The changes of an upstream that gives no commit time."""
    return committed(changes, pa.nulls(len(changes), pa.timestamp("us", "UTC")))


def committed(changes: Changes, at: pa.Array[Any]) -> Changes:
    field = changes.batch.schema.get_field_index("committed_at")
    return Changes(changes.table, changes.batch.set_column(field, changes.batch.schema.field(field), at))


def copied(destination: DeltaDestination, number: int, **row: Any) -> None:
    """What a resync does, in one batch."""
    staged = destination.write_rows(ITEMS, changes_of(ITEMS, read(id=1, price=1, **row)))
    write(destination, number, staged=[staged], begins_copy=True, completes_copy=True)


def test_a_new_copy_replaces_a_history_in_the_commit_that_completes_it(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake), history=["shop.items"])
    first, second, third, fourth = (
        destination.write_rows(ITEMS, changes_of(ITEMS, read(id=number, name="a", price=1), commit=number))
        for number in range(4)
    )
    write(destination, 0, staged=[first], begins_copy=True)
    write(destination, 1, staged=[second], completes_copy=True)
    destination.write_changes(
        TableBatch(ITEMS, Batch("p", 2), changes_of(ITEMS, update(id=1, name="b", price=1), commit=10))
    )
    before = [("read", 0), ("read", 1), ("update", 1)]
    assert history_rows(lake, "id") == before
    write(destination, 3, staged=[third], begins_copy=True)
    assert history_rows(lake, "id") == before
    write(destination, 4, staged=[fourth], completes_copy=True)
    assert write(destination, 4, staged=[fourth], completes_copy=True).repeated
    assert history_rows(lake, "id") == [("read", 2), ("read", 3)]


def test_housekeeping_keeps_every_row_of_a_history(lake: Path) -> None:
    destination = DeltaDestination(
        path=str(lake), history=["*.*"], compact=CompactOptions(files=2, target_bytes=1_000_000)
    )
    for number in range(4):
        changes = changes_of(ITEMS, update(id=1, name=str(number), price=number), commit=10 * number)
        destination.write_changes(TableBatch(ITEMS, Batch("p", number), changes))
    before = history_at(lake)
    assert destination.maintain(ITEMS.table)
    assert history_at(lake) == before
    assert len(before) == 4


def test_a_mode_is_one_word_or_goes_by_pattern_and_the_first_that_matches_counts(lake: Path) -> None:
    everywhere = DeltaDestination(path=str(lake), mode="changelog")
    by_pattern = DeltaDestination(path=str(lake), mode={"shop.items": "history", "shop.*": "changelog"})
    earlier = DeltaDestination(path=str(lake), mode="history", history=["shop.items"])
    other = replace(ITEMS, table=replace(ITEMS.table, name="other"))
    assert [everywhere.mode_of(ITEMS), by_pattern.mode_of(ITEMS), earlier.mode_of(ITEMS)] == [
        "changelog",
        "history",
        "changelog",
    ]
    assert [by_pattern.mode_of(other), earlier.mode_of(other)] == ["changelog", "history"]
    assert everywhere.mode_of(replace(ITEMS, key=())) == "current"
    idle = DeltaDestination(path=str(lake), mode={"audit.*": "changelog"}).check([ITEMS])
    assert idle[-1].message == "mode names audit.*, but no table matches it"


def test_a_changelog_has_the_row_as_it_was_where_the_upstream_sends_it(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake), mode="changelog")
    write(destination, 0, insert(id=1, name="a", price=1))
    assert not [name for name in history_at(lake)[0] if name.startswith("_tailrace_before_")]
    old = {"id": 1, "name": "a", "price": 1}
    changed = with_before(changes_of(ITEMS, update(id=1, name="b", price=2), delete(id=1), commit=9), [old, old])
    destination.write_changes(TableBatch(ITEMS, Batch("p", 1), changed))
    title = replace(ITEMS.column("name"), name="title")
    renamed = replace(ITEMS, columns=tuple(title if c.name == "name" else c for c in ITEMS.columns), version=2)
    write(destination, 2, table=renamed)
    names = ("title", "_tailrace_before_id", "_tailrace_before_title", "_tailrace_before_price")
    assert history_rows(lake, *names) == [
        ("insert", "a", None, None, None),
        ("update", "b", 1, "a", 1),
        ("delete", None, 1, "a", 1),
    ]


def with_before(changes: list[Changes], images: list[dict[str, Any]]) -> list[Changes]:
    [chunk] = changes
    at = chunk.batch.schema.get_field_index("before")
    before = pa.array(images, chunk.table.row_type)
    return [Changes(chunk.table, chunk.batch.set_column(at, chunk.batch.schema.field(at), before))]


def versions_at(lake: Path, *names: str) -> list[tuple[Any, ...]]:
    rows = queried(str(lake / "shop" / "items"))
    rows.sort(key=lambda row: (row["_tailrace_from"], row["_tailrace_to"]))
    return [tuple(row[name] for name in (*names, "_tailrace_is_current")) for row in rows]


@pytest.mark.parametrize("updates", ["copy_on_write", "merge_on_read"])
def test_older_versions_keep_what_a_column_held_that_the_upstream_dropped(lake: Path, updates: Any) -> None:
    destination = DeltaDestination(path=str(lake), mode="history", updates=updates)
    write(destination, 0, insert(id=1, name="a", price=1), insert(id=2, name="b", price=2))
    slim = replace(ITEMS, columns=ITEMS.columns[:2], version=2)
    later = changes_of(slim, update(id=1, name="c"), commit=10)
    destination.write_changes(TableBatch(slim, Batch("p", 1), later))
    assert versions_at(lake, "id", "name", "price") == [(1, "a", 1, False), (2, "b", 2, True), (1, "c", None, True)]
    text = replace(ITEMS.column("price"), type=pa.string(), number=9)
    wider = replace(slim, columns=(*slim.columns, text), version=3)
    destination.write_changes(
        TableBatch(wider, Batch("p", 2), changes_of(wider, update(id=2, name="b", price="x"), commit=20))
    )
    assert versions_at(lake, "id", "price") == [(1, None, False), (2, None, False), (1, None, True), (2, "x", True)]


def test_a_new_copy_continues_the_history_and_rows_that_did_not_change_keep_their_version(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake), mode="history")
    write(destination, 0, *(insert(id=n, name="a", price=n) for n in (1, 2, 3)))
    rows = read(id=1, name="a", price=1), read(id=2, name="new", price=2), read(id=4, name="a", price=4)
    copied_rows = [replace(one, batch=at_commit(one.batch, 50)) for one in changes_of(ITEMS, *rows)]
    staged = destination.write_rows(ITEMS, copied_rows)
    write(destination, 1, staged=[staged], begins_copy=True)
    assert len(versions_at(lake)) == 3
    write(destination, 2, completes_copy=True)
    assert versions_at(lake, "id", "name") == [
        (1, "a", True),
        (2, "a", False),
        (3, "a", False),
        (2, "new", True),
        (4, "a", True),
    ]
    found = destination.read_table(ITEMS)
    assert found is not None
    assert sorted(key for batch in found.rows for key in batch.column("id").to_pylist()) == [1, 2, 4]


def at_commit(batch: pa.RecordBatch, commit: int) -> pa.RecordBatch:
    at = batch.schema.get_field_index("commit")
    return batch.set_column(at, batch.schema.field(at), pa.array([commit] * len(batch), pa.int64()))
