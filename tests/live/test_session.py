"""A pipeline in a Spark session that has something else to do, too."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tailrace.state import SqliteStore
from tailrace.state.status import PipelineStatus
from tailrace.stream.pipeline import Pipeline
from tailrace.testing.wait import wait_until
from tests.support.runner import all_ready
from tests.support.sqlite_application import Application


@pytest.fixture
def application(tmp_path: Path) -> Iterator[Application]:
    application = Application(tmp_path / "here.db", "trigger")
    application.run("CREATE TABLE lines (id INTEGER PRIMARY KEY, words TEXT)")
    application.capture()
    application.run("INSERT INTO lines VALUES (1, 'to be'), (2, 'or not to be')")
    yield application
    application.close()


@pytest.fixture
def pipeline(application: Application, tmp_path: Path) -> Pipeline:
    return Pipeline(
        name="guest",
        source={"type": "sqlite", "path": str(application.path)},
        destination={"type": "sqlite", "path": str(tmp_path / "there.db")},
        state=str(tmp_path / "state"),
        batch={"interval": "100ms"},
    )


def test_a_pipeline_takes_no_batch_of_another_query_in_the_session_for_its_own(
    spark: SparkSession, pipeline: Pipeline, tmp_path: Path
) -> None:
    stream = spark.readStream.format("rate").load().writeStream.format("noop")
    stream = stream.option("checkpointLocation", str(tmp_path / "other")).trigger(processingTime="100 milliseconds")
    other = stream.start()

    def reported() -> int:
        """The last batch of the other query that Spark has reported."""
        return other.lastProgress["batchId"] if other.lastProgress else -1

    seen: list[int] = []

    def watch(status: PipelineStatus) -> None:
        seen.append(reported())
        if all_ready(status) and seen[-1] >= seen[0] + 2:
            pipeline.drain()

    try:
        wait_until(lambda: reported() > 0)
        pipeline.run(on_progress=watch)
    finally:
        other.stop()
    with SqliteStore("shop", tmp_path / "state").open_reading() as store:
        last = store.last_batch()
        assert last is not None
        assert [table.phase for table in pipeline.source.progress(dict(last.offset))] == ["ready"]
        assert [(table.name, table.rows_copied) for table in store.tables()] == [("main.lines", 2)]


def test_a_pipeline_leaves_the_settings_of_a_session_that_was_there_before_it(
    spark: SparkSession, pipeline: Pipeline
) -> None:
    mine = {
        "spark.sql.session.timeZone": "America/New_York",
        "spark.sql.adaptive.enabled": "true",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    }
    before = {name: spark.conf.get(name) for name in mine}
    default = SparkSession.builder.getOrCreate()
    try:
        for name, value in mine.items():
            spark.conf.set(name, value)
        pipeline.run(once=True)
        assert {name: spark.conf.get(name) for name in mine} == mine
        assert SparkSession.builder.getOrCreate() is default
    finally:
        for name, was in before.items():
            spark.conf.set(name, str(was))


def test_a_pipeline_that_was_drained_can_be_run_again(
    spark: SparkSession, pipeline: Pipeline, application: Application, tmp_path: Path
) -> None:
    pipeline.run(on_progress=lambda status: pipeline.drain() if all_ready(status) else None)
    application.run("INSERT INTO lines VALUES (3, 'that is the question')")
    pipeline.run(once=True)
    with closing(sqlite3.connect(tmp_path / "there.db")) as there:
        assert there.execute("SELECT count(*) FROM lines").fetchone() == (3,)


def test_a_batch_that_was_planned_when_the_pipeline_is_drained_is_done(
    spark: SparkSession, pipeline: Pipeline, tmp_path: Path
) -> None:
    log = tmp_path / "state" / "checkpoint"

    def drain() -> None:
        wait_until((log / "offsets" / "0").exists)
        pipeline.drain()

    drainer = threading.Thread(target=drain)
    drainer.start()
    pipeline.run()
    drainer.join()
    assert (log / "commits" / "0").exists()


def test_workers_begin_with_what_tasks_import(spark: SparkSession) -> None:
    def parents_libraries(_: int) -> str:
        return Path(f"/proc/{os.getppid()}/maps").read_text()

    [maps] = spark.sparkContext.parallelize([0], 1).map(parents_libraries).collect()
    assert "libarrow" in maps  # PySpark's own daemon has not loaded it
