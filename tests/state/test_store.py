from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from tailrace.change import Position, end_of
from tailrace.errors import ConfigError, DamagedError, LostError, OwnedError
from tailrace.schema import Column, TableName, TableSchema
from tailrace.state import BatchRecord, SourceStatus, StateStore, TableState, TableUpdate
from tailrace.state.machine import TransitionError


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StateStore]:
    with StateStore.open(tmp_path, name="shop") as opened:
        yield opened


def orders(version: int = 1) -> TableSchema:
    columns = tuple(Column(name, pa.int64()) for name in ["id", "a", "b", "c"][: version + 1])
    return TableSchema(TableName("public", "orders"), columns, ("id",), version, "16400")


def test_a_new_store_knows_its_pipeline_and_keeps_its_epoch(tmp_path: Path) -> None:
    with StateStore.open(tmp_path, name="shop", fingerprint="one") as store:
        first = store.pipeline()
    with StateStore.open(tmp_path, name="shop", fingerprint="two") as store:
        second = store.pipeline()
    assert (first.name, first.epoch, first.created_at) == (second.name, second.epoch, second.created_at)
    assert (first.fingerprint, second.fingerprint) == ("one", "two")


def test_the_state_of_another_pipeline_is_refused(store: StateStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="belongs to pipeline shop, not other"):
        StateStore.open(tmp_path, name="other")


def test_a_table_begins_in_init_and_follows_a_rename(store: StateStore) -> None:
    added = store.add_table("16400", "public.orders")
    store.move_table("16400", TableState.DATA_SYNC)
    renamed = store.add_table("16400", "public.sales")
    assert added.state is TableState.INIT
    assert (renamed.name, renamed.state) == ("public.sales", TableState.DATA_SYNC)
    assert set(renamed.since) == {TableState.INIT, TableState.DATA_SYNC}


def test_a_move_that_is_not_allowed_changes_nothing(store: StateStore) -> None:
    store.add_table("1", "public.a")
    with pytest.raises(TransitionError):
        store.move_table("1", TableState.DATA_SYNC, TableState.READY)
    table = store.table("1")
    assert table is not None
    assert table.state is TableState.INIT


def test_a_table_nobody_added_cannot_move(store: StateStore) -> None:
    with pytest.raises(TransitionError, match="not known"):
        store.move_table("1", TableState.DATA_SYNC)


def test_an_error_tells_its_fix_and_is_gone_once_the_table_goes_on(store: StateStore) -> None:
    store.add_table("1", "public.a")
    store.move_table("1", TableState.DATA_SYNC)
    store.fail_table("1", "no key", fix="ALTER TABLE …", resume="ff")
    store.fail_table("1", "still no key", fix="ALTER TABLE …", retry="automatic")
    failed = store.table("1")
    assert failed is not None
    assert (failed.state, failed.reason, failed.retry) == (TableState.ERRORED, "still no key", "automatic")
    assert failed.failed_in is TableState.DATA_SYNC
    store.move_table("1", TableState.DATA_SYNC)
    mended = store.table("1")
    assert mended is not None
    assert (mended.reason, mended.fix, mended.retry, mended.resume, mended.failed_in) == (None,) * 5


def test_starting_over_resets_the_counts_of_the_copy(store: StateStore) -> None:
    store.add_table("1", "public.a")
    store.apply_batch(BatchRecord(0, {}), [TableUpdate("1", (TableState.DATA_SYNC,), 5, 10, 1, 2, 3, "aa")])
    store.move_table("1", TableState.INIT)
    table = store.table("1")
    assert table is not None
    assert (table.rows_copied, table.rows_total, table.chunks_done, table.position) == (0, None, 0, None)
    assert table.changes_applied == 3
    assert set(table.since) == {TableState.INIT}


def test_a_forgotten_table_leaves_nothing(store: StateStore) -> None:
    store.add_table("16400", "public.orders")
    store.put_schema(orders(), Position(1, 0))
    store.forget_table("16400")
    store.forget_table("16400")
    assert store.tables() == []
    assert store.schema_at("16400") is None


def test_a_schema_holds_from_its_position_until_the_next(store: StateStore) -> None:
    store.put_schema(orders(1), Position(100, 0))
    store.put_schema(orders(2), Position(200, 5))
    store.put_schema(orders(2), Position(999, 0))
    assert store.schema_at("16400", Position(99, 0)) is None
    assert store.schema_at("16400", Position(200, 4)) == orders(1)
    assert store.schema_at("16400", Position(200, 5)) == orders(2)
    assert store.schema_at("16400") == orders(2)


def test_pruning_keeps_every_version_that_a_later_position_needs(store: StateStore) -> None:
    for version, commit in ((1, 100), (2, 200), (3, 300)):
        store.put_schema(orders(version), Position(commit, 0))
    assert store.prune_schemas(end_of(250)) == 1
    assert store.schema_at("16400", Position(250, 1)) == orders(2)
    assert store.prune_schemas(end_of(2**40)) == 1
    assert store.schema_at("16400") == orders(3)


def test_a_batch_counts_once_however_often_it_comes(store: StateStore) -> None:
    store.add_table("1", "public.a")
    at = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
    update = TableUpdate("1", changes_applied=7, position="ab", last_change_committed_at=at)
    batch = BatchRecord(3, {"lsn": 5, "copy": {}}, "ab", 7, 100, 0.5)
    assert store.apply_batch(batch, [update])
    assert not store.apply_batch(BatchRecord(3, {"copy": {}, "lsn": 5}), [update])
    table, last = store.table("1"), store.last_batch()
    assert table is not None
    assert last is not None
    assert (table.changes_applied, table.last_change_committed_at) == (7, at)
    assert table.last_applied_at is not None
    assert (last.id, last.offset, last.rows) == (3, {"lsn": 5, "copy": {}}, 7)


def test_an_old_batch_with_another_offset_is_refused(store: StateStore) -> None:
    store.apply_batch(BatchRecord(5, {"lsn": 5}))
    with pytest.raises(LostError, match="batch 5 comes again"):
        store.apply_batch(BatchRecord(5, {"lsn": 6}))
    with pytest.raises(LostError, match="batch 0 comes again"):
        store.apply_batch(BatchRecord(0, {"lsn": 1}))


def test_a_batch_with_one_bad_update_leaves_no_trace(store: StateStore) -> None:
    store.add_table("1", "public.a")
    with pytest.raises(TransitionError):
        store.apply_batch(BatchRecord(0, {}), [TableUpdate("1", changes_applied=1), TableUpdate("nobody")])
    table = store.table("1")
    assert table is not None
    assert table.changes_applied == 0
    assert store.last_batch() is None


def test_a_runner_that_was_replaced_can_write_no_more(store: StateStore, tmp_path: Path) -> None:
    store.claim_run()
    with StateStore.open(tmp_path, name="shop") as other:
        other.claim_run()
        with pytest.raises(OwnedError, match="run 2 of the pipeline has begun"):
            store.apply_batch(BatchRecord(0, {}))
        assert other.apply_batch(BatchRecord(0, {}))


def test_a_request_stays_open_until_it_is_done(store: StateStore) -> None:
    first = store.ask("resync", "public.orders")
    assert store.ask("resync", "public.orders") == first
    assert store.open_requests() == [first]
    store.finish_request(first.id)
    store.finish_request(first.id)
    assert store.open_requests() == []
    assert store.ask("resync", "public.orders").id != first.id


def test_the_source_status_is_the_last_one_said(store: StateStore) -> None:
    assert store.source_status() is None
    store.put_source_status(SourceStatus("backlog", "01", 10, "02", error="down"))
    store.put_source_status(SourceStatus("streaming", "03", 20, "04"))
    status = store.source_status()
    assert status is not None
    assert (status.gear, status.received, status.journal_bytes, status.error) == ("streaming", "03", 20, None)


def test_a_reader_sees_what_a_running_writer_has_committed(store: StateStore, tmp_path: Path) -> None:
    store.add_table("1", "public.a")
    with StateStore.open_reading(tmp_path) as reader:
        assert [table.name for table in reader.tables()] == ["public.a"]
        store.add_table("2", "public.b")
        assert [table.name for table in reader.tables()] == ["public.a", "public.b"]


def test_a_reader_cannot_write(store: StateStore, tmp_path: Path) -> None:
    with StateStore.open_reading(tmp_path) as reader, pytest.raises(Exception, match="readonly"):
        reader.add_table("1", "public.a")


def test_a_copy_of_the_bare_file_can_be_read_after_a_clean_end(tmp_path: Path) -> None:
    with StateStore.open(tmp_path / "live", name="shop") as store:
        store.add_table("1", "public.a")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(tmp_path / "live" / "state.db", elsewhere)
    elsewhere.chmod(0o555)
    try:
        with StateStore.open_reading(elsewhere) as reader:
            assert [table.name for table in reader.tables()] == ["public.a"]
    finally:
        elsewhere.chmod(0o755)


def test_reading_before_the_first_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has not run yet"):
        StateStore.open_reading(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_newer_format_is_refused_by_readers_and_writers(store: StateStore, tmp_path: Path) -> None:
    store.close()
    with sqlite3.connect(tmp_path / "state.db") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(ConfigError, match="has format 99, this tailrace reads up to 1"):
        StateStore.open(tmp_path, name="shop")
    with pytest.raises(ConfigError, match="has format 99"):
        StateStore.open_reading(tmp_path)


def test_a_file_that_is_no_database_is_called_damaged(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_bytes(b"not a database at all, but long enough to be taken for one" * 100)
    with pytest.raises(DamagedError, match="not a sound state file"):
        StateStore.open(tmp_path, name="shop")


def test_several_threads_share_one_store(store: StateStore) -> None:
    def add(worker: int) -> None:
        for index in range(10):
            store.add_table(f"{worker}-{index}", f"public.t{worker}_{index}")

    threads = [threading.Thread(target=add, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.tables()) == 40


_WRITER = """
import sys
from tailrace.state import BatchRecord, StateStore, TableUpdate
with StateStore.open(sys.argv[1], name="shop") as store:
    store.add_table("1", "public.a"), store.add_table("2", "public.b")
    for batch in range(1_000_000):
        updates = [TableUpdate("1", changes_applied=1), TableUpdate("2", changes_applied=1)]
        store.apply_batch(BatchRecord(batch, {"lsn": batch}, rows=2), updates)
        print(batch, flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_whole_batches(tmp_path: Path) -> None:
    for wanted in (0, 3, 17):
        folder = tmp_path / str(wanted)
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(folder)], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        assert writer.stdout is not None
        said = -1
        while said < wanted:
            said = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read().split()
        writer.stdout.close()
        writer.wait()
        said = int(rest[-1]) if rest else said
        with StateStore.open(folder, name="shop") as store:
            last = store.last_batch()
            assert last is not None
            # One batch more may be on disk than the writer could still say.
            assert last.id in (said, said + 1)
            assert [table.changes_applied for table in store.tables()] == [last.id + 1] * 2
