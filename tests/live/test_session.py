"""A pipeline in a Spark session that has something else to do, too."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tailrace.state import StateStore
from tailrace.status import Status
from tailrace.stream.pipeline import Pipeline
from tailrace.testing.runner import all_ready
from tailrace.testing.wait import wait_until
from tests.source.sqlite.writer import Application


@pytest.mark.timeout(300)
def test_a_pipeline_takes_no_batch_of_another_query_in_the_session_for_its_own(
    spark: SparkSession, tmp_path: Path
) -> None:
    application = Application(tmp_path / "here.db", "trigger")
    application.run("CREATE TABLE lines (id INTEGER PRIMARY KEY, words TEXT)")
    application.capture()
    application.run("INSERT INTO lines VALUES (1, 'to be'), (2, 'or not to be')")
    pipeline = Pipeline(
        name="beside",
        source={"type": "sqlite", "path": str(tmp_path / "here.db")},
        destination={"type": "sqlite", "path": str(tmp_path / "there.db")},
        state=str(tmp_path / "state"),
        batch={"interval": "100ms"},
    )
    stream = spark.readStream.format("rate").load().writeStream.format("noop")
    stream = stream.option("checkpointLocation", str(tmp_path / "other")).trigger(processingTime="100 milliseconds")
    other = stream.start()

    def reported() -> int:
        """The last batch of the other query that Spark has told of."""
        return other.lastProgress["batchId"] if other.lastProgress else -1

    seen: list[int] = []

    def watch(status: Status) -> None:
        seen.append(reported())
        if all_ready(status) and seen[-1] >= seen[0] + 2:
            pipeline.drain()

    try:
        wait_until(lambda: reported() > 0, 60)
        pipeline.run(on_progress=watch)
    finally:
        other.stop()
        application.close()
    with StateStore.open_reading(tmp_path / "state") as store:
        last = store.last_batch()
        assert last is not None
        assert [table.phase for table in pipeline.source.progress(dict(last.offset))] == ["ready"]
        assert [(table.name, table.rows_copied) for table in store.tables()] == [("main.lines", 2)]
