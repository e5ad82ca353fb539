"""The source of the examples passes the suite that every source must pass, and runs as one of the built-in ones."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import invalidate_caches
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from examples.custom_source import NOTES, LineOptions, LineSource
from tailrace.config.pipeline import load
from tailrace.config.registry import open_source
from tailrace.errors import SchemaChangedError
from tailrace.model.change import Changes, Position, end_of
from tailrace.model.schema import Column, TableSchema
from tailrace.option.table import TableOptions, TableSettings
from tailrace.source.follower import TableDirectives
from tailrace.source.postgres.option import PostgresOptions
from tailrace.source.postgres.source import PostgresSource
from tailrace.source.source import Source, SourceContext
from tailrace.testing.replay import SourceReplay
from tailrace.testing.source import PLENTY, TransactionContract, Upstream, held

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_source.py"


@dataclass(frozen=True)
class Lines:
    """The file that the source reads."""

    source: Source
    path: Path

    def put(self, rows: Mapping[int, str]) -> None:
        self._write({"put": rows, "remove": []})

    def remove(self, *ids: int) -> None:
        self._write({"put": {}, "remove": ids})

    def rows(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            transaction = json.loads(line)
            found |= {int(key): text for key, text in transaction["put"].items()}
            for key in transaction["remove"]:
                found.pop(key, None)
        return found

    def _write(self, transaction: object) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(transaction) + "\n")


def make_lines(folder: Path, kind: type[LineSource] = LineSource, **settings: str) -> Lines:
    tables = TableOptions(defaults=TableSettings.model_validate(settings))
    path = folder / "notes.jsonl"
    return Lines(kind(LineOptions(path=path), SourceContext("notes", tables, folder / "state")), path)


class TestLines(TransactionContract):
    @pytest.fixture
    def upstream(self, tmp_path: Path) -> Upstream:
        return make_lines(tmp_path)


@dataclass(frozen=True)
class CopiedSource(LineSource):
    """The same with a copy: pages of the rows that there are now."""

    def chunks(self, table: TableSchema) -> list[int]:
        return list(range(0, max(1, len(self._rows())), 10))

    def read_rows(self, table: TableSchema, chunk: int) -> list[pa.StructArray]:  # type: ignore[override]
        rows = [{"id": key, "text": text} for key, text in sorted(self._rows().items())[chunk : chunk + 10]]
        return [pa.array(rows, table.row_type)]

    def _rows(self) -> dict[int, str]:
        return Lines(self, self.options.path).rows()


class TestCopiedLines(TransactionContract):
    @pytest.fixture
    def upstream(self, tmp_path: Path) -> Upstream:
        return make_lines(tmp_path, CopiedSource)


def test_a_change_that_is_skipped_does_not_come(tmp_path: Path) -> None:
    lines = make_lines(tmp_path)
    lines.put({1: "a"})
    with SourceReplay(lines.source, PLENTY) as replay:
        replay.catch_up()
        lines.put({1: "bad", 2: "b"})
        replay.directives = TableDirectives(skips={"notes": [str(Position(2, 0))]})
        replay.catch_up()
        assert held(replay) == {1: "a", 2: "b"}


@dataclass(frozen=True)
class WideningSource(LineSource):
    """The same, whose table has a further column as soon as a file says so."""

    def tables(self) -> list[TableSchema]:
        wide = (*NOTES.columns, Column("by", pa.string(), number=3))
        return [replace(NOTES, columns=wide) if self.options.path.with_name("wide").exists() else NOTES]


@pytest.mark.parametrize(
    ("policy", "columns"), [("evolve", ["id", "text", "by"]), ("ignore", ["id", "text"]), ("stop", None)]
)
def test_a_column_that_comes_is_treated_as_the_policy_of_the_table_says(
    tmp_path: Path, policy: str, columns: list[str] | None
) -> None:
    lines = make_lines(tmp_path, WideningSource, schema_changes=policy)
    lines.put({1: "before"})
    with SourceReplay(lines.source, PLENTY) as replay:
        replay.catch_up()
        (tmp_path / "wide").touch()
        replay.crash()  # the next follower discovers the tables at once
        replay.step()
        lines.put({2: "after"})
        if columns is None:
            with pytest.raises(SchemaChangedError):
                replay.catch_up()
            return
        replay.catch_up()
        [table] = replay.tables.values()
        assert [column.name for column in table.schema.columns] == columns
        assert held(replay) == {1: "before", 2: "after"}


def test_each_version_of_a_table_reads_its_own_stretch_of_the_log(tmp_path: Path) -> None:
    asked: list[tuple[list[str], Position, Position]] = []

    @dataclass(frozen=True)
    class Asked(WideningSource):
        def read_log(self, table: TableSchema, after: Position, upto: Position) -> list[Changes]:  # type: ignore[override]
            asked.append(([column.name for column in table.columns], after, upto))
            return list(super().read_log(table, after, upto))

    lines = make_lines(tmp_path, Asked)
    lines.put({1: "before"})
    with SourceReplay(lines.source, PLENTY) as replay:
        replay.catch_up()
        lines.put({2: "between"})
        (tmp_path / "wide").touch()
        replay.crash()
        assert replay.plan()
        lines.put({3: "after"})
        replay.catch_up()
        assert held(replay) == lines.rows()
    assert asked[-1] == (["id", "text", "by"], end_of(2), end_of(3))
    assert (["id", "text"], end_of(1), end_of(2)) in asked


def test_a_file_names_it_by_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "site" / "lines-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lines\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tailrace.sources]\nlines = examples.custom_source:LineSource\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    invalidate_caches()
    file = tmp_path / "notes.yaml"
    file.write_text(
        "name: notes\nsource: {type: lines, path: notes.jsonl}\ndestination: {type: delta, path: ./lake}\n"
        "tables: {include: ['main.*']}\n"
    )
    source = open_source(load(file))
    assert source == LineSource(
        LineOptions(path=tmp_path / "notes.jsonl"),
        SourceContext("notes", TableOptions(include=["main.*"]), tmp_path / ".tailrace" / "notes"),
    )
    lines = Lines(source, tmp_path / "notes.jsonl")
    lines.put({1: "a"})
    with SourceReplay(source, PLENTY) as replay:
        replay.catch_up()
        assert held(replay) == {1: "a"}
    assert source.for_reader("other", "main.nothing").tables() == []


def test_a_pipeline_takes_a_source_and_makes_it_a_part_of_itself(tmp_path: Path) -> None:
    from tailrace.stream.pipeline import Pipeline

    given = LineSource(LineOptions(path=tmp_path / "notes.jsonl"))
    tables = {"include": ["main.*"], "defaults": {"schema_changes": "stop"}}
    lake = {"type": "delta", "path": str(tmp_path / "lake")}
    pipeline = Pipeline(name="notes", source=given, destination=lake, tables=tables, state=str(tmp_path / "state"))
    context = SourceContext("notes", TableOptions.model_validate(tables), tmp_path / "state")
    assert pipeline.source == LineSource(given.options, context)
    assert pipeline.config.source == given.options
    assert [finding.level for finding in pipeline.source.check()] == ["ok"]


def test_options_made_by_a_program_have_the_defaults_of_the_pipeline_they_come_to(tmp_path: Path) -> None:
    dsn = "postgresql://reader:canary@db/shop"
    made = PostgresSource(PostgresOptions.model_validate({"type": "postgres", "dsn": dsn, "copy": {"parallel": 3}}))
    source = made.bind(SourceContext("my-shop", TableOptions(), tmp_path))
    assert (source.options.publication, source.options.slot) == ("my-shop", "tailrace_my_shop")
    assert source.journal == tmp_path / "journal"
    assert (source.dsn, source.copy_tasks) == (dsn, 3)
    assert "canary" not in repr(source)


def test_the_example_runs_as_it_stands(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, EXAMPLE, tmp_path], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "main.notes: Ready, 4 changes\n"
    [table] = {file.parent for file in (tmp_path / "lake").rglob("_delta_log")}
    rows = DeltaTable(str(table)).to_pyarrow_table(columns=["id", "text"]).to_pylist()
    assert rows == [{"id": 1, "text": "changed"}]
