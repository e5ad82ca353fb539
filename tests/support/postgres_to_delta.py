"""A pipeline that runs while a test changes what it follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from deltalake import DeltaTable

from tailrace.state import SqliteStore, TableRecord, TableState
from tailrace.state.status import PipelineStatus
from tests.support.runner import RunningPipeline
from tests.support.scenario import Scenario


class Following:
    """A scenario and its run, from `with` to its end. `restart` goes on with another configuration."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.run: RunningPipeline = scenario.run()

    def __enter__(self) -> Self:
        self.run.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.run.kill()

    def restart(self, **options: Mapping[str, Any]) -> None:
        """End the run as a service manager does, and begin another one, with these options in the file."""
        self.run.terminate()
        self.run.wait()
        self.scenario.write(**options)
        self.run = self.scenario.run().start()

    def sql(self, *statements: str) -> None:
        self.scenario.sql(*statements)

    def catch_up(self, *, without: tuple[str, ...] = ()) -> None:
        self.scenario.catch_up(self.run, without=without)

    def oid(self, table: str) -> str:
        """The table's identity upstream."""
        return str(self.scenario.value(f"SELECT '{table}'::regclass::oid::int8"))

    def records(self) -> dict[str, TableRecord]:
        """What the state store holds for the tables, by their identity upstream."""
        with SqliteStore("shop", self.scenario.state).open_reading() as store:
            return {table.upstream_id: table for table in store.tables()}

    def wait_for(self, oid: str, condition: Callable[[TableRecord], bool]) -> TableRecord:
        """The record of a table as soon as it is there and meets the condition."""
        met: list[TableRecord] = []

        def is_met(_: PipelineStatus) -> bool:
            record = self.records().get(oid)
            if record is not None and condition(record):
                met.append(record)
            return bool(met)

        self.run.wait_until(is_met)
        return met[0]

    def wait_until_ready(self, table: str) -> TableRecord:
        return self.wait_for(self.oid(table), lambda record: record.state is TableState.READY)

    def wait_until_errored(self, table: str) -> TableRecord:
        return self.wait_for(self.oid(table), lambda record: record.state is TableState.ERRORED)

    def wait_until_gone(self, oid: str) -> None:
        self.run.wait_until(lambda _: oid not in self.records())

    def lake(self, table: str) -> dict[Any, dict[str, Any]]:
        """The rows of a table in the lake by their `id`."""
        rows = DeltaTable(str(self.scenario.lake / "public" / table)).to_pyarrow_table().to_pylist()
        return {row["id"]: row for row in rows}

    def require_same(self, *, without: tuple[str, ...] = ()) -> None:
        """Source and lake hold the same rows, and no batch was applied twice."""
        differences = self.scenario.differences(without=without)
        assert differences == [], [str(one) for one in differences]
        assert self.scenario.doubled() == []
