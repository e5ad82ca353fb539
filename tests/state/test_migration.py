"""State files of older formats go on working."""

from __future__ import annotations

import gzip
import sqlite3
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from tailrace.model.change import START, Position
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.state import SqliteStore, StateStore, TableState
from tailrace.testing.standing import all_versions

AT = datetime(2025, 6, 7, 8, 9, 10, tzinfo=UTC)


def orders(*extra: str) -> TableSchema:
    columns = tuple(Column(name, pa.int64()) for name in ("id", *extra))
    return TableSchema(TableName("public", "orders"), columns, ("id",), 1 + len(extra), "16400")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a state file as the first format kept it, in use."""
    packed = Path(__file__).parents[1] / "fixtures" / "format-0.1" / "state-1.db.gz"
    (tmp_path / "state.db").write_bytes(gzip.decompress(packed.read_bytes()))
    return tmp_path


def check(store: StateStore) -> None:
    pipeline, batch, status = store.pipeline(), store.last_batch(), store.source_status()
    assert (pipeline.name, pipeline.epoch, pipeline.run, pipeline.created_at) == ("shop", "an-epoch", 7, AT)
    items, mine = store.tables()
    assert (mine.state, mine.rows_copied, mine.chunks_total, mine.changes_applied) == (
        TableState.FINISHED_COPY,
        5,
        2,
        3,
    )
    assert (mine.position, mine.last_applied_at, mine.attempts, mine.version) == (str(Position(9, 1)), AT, 0, 3)
    assert (items.state, items.reason, items.retry, items.failed_in) == (
        TableState.ERRORED,
        "why",
        "timed",
        TableState.FINISHED_COPY,
    )
    assert all_versions(store, "16400") == [(START, orders("a")), (Position(5, 0), orders("a", "b"))]
    assert batch is not None
    assert (batch.id, batch.offset, batch.seconds) == (4, {"lsn": 1}, 0.5)
    assert status is not None
    assert (status.gear, status.at) == ("streaming", AT)
    assert [(request.id, request.kind, request.table) for request in store.open_requests()] == [
        (3, "resync", "public.items")
    ]


def test_a_file_of_the_first_format_is_upgraded_when_it_is_opened_for_writing(folder: Path) -> None:
    for _ in range(2):
        with SqliteStore("shop", folder).open() as store:
            check(store)
    with SqliteStore("shop", folder).open() as store:
        assert store.claim_run() == 8
        assert store.ask("pause", "public.items").id > 3
        store.recover_table("16401")
        assert store.put_dead_letter("16400", "public.orders", "0", kind="a", reason="b").tries == 1


def test_a_reader_sees_an_old_file_as_a_new_one_and_leaves_it_as_it_is(folder: Path) -> None:
    with SqliteStore("shop", folder).open_reading() as reader:
        check(reader)
    with sqlite3.connect(folder / "state.db") as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    connection.close()


def test_an_upgrade_that_cannot_be_finished_leaves_the_old_file(folder: Path) -> None:
    with sqlite3.connect(folder / "state.db") as connection:
        connection.execute("DROP TABLE source_status")
    connection.close()
    with pytest.raises(Exception, match="no such table"):
        SqliteStore("shop", folder).open()
    with sqlite3.connect(folder / "state.db") as connection:
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    connection.close()
    assert tables >= {"pipeline", "table_state", "request"}
    assert not {name for name in tables if name.startswith("old_")}


def test_a_file_of_the_second_format_gets_the_tables_it_lacks_and_keeps_the_rest(tmp_path: Path) -> None:
    with SqliteStore("shop", tmp_path).open() as store:
        store.claim_run()
    with sqlite3.connect(tmp_path / "state.db") as connection:
        added = ("sender_lease", "sender_watermark", "sender_queue", "applied_batch", "held_batch", "report")
        for table in (*added, "planned_batch", "activity", "batch_detail", "sample"):
            connection.execute(f"DROP TABLE {table}")
        connection.execute("PRAGMA user_version = 2")
    connection.close()
    with SqliteStore("shop", tmp_path).open_reading() as reader:
        assert reader.pipeline().run == 1
    with SqliteStore("shop", tmp_path).open() as store:
        assert store.claim_run() == 2
        store.forget_pipeline()
