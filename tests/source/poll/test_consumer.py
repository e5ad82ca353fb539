"""Polling without Spark, and the stores of its watermarks."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tailrace.errors import DamagedError, TableError, UnavailableError
from tailrace.model.change import Op
from tailrace.option.table import TableOptions
from tailrace.source.poll.consumer import PollConsumer
from tailrace.source.poll.source import PollSource
from tailrace.source.poll.watermark import FileWatermarks, MemoryWatermarks, RocksDbWatermarks, WatermarkStore
from tailrace.testing.wait import wait_until
from tests.support.source_making import make_polled, with_options, with_tables


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., None]:
    def run(*statements: str) -> None:
        with closing(sqlite3.connect(tmp_path / "app.db", isolation_level=None)) as app:
            for statement in statements:
                app.execute(statement)

    run("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT, updated_at TEXT)")
    return run


@pytest.fixture
def source(tmp_path: Path, run: Callable[..., None]) -> PollSource:
    tables = TableOptions.model_validate({"defaults": {"updated_at": "updated_at"}})
    made = make_polled(f"sqlite:///{tmp_path}/app.db", tmp_path, tables, interval=1e-6, idle_interval=1e-6)
    return replace(made, context=replace(made.context, name="shop"))


OLD, NOW = "'2001-01-01 00:00:00'", "CURRENT_TIMESTAMP"


def insert(*keys: int, moment: str = OLD) -> str:
    return "INSERT INTO t VALUES " + ", ".join(f"({key}, 'v', {moment})" for key in keys)


def take(consumer: PollConsumer) -> list[Any]:
    return [row["id"] for changes in consumer.poll() for row in changes.row.to_pylist()]


@pytest.fixture(params=["memory", "file", "rocksdb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WatermarkStore]:
    match request.param:
        case "memory":
            yield MemoryWatermarks()
        case "file":
            yield FileWatermarks(tmp_path / "shop.watermark")
        case _:
            with RocksDbWatermarks(tmp_path / "watermarks") as opened:
                yield opened


def test_the_watermark_moves_only_after_the_changes_before_it_were_applied(
    source: PollSource, store: WatermarkStore, run: Callable[..., None]
) -> None:
    run(insert(1, 2))
    with PollConsumer(source, store) as consumer:
        assert take(consumer) == [1, 2]
        assert take(consumer) == [1, 2]
        assert store.load("shop") is None
        consumer.commit()
        assert take(consumer) == []
        consumer.commit()
        run(insert(3, moment=NOW))
        assert take(consumer) == [3]
    # It ended before it could commit.
    with PollConsumer(source, store) as consumer:
        assert take(consumer) == [3]
        consumer.commit()
    with PollConsumer(source, store) as consumer:
        assert take(consumer) == []


def test_without_a_stored_watermark_everything_is_copied(source: PollSource, run: Callable[..., None]) -> None:
    run(insert(1))
    for _ in range(2):
        with PollConsumer(source, MemoryWatermarks()) as consumer:
            assert take(consumer) == [1]
            consumer.commit()


def test_what_was_not_taken_cannot_be_committed(source: PollSource, run: Callable[..., None]) -> None:
    run(insert(1, 2, 3))
    store = MemoryWatermarks()
    with PollConsumer(with_options(source, page_rows=1), store) as consumer:
        next(consumer.poll())
        with pytest.raises(RuntimeError, match="not read to its end"):
            consumer.commit()
        assert store.load("shop") is None
        assert take(consumer) == [1, 2, 3]
        consumer.commit()
        assert take(consumer) == []


def test_the_tables_are_read_again_from_the_catalog_after_an_error(
    source: PollSource, run: Callable[..., None]
) -> None:
    run(insert(1))
    with PollConsumer(source, MemoryWatermarks()) as consumer:
        assert take(consumer) == [1]
        run("ALTER TABLE t RENAME TO away")
        with pytest.raises(TableError, match="no longer there"):
            take(consumer)
        consumer.commit()
        assert list(consumer.failed) == ["main.t"]
        run("ALTER TABLE away RENAME TO t", insert(2))
        consumer.retry()
        assert take(consumer) == [1, 2]
        consumer.commit()
        assert not consumer.failed


@pytest.mark.parametrize("what", ["torn", "flipped", "foreign"])
def test_a_watermark_that_is_damaged_or_foreign_stops_or_is_rewound(
    what: str, source: PollSource, tmp_path: Path, run: Callable[..., None]
) -> None:
    run(insert(1, 2))
    store = FileWatermarks(tmp_path / "shop.watermark")
    with PollConsumer(source, store) as consumer:
        assert take(consumer) == [1, 2]
        consumer.commit()
    text = store.path.read_text()
    if what == "foreign":
        source = replace(source, context=replace(source.context, name="other"))
    else:
        store.path.write_text(text[:-20] if what == "torn" else text.replace("ready", "reedy"))
    with pytest.raises(DamagedError, match="stored watermark") as caught, PollConsumer(source, store):
        pass
    assert "permissive" in (caught.value.fix or "")
    with PollConsumer(with_options(source, on_bad_watermark="permissive"), store) as consumer:
        assert take(consumer) == [1, 2]
        consumer.commit()
    with PollConsumer(source, store) as consumer:
        assert take(consumer) == []


def take_all(consumer: PollConsumer, held: dict[int, str]) -> list[Op]:
    """Apply what `poll` gives to the rows that are held, by key, and commit. Returns the operations."""
    found: list[Op] = []
    for changes in consumer.poll():
        for one in changes.batch.to_pylist():
            found.append(Op(one["op"]))
            if found[-1] is Op.DELETE:
                held.pop(one["row"]["id"], None)
            else:
                held[one["row"]["id"]] = one["row"]["v"]
    consumer.commit()
    return found


def diffing(source: PollSource, every_cycles: int) -> PollSource:
    deletes = {"full_diff": {"every_cycles": every_cycles}}
    return with_tables(
        source, TableOptions.model_validate({"defaults": {"updated_at": "updated_at", "deletes": deletes}})
    )


def touch(run: Callable[..., None], value: str) -> None:
    run(f"UPDATE t SET v = '{value}', updated_at = {NOW} WHERE id = 1")


def test_notes_from_before_the_watermark_was_lost_hide_no_delete(source: PollSource, run: Callable[..., None]) -> None:
    run("CREATE TABLE u (id INTEGER PRIMARY KEY, v TEXT, updated_at TEXT)", insert(1))
    held: dict[int, str] = {}
    with PollConsumer(diffing(source, 1), MemoryWatermarks()) as consumer:
        take_all(consumer, held)
        # Row 9 comes with a poll, and a diff notes in the third step that it is gone.
        run(insert(9, moment=NOW))
        take_all(consumer, held)
        run("DELETE FROM t WHERE id = 9")
        assert take_all(consumer, held) == [Op.DELETE]
    # The watermark ended with its process, the files in the state folder did not.
    held.clear()
    with PollConsumer(diffing(source, 2), MemoryWatermarks()) as consumer:
        take_all(consumer, held)
        run(insert(9, moment=NOW))
        take_all(consumer, held)
        run(f"INSERT INTO u VALUES (50, 'v', {NOW})")
        take_all(consumer, held)
        assert sorted(held) == [1, 9, 50]
        run("DELETE FROM t WHERE id = 9")
        take_all(consumer, held)
    assert sorted(held) == [1, 50]


def test_steps_go_on_counting_when_the_watermark_is_lost_or_older_than_the_files(
    source: PollSource, run: Callable[..., None], tmp_path: Path
) -> None:
    store = FileWatermarks(tmp_path / "shop.watermark")
    run(insert(1))
    steps: list[int] = []

    def positions(consumer: PollConsumer) -> None:
        for changes in consumer.poll():
            steps.extend(one["commit"] for one in changes.batch.to_pylist())
        consumer.commit()

    with PollConsumer(source, store) as consumer:
        positions(consumer)
        old = store.path.read_bytes()
        for key in (2, 3):
            run(insert(key, moment=NOW))
            positions(consumer)
    store.path.write_bytes(old)
    run(insert(4, moment=NOW))
    with PollConsumer(source, store) as consumer:
        positions(consumer)
    store.path.unlink()
    with PollConsumer(source, store) as consumer:
        positions(consumer)
    assert steps == sorted(steps)
    assert steps[-1] > steps[-5] > steps[2]


def test_a_delete_that_was_given_but_not_applied_is_given_again(source: PollSource, run: Callable[..., None]) -> None:
    run("ALTER TABLE t ADD COLUMN gone TEXT", "INSERT INTO t VALUES (1, 'v', NULL, NULL), (2, 'v', NULL, NULL)")
    source = with_tables(
        source,
        TableOptions.model_validate(
            {
                "defaults": {
                    "updated_at": "updated_at",
                    "deletes": {"soft": "gone", "full_diff": {"every_cycles": 3}},
                }
            }
        ),
    )
    store, held = MemoryWatermarks(), dict[int, str]()
    with PollConsumer(source, store) as consumer:
        take_all(consumer, held)
        run(f"UPDATE t SET gone = {NOW}, updated_at = {NOW} WHERE id = 2")
        assert [op for changes in consumer.poll() for op in changes.batch.column("op").to_pylist()] == [Op.DELETE]
    # It ended before it applied the delete, and now the row is really gone.
    run("DELETE FROM t WHERE id = 2")
    with PollConsumer(source, store) as consumer:
        for number in range(6):
            touch(run, f"{number}")
            take_all(consumer, held)
    assert sorted(held) == [1]


def test_a_table_in_error_does_not_hold_up_the_others(source: PollSource, run: Callable[..., None]) -> None:
    run("CREATE TABLE u (id INTEGER PRIMARY KEY, v TEXT, updated_at TEXT)", insert(1))
    store = MemoryWatermarks()
    with PollConsumer(source, store) as consumer:
        assert take(consumer) == [1]
        consumer.commit()
        run("INSERT INTO u VALUES (5, 'v', 'yesterday')", insert(2, moment=NOW))
        given: list[int] = []

        def polled() -> bool:
            try:
                given.extend(take(consumer))
                consumer.commit()
            except TableError:
                assert list(consumer.failed) == ["main.u"]
            return 2 in given

        wait_until(polled)
        wait_until(lambda: bool(polled() and consumer.failed))
        run(insert(3, moment=NOW))
        wait_until(lambda: polled() and 3 in given)
        assert given.count(2) == 1
        run(f"UPDATE u SET updated_at = {NOW}")
        consumer.retry()
        wait_until(lambda: polled() and 5 in given)
        assert not consumer.failed
    # A table in error does not prevent a start either.
    run("UPDATE u SET updated_at = 'tomorrow'", insert(4, moment=NOW))
    with PollConsumer(source, store) as consumer:
        wait_until(lambda: polled() and 4 in given)


def test_waiting_ends_with_a_change_or_with_the_timeout(source: PollSource, run: Callable[..., None]) -> None:
    run(insert(1))
    with PollConsumer(with_options(source, interval=0.01, idle_interval=0.02), MemoryWatermarks()) as consumer:
        assert consumer.wait()
        assert take(consumer) == [1]
        consumer.commit()
        assert not consumer.wait(timeout_seconds=0.1)
        later = threading.Timer(0.2, run, [insert(2, moment=NOW)])
        later.start()
        assert consumer.wait()
        later.join()
        assert take(consumer) == [2]


def test_times_of_two_types_make_every_change_an_update(source: PollSource, run: Callable[..., None]) -> None:
    run("ALTER TABLE t ADD COLUMN created_at INTEGER", f"INSERT INTO t VALUES (1, 'v', {OLD}, 978307200)")
    tables = TableOptions.model_validate({"defaults": {"updated_at": "updated_at", "created_at": "created_at"}})
    source = with_tables(source, tables)
    assert any("cannot be compared" in finding.message for finding in source.check())
    held: dict[int, str] = {}
    with PollConsumer(source, MemoryWatermarks()) as consumer:
        assert take_all(consumer, held) == [Op.READ]
        run(f"INSERT INTO t VALUES (2, 'v', {NOW}, 5)")
        assert take_all(consumer, held) == [Op.UPDATE]


def test_a_null_in_a_key_stops_its_table_with_the_rows_to_fix(source: PollSource, run: Callable[..., None]) -> None:
    run("DROP TABLE t", "CREATE TABLE t (id TEXT PRIMARY KEY, v TEXT, updated_at TEXT)", insert(1, 2))
    source = with_options(source, page_rows=1, chunk_rows=1)
    with PollConsumer(source, MemoryWatermarks()) as consumer:
        while take(consumer):
            consumer.commit()
        run(f"INSERT INTO t VALUES (NULL, 'v', {NOW}), (NULL, 'w', {NOW})")
        [finding] = [finding for finding in source.check() if finding.level == "error"]
        assert "2 rows have a null in their key" in finding.message
        assert "id IS NULL" in (finding.fix or "")
        with pytest.raises(TableError, match="key column id is null"):
            take(consumer)
        run(f"UPDATE t SET id = v, updated_at = {NOW} WHERE id IS NULL")
        consumer.retry()
        given = take(consumer)
        consumer.commit()
        assert [*given, *take(consumer)] == ["v", "w"]


def test_all_processes_together_keep_to_the_limit_on_queries(source: PollSource) -> None:
    source = with_options(source, max_queries_per_second=12.0, parallel=3)
    [planner, *tasks] = [source.connector().options.queries_per_second or 0.0 for _ in range(1 + source.parallel)]
    assert planner + sum(tasks) == 12.0
    alone = PollConsumer(source, MemoryWatermarks())._source
    assert alone.connector().options.queries_per_second == 12.0


def test_watermarks_in_rocksdb_survive_their_process_and_tell_damage_from_a_lock(tmp_path: Path) -> None:
    folder = tmp_path / "watermarks"
    with RocksDbWatermarks(folder) as store:
        store.save("shop", {"step": 3, "tables": {}})
        store.save("stock", {"step": 4, "tables": {}})
        with pytest.raises(UnavailableError, match="cannot be opened"):
            RocksDbWatermarks(folder).load("shop")
    with RocksDbWatermarks(folder) as store:
        assert store.load("shop") == {"step": 3, "tables": {}}
        assert store.load("stock") == {"step": 4, "tables": {}}
        assert store.load("other") is None
    for file in [*folder.glob("*.sst"), *folder.glob("MANIFEST-*")]:
        content = bytearray(file.read_bytes())
        content[len(content) // 3] ^= 0xFF
        file.write_bytes(content)
    with RocksDbWatermarks(folder) as store, pytest.raises(DamagedError, match="cannot be read"):
        store.load("shop")
