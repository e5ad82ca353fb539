"""A Delta table with the history of its rows holds the versions that a replay, commit by commit, finds."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.destination import Batch, TableBatch
from tailrace.destination.delta import destination as delta
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.model.change import Changes, Op
from tailrace.model.schema import TableSchema
from tests.support.delta_table import queried
from tests.support.history import KINDS, VALUES, Event, Key, Row, Upstream, as_changes, replay, table_of

START = datetime(2024, 3, 1, tzinfo=UTC)
OPEN = "f" * 32
Interval = tuple[str, str, datetime | None, datetime | None]


def text(commit: int, ordinal: int = 0) -> str:
    return f"{commit:016x}{ordinal:016x}"


def time_of(commit: int) -> datetime:
    return START + timedelta(minutes=commit)


@dataclass
class Brute:
    """The versions of all rows, found by comparing the table after each commit with the one before."""

    table: TableSchema
    rows: dict[Key, Row] = field(default_factory=dict)
    began: dict[Key, tuple[str, datetime | None]] = field(default_factory=dict)
    closed: list[tuple[Row, Interval]] = field(default_factory=list)

    def step(self, rows: dict[Key, Row], at: str, when: datetime | None) -> None:
        for key in self.rows.keys() | rows.keys():
            if self.rows.get(key) == rows.get(key):
                continue
            if key in self.rows:
                begin, since = self.began.pop(key)
                self.closed.append((self.rows[key], (begin, at, since, when)))
            if key in rows:
                self.began[key] = (at, when)
        self.rows = dict(rows)

    def versions(self) -> list[tuple[Row, Interval]]:
        current = [(row, (*self.began[key],)) for key, row in self.rows.items()]
        return [*self.closed, *((row, (begin, OPEN, since, None)) for row, (begin, since) in current)]


def grouped(draw: Any, events: list[Event], first: int) -> list[tuple[int, int]]:
    """A commit and an ordinal for each event; the halves of a changed key stay together."""
    places: list[tuple[int, int]] = []
    commit, ordinal = first, -1
    for event in events:
        if event.follows or (ordinal >= 0 and draw(st.booleans())):
            ordinal += 1
        else:
            commit, ordinal = commit + 1, 0
        places.append((commit, ordinal))
    return places


def placed(changes: list[Changes], places: list[tuple[int, int]]) -> list[Changes]:
    """The changes in these commits, and with their times."""
    found, start = [], 0
    for chunk in changes:
        here = places[start : start + len(chunk)]
        start += len(chunk)
        columns = {
            "commit": pa.array([commit for commit, _ in here], pa.int64()),
            "ordinal": pa.array([ordinal for _, ordinal in here], pa.int64()),
            "committed_at": pa.array([time_of(commit) for commit, _ in here], pa.timestamp("us", "UTC")),
        }
        batch = chunk.batch
        for name, values in columns.items():
            at = batch.schema.get_field_index(name)
            batch = batch.set_column(at, batch.schema.field(at), values)
        found.append(Changes(chunk.table, batch))
    return found


@st.composite
def event_lists(draw: st.DrawFn, upstream: Upstream, keys: list[Key]) -> list[Event]:
    upstream.events = []
    some, left_out = st.sampled_from(keys), st.frozensets(st.sampled_from(["a", "b", "c"]))
    for _ in range(draw(st.integers(0, 10))):
        action = draw(st.sampled_from("uuuuuddmmt"))
        if action == "u":
            upstream.upsert(draw(some), draw(VALUES), draw(left_out))
        elif action == "d":
            upstream.delete(draw(some))
        elif action == "m":
            upstream.move(draw(some), draw(some), draw(VALUES), draw(left_out))
        elif draw(st.integers(0, 3)) == 0:
            upstream.truncate()
    return upstream.events


@pytest.mark.parametrize("updates", ["copy_on_write", "merge_on_read"])
@pytest.mark.parametrize("kind", ["dense int64", "two texts"])
@settings(max_examples=16, deadline=None)
@given(data=st.data(), partitioned=st.booleans(), in_parts=st.booleans())
def test_the_versions_equal_those_of_a_replay_commit_by_commit(
    kind: str, updates: Any, data: Any, partitioned: bool, in_parts: bool
) -> None:
    types, keys = KINDS[kind]
    table = table_of(*types)
    upstream, brute = Upstream(table), Brute(table)
    size = delta.PART_BYTES
    try:
        delta.PART_BYTES = 1 if in_parts else size
        with tempfile.TemporaryDirectory() as path:
            partition_by = {"public.t": ["a"]} if partitioned else {}
            destination = DeltaDestination(path=path, mode="history", updates=updates, partition_by=partition_by)
            number = commit = copies = 0
            for round_number in range(3):
                if data.draw(st.booleans()) or not round_number:
                    # Changes that the log does not show, and a copy that finds them.
                    data.draw(event_lists(upstream, keys))
                    commit, copies = commit + 1, copies + 1
                    copy(destination, table, number, list(upstream.rows.values()), commit, data.draw(st.integers(1, 3)))
                    lost = brute.rows.keys() - upstream.rows.keys()
                    at = text(commit)
                    # An empty copy has no position: its rows end right where they began.
                    if lost and not upstream.rows:
                        for key in lost:
                            begin, since = brute.began.pop(key)
                            bumped = text(int(begin[:16], 16), int(begin[16:], 16) + 1)
                            brute.closed.append((brute.rows.pop(key), (begin, bumped, since, None)))
                    brute.step(upstream.rows, at, None)
                    number += 3
                before = dict(brute.rows)
                events = data.draw(event_lists(upstream, keys))
                places = grouped(data.draw, events, commit)
                changes = placed(as_changes(table, events, 4), places)
                for index, (at_commit, _) in enumerate(places):
                    if index + 1 == len(places) or places[index + 1][0] != at_commit:
                        state = replay(table, events[: index + 1], before)
                        brute.step(state, text(at_commit), time_of(at_commit))
                commit = places[-1][0] if places else commit
                for attempt in range(2):
                    written = destination.write_changes(TableBatch(table, Batch("p", number), changes))
                    assert written.repeated == (attempt == 1 and bool(events))
                number += 1
            found = queried(f"{path}/public/t") if Path(path, "public/t").exists() else []
            # The times of a later copy are those at which it was written: unknown here, and all that follows is later.
            is_timed = copies == 1
            assert coalesced(table, found, is_timed) == coalesced(table, as_rows(brute.versions()), is_timed)
            current = {tuple(row[k] for k in table.key): row for row in found if row["_tailrace_is_current"]}
            assert {key: {n: row[n] for n in table.arrow.names} for key, row in current.items()} == upstream.rows
    finally:
        delta.PART_BYTES = size


def copy(
    destination: DeltaDestination, table: TableSchema, number: int, rows: list[Row], commit: int, cuts: int
) -> None:
    """A copy in some batches, the last of which copies what is left."""
    for cut in range(cuts):
        events = [Event(Op.READ, row) for row in rows[cut::cuts]]
        chunks = [replace(one, batch=with_commit(one.batch, commit)) for one in as_changes(table, events, 2)]
        staged = destination.write_rows(table, chunks)
        batch = TableBatch(
            table,
            Batch("p", number + cut),
            staged=[staged],
            begins_copy=cut == 0,
            completes_copy=cut == cuts - 1,
        )
        for _ in range(2):
            destination.write_changes(batch)


def with_commit(batch: pa.RecordBatch, commit: int) -> pa.RecordBatch:
    at = batch.schema.get_field_index("commit")
    return batch.set_column(at, batch.schema.field(at), pa.array([commit] * batch.num_rows, pa.int64()))


def as_rows(versions: list[tuple[Row, Interval]]) -> list[Row]:
    names = ("_tailrace_from", "_tailrace_to", "_tailrace_valid_from", "_tailrace_valid_to")
    return [{**row, **dict(zip(names, interval, strict=True))} for row, interval in versions]


def coalesced(table: TableSchema, rows: list[Row], is_timed: bool) -> list[tuple[Any, ...]]:
    """The versions in order, joined where a part of a commit ended one and another part began it again."""
    found: list[list[Any]] = []
    for row in sorted(rows, key=lambda row: (str([row[name] for name in table.key]), row["_tailrace_from"])):
        assert row["_tailrace_from"] < row["_tailrace_to"]
        values = tuple(row[name] for name in table.arrow.names)
        times = [row["_tailrace_valid_from"], row["_tailrace_valid_to"]] if is_timed else [None, None]
        if found and found[-1][0] == values and found[-1][2] == row["_tailrace_from"]:
            found[-1][2], found[-1][4] = row["_tailrace_to"], times[1]
        else:
            found.append([values, row["_tailrace_from"], row["_tailrace_to"], *times])
    return [tuple(one) for one in found]


@settings(max_examples=16, deadline=None)
@given(data=st.data())
def test_the_documented_query_gives_the_table_at_every_commit(data: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "delta.md").read_text("utf-8")
    [query] = [sql for sql in re.findall(r"```sql\n(.*?)```", page, re.DOTALL) if "_tailrace_valid_from" in sql]
    table = table_of(*KINDS["dense int64"][0])
    upstream, commit = Upstream(table), 0
    rows: dict[Key, Row] = {}
    states: list[tuple[datetime, dict[Key, Row]]] = []
    with tempfile.TemporaryDirectory() as path, duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        destination = DeltaDestination(path=path, mode="history")
        for number in range(3):
            events = data.draw(event_lists(upstream, KINDS["dense int64"][1]))
            places = grouped(data.draw, events, commit)
            commit = places[-1][0] if places else commit
            destination.write_changes(
                TableBatch(table, Batch("p", number), placed(as_changes(table, events, 4), places))
            )
            for index, (at, _) in enumerate(places):
                if index + 1 == len(places) or places[index + 1][0] != at:
                    states.append((time_of(at), replay(table, events[: index + 1], rows)))
            rows = states[-1][1] if states else rows
        if not states:
            return
        prices = pa.Table.from_pylist(queried(f"{path}/public/t"))
        connection.register("prices", prices)
        for when, expected in states:
            for then in (when, when + timedelta(seconds=59)):
                asked = query.replace("2026-05-04T12:00:00Z", then.strftime("%Y-%m-%dT%H:%M:%SZ"))
                found = pa.table(connection.sql(asked).to_arrow_table()).to_pylist()
                assert {
                    tuple(row[k] for k in table.key): {n: row[n] for n in table.arrow.names} for row in found
                } == expected
                assert len(found) == len(expected)
