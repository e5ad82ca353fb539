"""Maintenance next to batches: no row is lost or comes back, no batch fails, and nothing is deleted too early."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.destination.delta import (
    data_file,
    key_index,
    maintenance,
    rewrite,
    table_lock,
    vacuum,
)
from tailrace.destination.delta.data_file import DataFile
from tailrace.destination.delta.deletion_vector import Descriptor
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.destination.delta.log import DeltaSnapshot
from tailrace.destination.delta.object_folder import ObjectFolder
from tailrace.destination.delta.option import CompactOptions, VacuumOptions
from tailrace.destination.delta.reader import read_rows
from tailrace.destination.lake import key_file
from tailrace.destination.lake import key_index as lake_keys
from tailrace.errors import UnavailableError
from tailrace.model.schema import Column, TableSchema
from tailrace.system import failpoint
from tailrace.system.failpoint import VARIABLE
from tailrace.testing.destination import ITEMS, TRUNCATE, RowChange, changes_of, delete, insert, read, update
from tests.support.delta_table import forget_everything
from tests.support.destination_writing import write

Rows = dict[int, tuple[str, int]]


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


def marking(lake: Path, **more: Any) -> DeltaDestination:
    options = {"updates": "merge_on_read", "compact": CompactOptions(files=4), "vacuum": None, **more}
    return DeltaDestination(path=str(lake), **options)


def snapshot_of(destination: DeltaDestination) -> DeltaSnapshot:
    found = DeltaSnapshot.load(destination.place(ITEMS.table), str(ITEMS.table))
    assert found is not None
    return found


def rows_at(destination: DeltaDestination) -> Rows:
    """The rows as delta-rs and as tailrace's own reader see them."""
    table = DeltaTable(destination.place(ITEMS.table).uri)
    batches = QueryBuilder().register("it", table).execute("SELECT id, name, price FROM it").read_all()
    theirs = sorted(tuple(row.values()) for row in pa.table(batches).to_pylist())
    ours = sorted(
        (row["id"], row["name"], row["price"])
        for batch in read_rows(destination.place(ITEMS.table), ITEMS).rows
        for row in batch.to_pylist()
    )
    assert theirs == ours
    assert len({row[0] for row in theirs}) == len(theirs)
    return {number: (name, price) for number, name, price in theirs}


def fill(destination: DeltaDestination, count: int, files: int = 1) -> Rows:
    """A copy of `count` rows in so many files."""
    staged = [
        destination.write_rows(
            ITEMS, changes_of(ITEMS, *(read(id=one, name="old", price=0) for one in range(at, count, files)))
        )
        for at in range(files)
    ]
    write(destination, 0, staged=staged, begins_copy=True, completes_copy=True)
    return dict.fromkeys(range(count), ("old", 0))


@contextmanager
def at_failpoint(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], None]) -> Iterator[None]:
    """Within the block, do something the first time that the code reaches a failpoint."""
    plainly = failpoint.reach
    waiting = [act]

    def reach(reached: str) -> None:
        if reached == name and waiting:
            waiting.pop()()
        plainly(reached)

    with monkeypatch.context() as patch:
        patch.setattr(failpoint, "reach", reach)
        yield
    assert not waiting


# -- a rewrite next to batches -----------------------------------------------------------------------------


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, int, int, list[list[tuple[str, int]]], list[list[tuple[str, int]]]]:
    """Rows, files, rows per file, and the batches before and after the rewrite has read its version."""
    count = draw(st.integers(1, 40))
    one = st.tuples(st.sampled_from(["update", "delete", "insert"]), st.integers(0, count + 5))
    batches = st.lists(st.lists(one, min_size=1, max_size=15, unique_by=lambda change: change[1]), max_size=4)
    return count, draw(st.integers(1, 4)), draw(st.integers(1, 30)), draw(batches), draw(batches)


@settings(max_examples=25)
@given(plans())
def test_rows_that_die_while_their_files_are_rewritten_are_dead_in_the_new_files(
    plan: tuple[int, int, int, list[list[tuple[str, int]]], list[list[tuple[str, int]]]],
) -> None:
    count, files, per_file, before, meanwhile = plan
    with TemporaryDirectory() as folder:
        destination = marking(Path(folder), compact=None)
        rows = fill(destination, count, files)
        number = 0
        for batch in before:
            number += 1
            apply_to(rows, destination, number, batch)
        read_version = snapshot_of(destination)
        sources = read_version.files()
        rewritten = rewrite.write_group(read_version, sources, per_file) if sources else None
        for batch in meanwhile:
            number += 1
            apply_to(rows, destination, number, batch)
        if rewritten is not None:
            assert rewrite.commit_rewritten(read_version, [rewritten]) is not None
            assert not snapshot_of(destination).by_path.keys() & {file.path for file in sources}
        assert rows_at(destination) == rows
        number += 1
        apply_to(rows, destination, number, [("update", one) for one in range(0, count, 3)])
        assert rows_at(destination) == rows


def apply_to(rows: Rows, destination: DeltaDestination, number: int, batch: list[tuple[str, int]]) -> None:
    """Write a batch of changes that are possible, and do the same to `rows`."""
    changes: list[RowChange] = []
    for kind, key in batch:
        if kind == "delete" and rows.pop(key, None) is not None:
            changes.append(delete(id=key))
        elif kind == "update" and key in rows:
            rows[key] = ("new", number)
            changes.append(update(id=key, name="new", price=number))
        elif kind == "insert" and key not in rows:
            rows[key] = ("fresh", number)
            changes.append(insert(id=key, name="fresh", price=number))
    if changes:
        write(destination, number, *changes)


def test_a_table_that_is_emptied_while_it_is_rewritten_stays_empty(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = marking(lake)
    fill(destination, 20, files=4)
    with at_failpoint(monkeypatch, "delta.before_compact", lambda: write(destination, 1, TRUNCATE)):
        destination.maintain(ITEMS.table)
    assert rows_at(destination) == {}


def test_a_commit_that_loses_to_a_batch_is_tried_again_with_its_marks(
    lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = marking(lake)
    rows = fill(destination, 20, files=4)
    monkeypatch.setattr(table_lock, "BATCH_WAIT_SECONDS", 0.0)  # as on another machine

    def batch() -> None:
        apply_to(rows, destination, 1, [("update", 3), ("delete", 7), ("insert", 99)])

    with at_failpoint(monkeypatch, "delta.before_fold_commit", batch):
        assert destination.maintain(ITEMS.table) == "merged 4 files into 1"
    assert rows_at(destination) == rows


def test_a_rewrite_is_given_up_when_a_batch_rewrites_one_of_its_files(
    lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = marking(lake, updates="copy_on_write")
    rows = fill(destination, 20, files=4)

    def batch() -> None:
        apply_to(rows, destination, 1, [("update", 3)])

    with at_failpoint(monkeypatch, "delta.before_compact", batch):
        assert destination.maintain(ITEMS.table) is None
    assert rows_at(destination) == rows


def test_a_rewrite_is_given_up_when_the_columns_change(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = marking(lake)
    rows = fill(destination, 20, files=4)
    wider = TableSchema(ITEMS.table, (*ITEMS.columns, Column("color", pa.string(), number=9)), ITEMS.key, 2)

    def batch() -> None:
        write(destination, 1, insert(id=50, name="n", price=1, color="red"), table=wider)

    with at_failpoint(monkeypatch, "delta.before_compact", batch):
        assert destination.maintain(ITEMS.table) is None
    assert rows_at(destination) == {**rows, 50: ("n", 1)}


def test_a_copy_that_replaces_the_table_while_it_is_rewritten_is_all_there_is(
    lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = marking(lake)
    fill(destination, 20, files=4)

    def copy() -> None:
        staged = destination.write_rows(ITEMS, changes_of(ITEMS, read(id=1, name="copied", price=1)))
        write(destination, 1, staged=[staged], begins_copy=True, completes_copy=True)

    with at_failpoint(monkeypatch, "delta.before_compact", copy):
        assert destination.maintain(ITEMS.table) is None
    assert rows_at(destination) == {1: ("copied", 1)}


def test_batches_and_maintenance_at_the_same_time_lose_nothing_and_no_batch_fails(
    lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "COMMIT_ROWS", 300)
    destination = marking(lake, compact=CompactOptions(files=2))
    rows = fill(destination, 600, files=4)
    ended = threading.Event()
    done: list[str | None] = []
    failures: list[BaseException] = []

    def keep_up() -> None:
        try:
            while not ended.is_set():
                done.append(destination.maintain(ITEMS.table))
        except BaseException as error:  # noqa: BLE001 - the test reports it
            failures.append(error)

    thread = threading.Thread(target=keep_up)
    thread.start()
    try:
        number = 0
        # Until maintenance has merged often enough, however busy the machine is.
        while not failures and (number < 60 or len([one for one in done if one]) < 6):
            number += 1
            keys = [(number * 37 + at * 11) % 650 for at in range(30)]
            kinds = ["delete" if key % 5 == number % 5 else "update" if key in rows else "insert" for key in keys]
            apply_to(rows, destination, number, list(zip(kinds, keys, strict=True)))
    finally:
        ended.set()
        thread.join()
    assert not failures
    assert rows_at(destination) == rows


KILLED = """
import sys, time
from tailrace.destination.delta import commit
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.destination.delta.object_folder import ObjectFolder
from tailrace.destination.delta.option import VacuumOptions
from tailrace.testing.destination import ITEMS
commit.CHECKPOINT_INTERVAL = 2
later = time.time() + 7200
time.time = lambda: later
vacuum = VacuumOptions(every=0, retention=3600)
DeltaDestination(path=sys.argv[1], updates="merge_on_read", vacuum=vacuum).maintain_now(ITEMS.table)
"""


@pytest.mark.parametrize(
    "place",
    [
        "delta.before_checkpoint",
        "delta.checkpointed",
        "delta.before_compact",
        "delta.before_fold_commit",
        "delta.before_log_entry",
        "delta.before_sync",
        "delta.before_vacuum",
        "delta.before_collect",
    ],
)
def test_maintenance_that_is_killed_anywhere_changes_no_row_and_can_be_done_again(lake: Path, place: str) -> None:
    destination = marking(lake)
    rows = fill(destination, 20, files=4)
    apply_to(rows, destination, 1, [("update", 3), ("delete", 7)])
    # Files and vectors that are out of use by the time of the one that is killed.
    assert (destination.maintain_now(ITEMS.table) or "").startswith("merged")
    apply_to(rows, destination, 2, [("update", 5), ("delete", 8)])
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(lake)],
        env={**os.environ, VARIABLE: f"{place}:kill"},
        start_new_session=True,
    )
    assert killed.returncode == -signal.SIGKILL
    forget_everything()
    assert rows_at(destination) == rows
    apply_to(rows, destination, 3, [("update", 4), ("insert", 30)])
    assert (destination.maintain_now(ITEMS.table) or "").startswith("merged")
    assert rows_at(destination) == rows
    assert len(snapshot_of(destination).files()) == 1


# -- what is rewritten -------------------------------------------------------------------------------------


def file_of(path: str, rows: int, dead: int = 0, vector_bytes: int = 0, **partition: str) -> DataFile:
    vector = Descriptor("u", "x" * 20, 1, 10, dead) if dead else None
    return DataFile(path, rows * 30, rows, partition=partition, vector=vector, vector_bytes=vector_bytes)


def planned(*files: DataFile, marks: bool = True, everything: bool = False) -> list[set[str]]:
    groups = maintenance.plan(files, CompactOptions(files=4), 500, marks=marks, full=set(), everything=everything)
    return [{file.path for file in group} for group in groups]


def test_a_file_is_folded_when_a_tenth_is_dead_or_its_vectors_cost_as_much_as_itself() -> None:
    assert planned(file_of("a", 1000, 99)) == []
    assert planned(file_of("a", 1000, 100)) == [{"a"}]
    assert planned(file_of("a", 1000, 1, vector_bytes=29_999)) == []
    assert planned(file_of("a", 1000, 1, vector_bytes=30_000)) == [{"a"}]
    assert planned(file_of("a", 1000, 1), everything=True) == [{"a"}]
    assert planned(file_of("a", 1000, 1), marks=False) == [{"a"}]


def test_large_files_stay_files_of_their_own_and_small_ones_are_merged_by_partition() -> None:
    small = [file_of(name, 10, day=day) for name, day in [("a", "1"), ("b", "1"), ("c", "2"), ("d", "2"), ("e", "3")]]
    assert planned(*small[:3]) == []
    assert planned(*small, file_of("x", 900, 200), file_of("y", 900, 200)) == [{"a", "b"}, {"c", "d"}, {"x"}, {"y"}]


def test_a_small_file_that_is_larger_than_all_smaller_ones_waits_for_more() -> None:
    few = [file_of(str(number), 10) for number in range(5)]
    assert planned(*few, file_of("a", 60)) == [{"0", "1", "2", "3", "4"}]
    assert planned(*few, file_of("a", 50)) == [{"0", "1", "2", "3", "4", "a"}]
    assert planned(*few, file_of("a", 60), everything=True) == [{"0", "1", "2", "3", "4", "a"}]


def test_one_commit_rewrites_no_more_than_a_few_files(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "COMMIT_ROWS", 25)
    destination = marking(lake)
    rows = fill(destination, 100, files=10)
    before = snapshot_of(destination).version
    assert destination.maintain(ITEMS.table) == "merged 10 files into 5"
    assert snapshot_of(destination).version == before + 5
    assert rows_at(destination) == rows


def test_a_table_that_is_no_longer_marked_loses_all_its_vectors(lake: Path) -> None:
    destination = marking(lake)
    rows = fill(destination, 20)
    apply_to(rows, destination, 1, [("update", 3)])
    assert any(file.vector for file in snapshot_of(destination).files())
    later = marking(lake, updates="copy_on_write")
    assert later.maintain(ITEMS.table) == "merged 1 files into 1"
    assert not any(file.vector for file in snapshot_of(later).files())
    assert rows_at(later) == rows


def test_the_keys_of_rewritten_files_are_indexed_before_the_next_batch(
    lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lake_keys, "STORED_ROWS", 1)
    monkeypatch.setattr(data_file, "LEAST_MARKED_ROWS", 50)
    destination = marking(lake)
    rows = fill(destination, 40, files=4)
    apply_to(rows, destination, 1, [("update", 3), ("update", 4)])
    destination.maintain(ITEMS.table)
    key_index._last_keys.clear()  # as in a process that has applied no batch
    apply_to(rows, destination, 2, [("update", 3)])
    key_index._last_keys.clear()
    lake_keys._kept.clear()
    destination.maintain_now(ITEMS.table)
    written: list[Path] = []
    monkeypatch.setattr(key_file, "write", lambda path, *_: written.append(path))
    lake_keys._kept.clear()
    apply_to(rows, destination, 3, [("update", 5), ("delete", 6)])
    assert written == []
    assert rows_at(destination) == rows


def test_one_process_at_a_time_maintains_a_table(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = marking(lake)
    fill(destination, 20, files=4)
    with table_lock.maintaining(destination.place(ITEMS.table)) as is_held:
        assert is_held
        assert destination.maintain(ITEMS.table) is None
        monkeypatch.setattr(maintenance, "WAIT_SECONDS", 0.0)
        with pytest.raises(UnavailableError, match="another process"):
            destination.maintain_now(ITEMS.table)
    assert destination.maintain(ITEMS.table) == "merged 4 files into 1"


def test_in_an_object_store_each_call_makes_one_commit_and_conflicts_settle_the_rest(
    lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"file://{lake}/shop/items"
    (lake / "shop/items").mkdir(parents=True)
    store = ObjectFolder(uri, table=str(ITEMS.table))
    monkeypatch.setattr(DeltaDestination, "place", lambda *_: store)
    monkeypatch.setattr(maintenance, "COMMIT_ROWS", 15)
    destination = marking(lake, vacuum=VacuumOptions(every=0, retention=3600))
    rows = fill(destination, 40, files=8)

    def batch() -> None:
        apply_to(rows, destination, 1, [("update", 3), ("delete", 7), ("insert", 99)])

    with at_failpoint(monkeypatch, "delta.before_fold_commit", batch):
        assert destination.maintain(ITEMS.table) == "merged 3 files into 1"
    assert rows_at(destination) == rows
    assert (destination.maintain_now(ITEMS.table) or "").startswith("merged")
    assert rows_at(destination) == rows
    for path in (lake / "shop/items").glob("part-*.parquet"):
        os.utime(path, (0, 0))
    look_later(monkeypatch, 3700)
    assert (destination.maintain_now(ITEMS.table) or "").startswith("deleted")
    assert rows_at(destination) == rows


def test_a_batch_does_not_wait_for_a_process_that_is_stopped_in_its_commit(
    lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_lock, "BATCH_WAIT_SECONDS", 0.01)
    destination = marking(lake)
    rows = fill(destination, 20, files=4)
    destination.maintain(ITEMS.table)
    with table_lock.between_batches(destination.place(ITEMS.table)):
        apply_to(rows, destination, 1, [("update", 3)])
    assert rows_at(destination) == rows


# -- what is deleted, and when -----------------------------------------------------------------------------


def look_later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """From now on it is later, and time to look at everything."""
    later = time.time() + seconds
    monkeypatch.setattr("time.time", lambda: later)
    vacuum._looked.clear()


def test_vectors_are_kept_for_an_hour_after_they_are_out_of_use_and_then_deleted(
    lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = marking(lake, compact=None)
    rows = fill(destination, 20)
    folder = lake / "shop/items/_dv"
    for number in range(1, 4):
        apply_to(rows, destination, number, [("update", number)])
    before = set(folder.iterdir())
    assert len(before) == 3
    destination.maintain(ITEMS.table)
    look_later(monkeypatch, 3000)
    destination.maintain(ITEMS.table)
    assert set(folder.iterdir()) == before
    look_later(monkeypatch, 700)
    destination.maintain(ITEMS.table)
    assert len(list(folder.iterdir())) == 1
    assert rows_at(destination) == rows


def test_a_vector_that_a_batch_has_written_and_not_committed_for_an_hour_is_kept(
    lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = marking(lake, compact=None)
    rows = fill(destination, 20)
    apply_to(rows, destination, 1, [("update", 1)])
    destination.maintain(ITEMS.table)
    written, may_commit = threading.Event(), threading.Event()

    def hold() -> None:
        written.set()
        may_commit.wait()

    with at_failpoint(monkeypatch, "delta.before_commit", hold):
        batch = threading.Thread(target=apply_to, args=(rows, destination, 2, [("update", 2)]))
        batch.start()
        written.wait()
        vacuum._looked.clear()
        destination.maintain(ITEMS.table)  # sees the file for the first time
        look_later(monkeypatch, 3700)
        monkeypatch.setattr(table_lock, "COMMIT_WAIT_SECONDS", 0.0)
        destination.maintain(ITEMS.table)
        may_commit.set()
        batch.join()
    assert rows_at(destination) == rows


def test_a_data_file_is_kept_for_an_hour_after_it_was_removed_however_old_it_is(
    lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = marking(lake, vacuum=VacuumOptions(every=0, retention=3600))
    rows = fill(destination, 20, files=4)
    old = set((lake / "shop/items").glob("*.parquet"))
    for path in old:
        os.utime(path, (0, 0))
    assert destination.maintain(ITEMS.table) == "merged 4 files into 1"
    # Without the tombstones of the log's checkpoint, as some minutes later.
    look_later(monkeypatch, 3000)
    destination.maintain(ITEMS.table)
    assert old <= set((lake / "shop/items").glob("*.parquet"))
    look_later(monkeypatch, 700)
    assert destination.maintain(ITEMS.table) == "deleted 4 files"
    assert not old & set((lake / "shop/items").glob("*.parquet"))
    assert rows_at(destination) == rows


def test_nothing_of_a_held_copy_is_deleted_by_hand_either(lake: Path) -> None:
    destination = marking(lake, vacuum=VacuumOptions(every=0, retention=3600))
    fill(destination, 20, files=4)
    staged = destination.write_rows(ITEMS, changes_of(ITEMS, read(id=1, name="copied", price=1)))
    write(destination, 1, staged=[staged], begins_copy=True)
    for path in (lake / "shop/items").glob("*.parquet"):
        os.utime(path, (0, 0))
    destination.maintain_now(ITEMS.table)
    write(destination, 2, completes_copy=True)
    assert rows_at(destination) == {1: ("copied", 1)}


def test_a_batch_whose_copied_files_a_vacuum_found_old_is_done_again(
    lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = marking(lake, vacuum=VacuumOptions(every=0, retention=3600))
    rows = fill(destination, 20)
    late = changes_of(ITEMS, read(id=50, name="late", price=1))
    # The machine sleeps between the tasks of a batch.
    staged = destination.write_rows(ITEMS, late)
    for path in (lake / "shop/items").glob("*.parquet"):
        os.utime(path, (0, 0))
    look_later(monkeypatch, 7200)
    assert destination.maintain_now(ITEMS.table) == "deleted 1 files"
    with pytest.raises(UnavailableError, match="done again"):
        write(destination, 1, staged=[staged])
    assert rows_at(destination) == rows
    write(destination, 1, staged=[destination.write_rows(ITEMS, late)])
    assert rows_at(destination) == {**rows, 50: ("late", 1)}


def test_key_files_and_drafts_that_a_killed_process_left_are_deleted_after_an_hour(
    lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lake_keys, "STORED_ROWS", 1)
    destination = marking(lake)
    rows = fill(destination, 20)
    apply_to(rows, destination, 1, [("update", 1)])
    own, log = lake / "shop/items/_tailrace", lake / "shop/items/_delta_log"
    wanted = set((own / "keys").iterdir())
    left = [
        own / "keys" / f"part-1.parquet.keys.{'a' * 32}.tmp",
        own / "keys" / "part-1.parquet.keys",
        own / f"vacuum.json.{'b' * 32}",
        log / f".{7:020}.json.{'c' * 32}",
    ]
    for path in left:
        path.write_bytes(b"")
    vacuum._looked.clear()
    destination.maintain(ITEMS.table)
    assert all(path.exists() for path in left)
    look_later(monkeypatch, 3700)
    destination.maintain(ITEMS.table)
    assert not any(path.exists() for path in left)
    assert wanted
    assert wanted <= set((own / "keys").iterdir())
    assert rows_at(destination) == rows


def test_the_log_stays_small_under_many_commits(lake: Path) -> None:
    destination = marking(lake)
    rows = fill(destination, 200, files=4)
    for number in range(1, 121):
        apply_to(rows, destination, number, [("update", number)])
        if number % 20 == 0:
            destination.maintain(ITEMS.table)
    log = lake / "shop/items/_delta_log"
    checkpoints = sorted(log.glob("*.checkpoint.parquet"))
    assert checkpoints
    assert checkpoints[-1].stat().st_size < 200_000
    assert len(snapshot_of(destination).files()) < 30
    assert rows_at(destination) == rows
