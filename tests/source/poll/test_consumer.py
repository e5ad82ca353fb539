"""Polling without Spark, and the stores of its watermarks."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tailrace.errors import DamagedError, TableError
from tailrace.option.table import TableOptions
from tailrace.source.poll.consumer import FileWatermarks, MemoryWatermarks, PollConsumer, WatermarkStore
from tailrace.source.poll.source import PollSource
from tests.support.source_making import make_polled, with_options


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


def take(consumer: PollConsumer) -> list[int]:
    return [row["id"] for changes in consumer.poll() for row in changes.row.to_pylist()]


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> WatermarkStore:
    return MemoryWatermarks() if request.param == "memory" else FileWatermarks(tmp_path / "shop.watermark")


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
        run("ALTER TABLE away RENAME TO t", insert(2))
        assert take(consumer) == [1, 2]
        consumer.commit()


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
