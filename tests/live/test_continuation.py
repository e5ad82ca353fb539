"""Pipelines that the first release left in the middle of their work go on, and end with what is right."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tailrace import Pipeline
from tailrace.source.follower import TableProgress
from tailrace.testing.endpoint import WebhookEndpoint
from tests.support.format_fixture import unpack
from tests.support.rqlite_following import free_port

pytestmark = pytest.mark.usefixtures("spark")

Rows = list[tuple[Any, ...]]


def progress(pipeline: Pipeline) -> dict[str, TableProgress]:
    """The progress of each table at the last offset that Spark has logged, whether it was committed or not."""
    offsets = Path(pipeline.config.state) / "checkpoint" / "offsets"
    last = max((entry for entry in offsets.glob("[0-9]*")), key=lambda entry: int(entry.name))
    offset = json.loads(last.read_text().splitlines()[-1])
    return {table.upstream_id: table for table in pipeline.source.progress(offset)}


def rows_in_file(file: Path, table: str) -> Rows:
    with closing(sqlite3.connect(file)) as connection:
        return sorted(connection.execute(f"SELECT * FROM {table}").fetchall())


def rows_in_lake(lake: Path, table: str, columns: list[str]) -> Rows:
    rows = DeltaTable(str(lake / table)).to_pyarrow_table(columns=columns).to_pylist()
    return sorted(tuple(row[name] for name in columns) for row in rows)


def batches(lake: Path, table: str) -> list[int]:
    """The batches in a table's history, in the order of its commits."""
    logs = sorted((lake / table / "_delta_log").glob("*.json"))
    actions = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    txns = [action["txn"] for action in actions if "txn" in action]
    return [txn["version"] for txn in txns if not txn["appId"].endswith("/end")]


def go_on(pipeline: Pipeline) -> None:
    """Run it to the source's end. Copies that were begun are not begun again, and none goes back."""
    before = progress(pipeline)
    pipeline.run(once=True)
    after = progress(pipeline)
    assert {name: table.copy for name, table in after.items()} == {name: table.copy for name, table in before.items()}
    assert {table.phase for table in after.values()} == {"ready"}
    assert all(table.position >= before[name].position for name, table in after.items())


COLUMNS = {"accounts": ["id", "name"], "items": ["id", "name", "price", "picture"], "words": ["w", "n"]}


def test_a_lake_whose_copy_is_held_back_gets_it_whole(tmp_path: Path) -> None:
    pipeline, lake = Pipeline.from_file(unpack("sqlite-delta", tmp_path)), tmp_path / "lake" / "main"
    before = {table: batches(lake, table) for table in COLUMNS}
    assert [table.phase for table in progress(pipeline).values()] == ["ready", "catchup", "copy"]
    assert len(list((lake / "items").rglob("copy-*.json"))) == 2
    go_on(pipeline)
    assert not list((lake / "items").rglob("copy-*.json"))
    for table, columns in COLUMNS.items():
        assert rows_in_lake(lake, table, columns) == rows_in_file(tmp_path / "app.db", table)
        done = batches(lake, table)
        assert done == sorted(set(done))
        assert done[: len(before[table])] == before[table]


@pytest.mark.parametrize("name", ["sqlite-sqlite", "turso-sqlite"])
def test_a_replica_with_a_copy_next_to_its_table_gets_it_whole(name: str, tmp_path: Path) -> None:
    pipeline, replica = Pipeline.from_file(unpack(name, tmp_path)), tmp_path / "replica.db"
    assert [table.phase for table in progress(pipeline).values()] == ["ready", "copy", "copy"]
    assert len(rows_in_file(replica, '"_tailrace copy of items"')) == 40
    go_on(pipeline)
    for table in COLUMNS:
        assert rows_in_file(replica, table) == rows_in_file(tmp_path / "app.db", table)
    assert rows_in_file(replica, "_tailrace_copy") == []


def test_a_half_copied_database_is_polled_on(tmp_path: Path) -> None:
    pipeline = Pipeline.from_file(unpack("poll-delta", tmp_path))
    assert [table.phase for table in progress(pipeline).values()] == ["ready", "copy"]
    go_on(pipeline)
    for table, columns in {"notes": ["id", "v", "version"], "orders": ["id", "v", "version", "deleted"]}.items():
        assert rows_in_lake(tmp_path / "lake" / "main", table, columns) == rows_in_file(tmp_path / "app.db", table)
        done = batches(tmp_path / "lake" / "main", table)
        assert done == sorted(set(done))


def test_a_slatedb_is_followed_on_from_where_its_log_was_read(tmp_path: Path) -> None:
    pipeline = Pipeline.from_file(unpack("slatedb-delta", tmp_path))
    go_on(pipeline)
    lake = tmp_path / "lake" / "slatedb"
    values = {b"k%02d" % number: b"value %d" % number for number in range(30) if number != 3}
    values |= {b"k01": b"changed", b"k02": b"changed later"}
    assert rows_in_lake(lake, "db1", ["key", "value"]) == sorted(values.items())
    assert rows_in_lake(lake, "counter", ["key", "value"]) == [("one", 12)]
    users = [(number, f"user {number}", number) for number in range(30)]
    found = [(int(key), name, age) for key, name, age in rows_in_lake(lake, "user", ["id", "name", "age"])]
    assert found == [*users, (100, "late", 1)]


def test_a_half_sent_queue_is_sent_to_its_end_and_then_what_the_journal_holds(tmp_path: Path) -> None:
    def indexes(bodies: list[bytes]) -> list[int]:
        return [entry["index"] for body in bodies for entry in json.loads(body)["payload"]]

    with WebhookEndpoint(ids=lambda body: []) as endpoint:
        file = unpack(
            "rqlite-webhook",
            tmp_path,
            source={"listen": f"127.0.0.1:{free_port()}"},
            destination={"url": endpoint.url},
        )
        taken = [body.encode() for body in json.loads((tmp_path / "taken.json").read_text())]
        assert indexes(taken) == [10, 11, 12, 13, 14, 20, 21]
        go_on(Pipeline.from_file(file))
        assert indexes([request.body for request in endpoint.taken]) == [22, 23, 24, 30, 31, 32]
