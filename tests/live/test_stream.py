"""`spark.readStream.format("tailrace")`: changes for people who write their own Spark jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

import pyspark
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tailrace.testing.wait import wait_until
from tests.support.scenario import Scenario

TABLES = [
    "CREATE TABLE orders"
    " (id int PRIMARY KEY, total numeric(10, 2), note text, tags text[], placed timestamptz, body text)",
    "ALTER TABLE orders ALTER body SET STORAGE EXTERNAL",
    "CREATE TABLE events (kind text, at date)",
    "INSERT INTO orders SELECT i, i * 1.5, 'note ' || i, ARRAY['a', NULL], '2026-11-15 12:00:00+00',"
    " repeat(md5(i::text), 200) FROM generate_series(1, 5) i",
    "INSERT INTO events VALUES ('visit', '2026-11-15')",
]
CHANGES = [
    "UPDATE orders SET note = 'quo\"te ☃' WHERE id = 1",
    "DELETE FROM orders WHERE id = 2",
    "UPDATE orders SET id = 30 WHERE id = 3",
    "INSERT INTO events VALUES ('search', 'infinity')",
]


def test_workers_load_modules_of_spark_that_are_compiled_already(spark: SparkSession) -> None:
    loaded = spark.range(1).rdd.map(lambda _: str(__import__("pyspark").__file__)).first()
    assert loaded == pyspark.__file__


@contextmanager
def collecting(stream: DataFrame, checkpoint: str, *, once: bool = False) -> Iterator[tuple[StreamingQuery, list[Row]]]:
    """The rows of a stream as they arrive, in order."""
    rows: list[Row] = []
    writer = stream.writeStream.foreachBatch(lambda batch, _: rows.extend(batch.collect()))
    writer = writer.option("checkpointLocation", checkpoint)
    query = (writer.trigger(availableNow=True) if once else writer.trigger(processingTime="0 seconds")).start()
    try:
        yield query, rows
    finally:
        query.stop()


def test_one_table_is_a_stream_of_typed_columns_that_goes_on_from_its_checkpoint(
    spark: SparkSession, scenario: Scenario
) -> None:
    scenario.sql(*TABLES)
    stream = (
        spark.readStream.format("tailrace").option("config", str(scenario.file)).option("table", "public.orders").load()
    )
    assert dict(stream.dtypes)["total"] == "decimal(10,2)"
    assert dict(stream.dtypes)["tags"] == "array<string>"
    assert dict(stream.dtypes)["_tailrace_op"] == "string"
    checkpoint = str(scenario.folder / "typed")

    with collecting(stream, checkpoint, once=True) as (query, rows):
        assert query.awaitTermination(120)
        assert query.exception() is None
    assert sorted(row["id"] for row in rows) == [1, 2, 3, 4, 5]
    assert {row["_tailrace_op"] for row in rows} == {"read"}
    assert {row["id"]: row["total"] for row in rows}[3] == Decimal("4.50")

    scenario.sql(*CHANGES)
    with collecting(stream, checkpoint, once=True) as (query, rows):
        assert query.awaitTermination(120)
        assert query.exception() is None
    ordered = sorted(rows, key=lambda row: row["_tailrace_position"])
    assert [(row["_tailrace_op"], row["id"]) for row in ordered] == [
        ("update", 1),
        ("delete", 2),
        ("delete", 3),
        ("insert", 30),
    ]
    assert ordered[0]["note"] == 'quo"te ☃'
    assert ordered[0]["_tailrace_unchanged"] == ["body"]
    assert ordered[0]["_tailrace_committed_at"] is not None


def test_every_change_comes_as_json(spark: SparkSession, scenario: Scenario) -> None:
    scenario.sql(*TABLES)
    stream = spark.readStream.format("tailrace").option("config", str(scenario.file)).load()
    with collecting(stream, str(scenario.folder / "every")) as (query, rows):
        wait_until(lambda: _seen(query, rows, 6))
        scenario.sql(*CHANGES, "TRUNCATE events")
        wait_until(lambda: _seen(query, rows, 12))

    copied, changed = rows[:6], sorted(rows[6:], key=lambda row: row["position"])
    assert {row["op"] for row in copied} == {"read"}
    first = next(json.loads(row["after"]) for row in copied if row["table"] == "public.orders")
    assert set(first) == {"id", "total", "note", "tags", "placed", "body"}
    assert [(row["table"], row["op"]) for row in changed] == [
        ("public.orders", "update"),
        ("public.orders", "delete"),
        ("public.orders", "delete"),
        ("public.orders", "insert"),
        ("public.events", "insert"),
        ("public.events", "truncate"),
    ]
    update, delete, old, new, event, truncate = changed
    assert json.loads(update["key"]) == {"id": 1}
    assert _without(json.loads(update["after"]), "placed") == {
        "id": 1,
        "total": 1.5,
        "note": 'quo"te ☃',
        "tags": ["a", None],
    }
    assert (json.loads(delete["key"]), delete["after"]) == ({"id": 2}, None)
    assert (json.loads(old["key"]), json.loads(new["key"])) == ({"id": 3}, {"id": 30})
    assert event["key"] is None
    assert json.loads(event["after"])["kind"] == "search"
    assert (truncate["key"], truncate["before"], truncate["after"]) == (None, None, None)


def test_a_stream_next_to_a_running_pipeline_takes_nothing_from_it(spark: SparkSession, scenario: Scenario) -> None:
    scenario.sql(*TABLES)
    with scenario.run() as run:
        scenario.catch_up(run)
        stream = (
            spark.readStream.format("tailrace")
            .option("config", str(scenario.file))
            .option("table", "public.orders")
            .load()
        )
        with collecting(stream, str(scenario.folder / "stream")) as (query, rows):
            wait_until(lambda: _seen(query, rows, 5))
            scenario.sql(*CHANGES)
            scenario.catch_up(run)
            wait_until(lambda: _seen(query, rows, 9))
        scenario.sql("INSERT INTO orders (id) VALUES (100)")
        scenario.catch_up(run)
        assert scenario.differences() == []
        assert scenario.doubled() == []


def test_a_stream_of_one_table_that_comes_first_leaves_the_others_to_be_read(
    spark: SparkSession, scenario: Scenario
) -> None:
    scenario.sql(*TABLES)
    every = spark.readStream.format("tailrace").option("config", str(scenario.file)).load()
    orders = (
        spark.readStream.format("tailrace").option("config", str(scenario.file)).option("table", "public.orders").load()
    )
    for stream, checkpoint in ((orders, "orders"), (every, "every")):
        with collecting(stream, str(scenario.folder / checkpoint), once=True) as (query, rows):
            assert query.awaitTermination(120)
            assert query.exception() is None
    assert {row["table"] for row in rows} == {"public.orders", "public.events"}


def _seen(query: StreamingQuery, rows: list[Row], count: int) -> bool:
    assert query.isActive, query.exception()
    return len(rows) >= count


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}
