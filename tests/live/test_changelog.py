"""A changelog is written by a pipeline that is killed, and another pipeline fills a lake from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import yaml

from tailrace.changelog.entry import ChangelogLog
from tailrace.changelog.folder import open_folder
from tests.support.database import PostgresDatabase
from tests.support.invocation import apply
from tests.support.runner import RunningPipeline
from tests.support.scenario import Scenario


def changes(path: Path, table: str) -> list[tuple[str, int, str | None]]:
    log = ChangelogLog(open_folder(str(path), {}))
    rows = [
        row
        for number in range(1, log.last() + 1)
        for file in log.entry(number).files
        if file.table == table
        for row in pq.ParquetFile(path / file.path).read().to_pylist()
    ]
    rows.sort(key=lambda row: row["_tailrace_position"])
    return [(row["_tailrace_op"], row["id"], row["a"]) for row in rows]


def test_a_killed_run_leaves_every_change_once_and_a_lake_is_filled_without_the_database(
    database: PostgresDatabase, make_scenario: Callable[..., Scenario]
) -> None:
    scenario = make_scenario(database.dsn, destination={"type": "parquet", "path": "changes"})
    scenario.sql(
        "CREATE TABLE items (id int PRIMARY KEY, a text)", "INSERT INTO items VALUES (1, 'copied'), (2, 'too')"
    )
    assert scenario.run_once(failpoints="parquet.committed:kill") != 0
    scenario.apply()
    scenario.sql("UPDATE items SET a = 'once' WHERE id = 1", "UPDATE items SET id = 3 WHERE id = 2")
    for failpoint in ("parquet.before_commit:kill", "parquet.committed:kill"):
        assert scenario.run_once(failpoints=failpoint) != 0
    scenario.apply()
    assert changes(scenario.folder / "changes", "public.items") == [
        ("read", 1, "copied"),
        ("read", 2, "too"),
        ("update", 1, "once"),
        ("delete", 2, None),
        ("insert", 3, "too"),
    ]
    sections = {
        "name": "from-tape",
        "source": {"type": "tape", "path": "changes"},
        "destination": {"type": "delta", "path": str(scenario.lake)},
        "state": str(scenario.folder / "tape-state"),
        "spark": {"master": "local[2]"},
    }
    file = scenario.folder / "tape.yaml"
    file.write_text(yaml.safe_dump(sections))
    with RunningPipeline(file, once=True, failpoints="delta.committed:kill") as run:
        assert run.wait() != 0
    apply(file)
    assert scenario.differences(without=["public.fence"]) == []
