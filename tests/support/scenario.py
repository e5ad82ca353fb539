"""A database, a pipeline's file and a lake in one folder: what an end-to-end test starts from."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import psycopg
import yaml

from tailrace.config.pipeline import load_all
from tailrace.config.registry import open_source
from tailrace.demo.compare import Difference, compare
from tailrace.destination.delta.place import place_of
from tailrace.model.schema import TableName, TableSchema
from tailrace.source.postgres.offset import parse_lsn
from tailrace.state.status import PipelineStatus
from tailrace.testing.wait import PATIENCE_SECONDS
from tests.support.invocation import apply, invoke
from tests.support.runner import RunningPipeline, all_ready


class Scenario:
    """A pipeline from every table of a database to a lake in `folder`.

    The file lies at `folder/pipeline.yaml`, the lake in `folder/lake`, the state in `folder/state`. `options` are
    sections of the file that are taken over those made here, key by key.
    """

    def __init__(self, folder: Path, dsn: str, *, name: str = "scene", **options: Mapping[str, Any]) -> None:
        self.name = name
        self.dsn = dsn
        self.folder = folder
        self.lake = folder / "lake"
        self.state = folder / "state"
        self.file = folder / "pipeline.yaml"
        self.write(**options)

    def prepare(self) -> Self:
        """Make the table `public.fence`, by which `catch_up` knows how far the pipeline has come."""
        self.sql("CREATE TABLE public.fence (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY)")
        return self

    def write(self, **options: Mapping[str, Any]) -> None:
        """Write the file, with the standard sections and these options over them."""
        sections: dict[str, Any] = {
            "name": self.name,
            "source": {"type": "postgres", "dsn": self.dsn},
            "destination": {"type": "delta", "path": str(self.lake)},
            "state": str(self.state),
            "spark": {"master": "local[2]"},
        }
        for key, section in options.items():
            standard = sections.get(key, {})
            # A source of another type reads the same database; a destination of another type has keys of its own.
            is_another = key == "destination" and section.get("type", "delta") != "delta"
            sections[key] = dict(section) if is_another else {**standard, **section}
        if sections["source"]["type"] == "postgres":
            # Tests only insert into tables without a replica identity.
            sections["source"].setdefault("publish_without_identity", True)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file.write_text(yaml.safe_dump(sections, sort_keys=False, allow_unicode=True))

    def sql(self, *statements: str) -> None:
        """Run each statement in a transaction of its own."""
        with psycopg.connect(self.dsn, autocommit=True, client_encoding="UTF8") as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def value(self, query: str) -> Any:
        """The first value of the first row."""
        with psycopg.connect(self.dsn, autocommit=True, client_encoding="UTF8") as connection:
            row = connection.execute(query.encode()).fetchone()
        return None if row is None else row[0]

    def run(self, *, once: bool = False, failpoints: str = "", environment: Mapping[str, str] = {}) -> RunningPipeline:
        """The pipeline as a process, not started yet."""
        return RunningPipeline(self.file, once=once, failpoints=failpoints, environment=environment)

    def run_once(self, *, failpoints: str = "") -> int:
        """`tailrace run --once` to its end, as a process; the exit code. `apply` where none is killed or read."""
        with self.run(once=True, failpoints=failpoints) as run:
            return run.wait()

    def apply(self, *, errored: Collection[str] = ()) -> None:
        """Apply what is there now, in this process. Exactly the tables `errored` are in error at the end."""
        apply(self.file, errored=errored)

    def fence(self) -> int:
        """A position in the log: a table that has reached it has everything committed before this call."""
        with psycopg.connect(self.dsn, client_encoding="UTF8") as connection:
            connection.execute("INSERT INTO public.fence DEFAULT VALUES")
            row = connection.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
        assert row is not None
        return parse_lsn(row[0])

    def catch_up(
        self, run: RunningPipeline, seconds: float = PATIENCE_SECONDS, *, without: Collection[str] = ()
    ) -> None:
        """Wait until everything committed so far is in the lake and every table is Ready, but for those `without`."""
        lsn = self.fence()

        def caught_up(status: PipelineStatus) -> bool:
            others = tuple(table for table in status.tables if table.name not in without)
            reached = status.position is not None and int(status.position[:16], 16) >= lsn
            return reached and all_ready(replace(status, tables=others))

        run.wait_until(caught_up, seconds)

    def execute(self, name: str, *arguments: str) -> str:
        """`tailrace NAME FILE ARGUMENTS` to its end, which is a good one; what it printed."""
        done = invoke(name, self.file, *arguments)
        assert done.exit_code == 0, done.output
        return done.output

    def tables(self) -> list[TableSchema]:
        """The tables the pipeline follows, as the source has them now."""
        return open_source(load_all(self.file)[0]).tables()

    def differences(self, *, without: Collection[str] = ()) -> list[Difference]:
        """Where lake and source differ now, but for the tables `without`; no one may write to either."""
        return compare(self.dsn, [table for table in self.tables() if str(table.table) not in without], self.lake)

    def batch_ids(self, table: TableName) -> list[int]:
        """The ids of the batches in a table's Delta history, in the order of its commits."""
        txns = (action["txn"] for action in self._history(table) if "txn" in action)
        ours = re.compile(f"tailrace/{self.name}/[^/]+")
        return [int(txn["version"]) for txn in txns if ours.fullmatch(txn["appId"])]

    def rows_written(self, table: TableName) -> int:
        """How many rows all files hold that were ever added to a table, those taken out again included."""
        adds = (action["add"] for action in self._history(table) if "add" in action)
        return sum(json.loads(add["stats"])["numRecords"] for add in adds)

    def _history(self, table: TableName) -> Iterator[dict[str, Any]]:
        log = Path(place_of(str(self.lake), table, {}).base) / "_delta_log"
        for commit in sorted(log.glob("*.json")):
            yield from map(json.loads, commit.read_text().splitlines())

    def doubled(self) -> list[TableName]:
        """The tables whose history shows a batch twice or out of order, which are none when all is well."""
        histories = {table.table: self.batch_ids(table.table) for table in self.tables()}
        return [table for table, ids in histories.items() if ids != sorted(set(ids))]
