"""A Delta table whose rows are marked is the table one gets by replaying its changes, whatever happens in between."""

from __future__ import annotations

import datetime
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.destination import Batch, Staged, TableBatch, Written
from tailrace.destination.delta import destination as delta
from tailrace.destination.delta import table_lock
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.destination.delta.key_index import key_folder
from tailrace.destination.delta.log import DeltaSnapshot
from tailrace.destination.delta.option import CompactOptions, Updates, VacuumOptions
from tailrace.errors import UnavailableError
from tailrace.model.change import Changes, Op
from tailrace.model.schema import TableSchema
from tailrace.system import failpoint
from tailrace.system.failpoint import VARIABLE, FailpointError
from tests.support.delta_table import forget_everything, queried, read_back, small_measures, snapshot_of
from tests.support.history import (
    KINDS,
    SHIFTING,
    Event,
    Key,
    Row,
    as_changes,
    histories,
    replay,
    replay_steps,
    shifting_histories,
    step_changes,
    table_of,
)

MODES = st.sampled_from(get_args(Updates))
CRASHES = st.none() | st.sampled_from(
    ["delta.before_commit", "delta.before_log_entry", "delta.before_sync", "delta.committed"]
)
COPY_CRASHES = CRASHES | st.just("delta.staged")
MAINTENANCE_CRASHES = st.none() | st.sampled_from(
    [
        *("delta.before_checkpoint", "delta.checkpointed", "delta.before_compact", "delta.before_fold_commit"),
        *("delta.before_log_entry", "delta.before_sync", "delta.before_vacuum", "delta.before_collect"),
    ]
)
BETWEEN = st.sampled_from(
    [
        *("nothing", "restart", "maintain", "maintain everything", "optimize", "vacuum", "checkpoint", "another mode"),
        *("lose keys", "damage keys", "exchange keys"),
    ]
)
MEANWHILE = st.none() | st.none() | st.sampled_from(["maintain", "optimize", "checkpoint", "lose keys"])
MORE_KINDS: dict[str, tuple[tuple[pa.DataType, ...], list[Key]]] = {
    "bool": ((pa.bool_(),), [(True,), (False,), (True,)]),
    "uuid": ((pa.string(),), [(f"0190a3c2-77e0-7bb2-8000-00000000000{n}",) for n in range(4)]),
    "text like a date": ((pa.string(),), [("2024-01-01",), ("2024-99-99",), ("0000-00-00",)]),
    "int and instant": (
        (pa.int32(), pa.timestamp("us", "UTC")),
        [(n, datetime.datetime(2020, 1, 1, microsecond=n, tzinfo=datetime.UTC)) for n in (1, 2, 3)],
    ),
}
ALL_KINDS = {name: kind for name, kind in {**KINDS, **MORE_KINDS}.items() if name not in ("wide decimal", "time")}
"""Delta keeps the two others as text."""


@contextmanager
def dying_at(place: str | None) -> Iterator[None]:
    """Within the block the process dies at a failpoint, if it gets there: it raises, and remembers nothing."""
    if place is None:
        yield
        return
    with patch.dict(os.environ, {VARIABLE: f"{place}:raise"}):
        try:
            yield
        except FailpointError:
            forget_everything()


@contextmanager
def hours_later(hours: int) -> Iterator[None]:
    clock = time.time
    with patch.object(time, "time", lambda: clock() + 3600 * hours):
        yield


@dataclass
class Lake:
    """A table that is kept through crashes and what others do to it."""

    path: str
    table: TableSchema
    options: dict[str, Any]
    updates: Updates
    number: int = -1
    exists: bool = False
    hours: int = 0

    @property
    def uri(self) -> str:
        return f"{self.path}/public/t"

    @property
    def destination(self) -> DeltaDestination:
        compact, vacuum = CompactOptions(files=2), VacuumOptions(every=0, retention=3600)
        return DeltaDestination(path=self.path, updates=self.updates, compact=compact, vacuum=vacuum, **self.options)

    def write(
        self, changes: list[Changes], crash: str | None, meanwhile: str | None, *staged: Staged, **more: Any
    ) -> None:
        """Write a batch, once more after a crash, and once more for nothing. What comes `meanwhile` comes just before
        its commit."""
        self.number += 1
        batch = TableBatch(self.table, Batch("p", self.number, self.number), changes, staged=staged, **more)
        before = snapshot_of(self.destination, self.table.table).version if self.exists else -1
        with dying_at(crash), self._interrupted(meanwhile):
            self._apply(batch)
        self._apply(batch)
        after = DeltaSnapshot.load(self.destination.place(self.table.table), "public.t")
        self.exists = after is not None
        if after is None:
            return
        entries = [
            Path(self.uri, "_delta_log", f"{number:020}.json") for number in range(before + 1, after.version + 1)
        ]
        own = [entry for entry in entries if f'"tailrace.batch":"{self.number}"' in entry.read_text()]
        assert len(own) <= 1
        assert own == entries or meanwhile is not None
        assert self._apply(batch).repeated == bool(own)
        assert snapshot_of(self.destination, self.table.table).version == after.version

    def _apply(self, batch: TableBatch) -> Written:
        try:
            return self.destination.write_changes(batch)
        except UnavailableError:
            # A batch in parts cannot be computed again when someone else commits: it is done again as a whole.
            return self.destination.write_changes(batch)

    @contextmanager
    def _interrupted(self, how: str | None) -> Iterator[None]:
        """Within the block something happens once, just before a commit, as if another machine did it."""
        plainly, waiting = failpoint.reach, [how] if how is not None else []

        def reach(name: str) -> None:
            if name == "delta.before_commit" and waiting:
                self.disturb(waiting.pop(), self.updates)
            plainly(name)

        with (
            patch.object(failpoint, "reach", reach),
            patch.object(table_lock, "COMMIT_WAIT_SECONDS", 0.0),
            patch.object(table_lock, "BATCH_WAIT_SECONDS", 0.0),
        ):
            yield

    def copy(self, rows: dict[Key, Row], crash: str | None, meanwhile: str | None) -> None:
        """What a resync does, in one batch."""
        events = [Event(Op.READ, row) for row in rows.values()]
        staged: list[Staged] = []
        for part in (events[:3], events[3:]):
            with dying_at(crash):
                self.destination.write_rows(self.table, as_changes(self.table, part, 2))
            staged.append(self.destination.write_rows(self.table, as_changes(self.table, part, 2)))
        self.write([], crash, meanwhile, *staged, begins_copy=True, completes_copy=True)

    def disturb(self, how: str, updates: Updates, crash: str | None = None) -> None:
        """What happens between two batches. No row changes."""
        if how == "restart":
            forget_everything()
        elif how == "another mode":
            self.updates = updates
        elif how == "maintain" and self.exists:
            with dying_at(crash):
                self.destination.maintain(self.table.table)
        elif how == "maintain everything" and self.exists:
            self.hours += 2
            with dying_at(crash), hours_later(self.hours):
                self.destination.maintain_now(self.table.table)
        elif how == "optimize" and self.exists:
            DeltaTable(self.uri).optimize.compact()
        elif how == "vacuum" and self.exists:
            DeltaTable(self.uri).vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
        elif how == "checkpoint" and self.exists:
            DeltaTable(self.uri).create_checkpoint()
        elif how.endswith("keys"):
            self._disturb_keys(how)

    def _disturb_keys(self, how: str) -> None:
        forget_everything()
        files = sorted(key_folder(self.destination.place(self.table.table)).glob("*.keys"))
        contents = [file.read_bytes() for file in files]
        for number, file in enumerate(files):
            if how == "lose keys":
                file.unlink()
            elif how == "damage keys":
                at = number * 7 % len(contents[number])
                file.write_bytes(contents[number][:at] + bytes([contents[number][at] ^ 4]) + contents[number][at + 1 :])
            else:
                file.write_bytes(contents[number - 1])

    def require(self, expected: dict[Key, Row]) -> None:
        """Every way of reading the table gives exactly these rows."""
        if not self.exists:
            assert expected == {}
            return
        names = self.table.arrow.names
        found = [row for row in queried(self.uri) if row.get("_tailrace_deleted_at") is None]
        for rows in ([{name: row[name] for name in names} for row in found], read_back(self.destination, self.table)):
            assert {tuple(row[name] for name in self.table.key): row for row in rows} == expected
            assert len(rows) == len(expected)
        known = snapshot_of(self.destination, self.table.table)
        forget_everything()
        assert snapshot_of(self.destination, self.table.table) == known


@contextmanager
def parts_of(size: int) -> Iterator[None]:
    with patch.object(delta, "PART_BYTES", size):
        yield


@pytest.mark.parametrize("kind", ALL_KINDS)
@settings(max_examples=8)
@given(data=st.data())
def test_a_table_with_any_key_equals_replaying_whatever_happens_between_its_batches(kind: str, data: Any) -> None:
    types, keys = ALL_KINDS[kind]
    table = table_of(*types)
    options = {
        "partition_by": {"public.t": ["a"]} if data.draw(st.booleans()) else {},
        "deletes": data.draw(st.sampled_from(["hard", "hard", "soft"])),
    }
    expected: dict[Key, Row] = {}
    size = data.draw(st.sampled_from([1, delta.PART_BYTES]))
    with tempfile.TemporaryDirectory() as path, small_measures(), parts_of(size):
        lake = Lake(path, table, options, data.draw(MODES))
        for number, events in enumerate(data.draw(histories(table, keys, cuts=4))):
            lake.disturb(data.draw(BETWEEN), data.draw(MODES), data.draw(MAINTENANCE_CRASHES))
            expected = replay(table, events, expected)
            lake.write(
                as_changes(table, events, 5, first_commit=100 * number), data.draw(CRASHES), data.draw(MEANWHILE)
            )
            lake.require(expected)
            if lake.exists and data.draw(st.integers(0, 4)) == 0:
                lake.copy(expected, data.draw(COPY_CRASHES), data.draw(MEANWHILE))
                lake.require(expected)


@settings(max_examples=30)
@given(data=st.data(), batches=shifting_histories(cuts=4))
def test_a_table_whose_columns_change_equals_replaying_whatever_happens_between_its_batches(
    data: Any, batches: Any
) -> None:
    options = {
        "partition_by": {"public.t": ["p"]} if data.draw(st.booleans()) else {},
        "deletes": data.draw(st.sampled_from(["hard", "soft"])),
    }
    expected: dict[Key, Row] = {}
    size = data.draw(st.sampled_from([1, delta.PART_BYTES]))
    with tempfile.TemporaryDirectory() as path, small_measures(), parts_of(size):
        lake = Lake(path, SHIFTING, options, data.draw(MODES))
        for number, steps in enumerate(batches):
            lake.disturb(data.draw(BETWEEN), data.draw(MODES), data.draw(MAINTENANCE_CRASHES))
            expected = replay_steps(steps, lake.table, expected)
            lake.table = steps[-1].table
            lake.write(step_changes(steps, 5, first_commit=100 * number), data.draw(CRASHES), data.draw(MEANWHILE))
            lake.require(expected)
            if lake.exists and data.draw(st.integers(0, 4)) == 0:
                lake.copy(expected, data.draw(COPY_CRASHES), data.draw(MEANWHILE))
                lake.require(expected)
