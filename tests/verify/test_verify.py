"""`tailrace verify` on rows that were put on both sides by hand."""

from __future__ import annotations

import json
import sqlite3
import tempfile
from collections.abc import Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import typer
import yaml
from deltalake import write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tailrace.cli import app
from tailrace.cli.verify import verify as command
from tailrace.config.pipeline import load
from tailrace.config.registry import open_destination, open_source
from tailrace.destination import Batch, TableBatch
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.errors import ConfigError, PreflightError, TableError, UnavailableError
from tailrace.model.change import Changes, Op, pack_unchanged
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.model.table_rows import Readable, RowBatches
from tailrace.option.table import TableOptions
from tailrace.state import RunnerLock
from tailrace.testing.destination import changes_of, insert
from tailrace.verify.comparison import KeyDifference, _Differences, _spill, verify
from tests.support.database import PostgresDatabase
from tests.support.delta_optimize import optimize_as_spark_does
from tests.support.invocation import invoke
from tests.support.rqlite_node import RqliteNode
from tests.support.slatedb_traffic import MAPPING
from tests.support.slatedb_writing import Writer
from tests.support.sqlite_application import Application


@pytest.fixture
def file(tmp_path: Path) -> Path:
    with closing(sqlite3.connect(tmp_path / "app.db")) as app, app:
        app.execute("CREATE TABLE t (a TEXT, b INT, v REAL, updated_at TEXT, PRIMARY KEY (a, b))")
        app.executemany("INSERT INTO t VALUES (?, ?, ?, '2026-11-15')", [("k", n, n / 3) for n in range(100)])
    sections = {
        "name": "p",
        "source": {"type": "poll", "dsn": "sqlite:///app.db"},
        "tables": {"defaults": {"updated_at": "updated_at"}},
        "destination": {"type": "delta", "path": "lake"},
    }
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(sections))
    return tmp_path / "p.yaml"


def keep(file: Path, rows: list[tuple[str, int, float]]) -> None:
    names = ("a", "b", "v", "updated_at")
    columns = [*zip(*rows, strict=True), ["2026-11-15"] * len(rows)]
    table = pa.table(dict(zip(names, map(list, columns), strict=True)))
    write_deltalake(str(file.parent / "lake" / "main" / "t"), table, mode="overwrite")


def read_all(part: object, table: TableSchema) -> RowBatches:
    assert isinstance(part, Readable)
    found = part.read_table(table)
    assert found is not None
    return found.rows


def test_equal_sides_are_equal_in_whatever_order_their_rows_lie(file: Path) -> None:
    keep(file, [("k", n, n / 3) for n in reversed(range(100))])
    [verdict] = verify(load(file))
    assert verdict.equal
    assert (verdict.source_rows, verdict.destination_rows) == (100, 100)


def test_every_kind_of_difference_is_counted_and_its_key_listed(file: Path) -> None:
    keep(file, [*[("k", n, n / 3) for n in range(98)], ("k", 98, -1.0), ("extra", 1, 0.0)])
    [verdict] = verify(load(file))
    assert (verdict.missing, verdict.extra, verdict.different) == (1, 1, 1)
    assert set(verdict.differences) == {
        KeyDifference(("k", "98"), "different"),
        KeyDifference(("k", "99"), "missing"),
        KeyDifference(("extra", "1"), "extra"),
    }


def test_rows_in_flight_are_told_from_differences(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the pipeline runs, a table that differs is looked at again: what differs in the same way stays."""
    config = load(file)
    held = [*[("k", n, n / 3) for n in range(90)], ("k", 98, -1.0), ("extra", 1, 0.0)]
    keep(file, held)
    looks: list[float] = []

    def apply(seconds: float) -> None:
        """The pipeline brings some rows between two looks, and others change meanwhile."""
        looks.append(seconds)
        held.append(("k", 90 + len(looks), (90 + len(looks)) / 3))
        keep(file, held)
        with closing(sqlite3.connect(file.parent / "app.db")) as app, app:
            app.execute("UPDATE t SET v = ? WHERE b = 5", (1000.0 + len(looks),))

    monkeypatch.setattr("tailrace.verify.comparison.time.sleep", apply)
    with config.store_address.open() as store:
        [verdict] = verify(config, pause_seconds=7.0)
        assert (looks, verdict.in_flight) == ([], 0)  # no runner: nothing is on its way
        with RunnerLock(config.state):
            [verdict] = verify(config, pause_seconds=7.0)
        assert store.runner() is None
    assert looks == [7.0, 7.0, 7.0]
    # Of those that were missing at first three came; the row that changes all the time was never the same.
    assert (verdict.missing, verdict.extra, verdict.different) == (6, 1, 1)
    assert {one.key for one in verdict.differences if one.kind != "missing"} == {("k", "98"), ("extra", "1")}
    assert verdict.in_flight == 3 + 3
    assert not verdict.equal


def test_a_table_whose_differences_all_pass_is_equal(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(file)
    keep(file, [("k", n, n / 3) for n in range(99)])

    def apply(seconds: float) -> None:
        keep(file, [("k", n, n / 3) for n in range(100)])

    monkeypatch.setattr("tailrace.verify.comparison.time.sleep", apply)
    with config.store_address.open(), RunnerLock(config.state):
        [verdict] = verify(config)
    assert (verdict.equal, verdict.in_flight) == (True, 1)


def test_a_table_that_is_not_there_yet_lacks_every_row(file: Path) -> None:
    [verdict] = verify(load(file))
    assert (verdict.source_rows, verdict.missing, len(verdict.keys)) == (100, 100, 20)


def test_what_cannot_be_read_back_is_named_as_the_file_names_it(file: Path) -> None:
    sections = yaml.safe_load(file.read_text())
    sections["destination"] = {"type": "webhook", "url": "http://127.0.0.1:9/hook"}
    file.write_text(yaml.safe_dump(sections))
    with pytest.raises(ConfigError, match="`type: webhook` cannot be read back") as refused:
        list(verify(load(file)))
    assert "WebhookDestination" not in str(refused.value)


def test_a_lake_with_options_of_its_storage_is_read_back_with_them(file: Path) -> None:
    sections = yaml.safe_load(file.read_text())
    sections["destination"]["storage_options"] = {"allow_http": "true"}
    file.write_text(yaml.safe_dump(sections))
    keep(file, [("k", n, n / 3) for n in range(100)])
    [verdict] = verify(load(file))
    assert verdict.equal


def test_a_lake_that_lost_a_file_or_does_not_answer_is_reported_as_such(file: Path) -> None:
    keep(file, [("k", 1, 1.0)])
    for part in (file.parent / "lake" / "main" / "t").glob("*.parquet"):
        part.unlink()
    with pytest.raises(TableError, match="is no longer in"):
        list(verify(load(file)))
    sections = yaml.safe_load(file.read_text())
    address = {"aws_endpoint_url": "http://127.0.0.1:9", "allow_http": "true", "aws_region": "x", "max_retries": "0"}
    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b"}
    sections["destination"] = {"type": "delta", "path": "s3://shop/lake", "storage_options": address | keys}
    file.write_text(yaml.safe_dump(sections))
    with pytest.raises(UnavailableError, match="cannot use s3://shop/lake"):
        list(verify(load(file)))


def test_moments_far_off_are_read_back_from_a_file_as_spark_writes_it(tmp_path: Path) -> None:
    table = TableSchema(TableName("main", "t"), (Column("at", pa.timestamp("us", "UTC")),))
    moments = [datetime(1500, 1, 1, 0, 0, 0, 5, UTC), datetime(9998, 1, 1, tzinfo=UTC)]
    place = tmp_path / "main" / "t"
    write_deltalake(str(place), pa.table({"at": pa.array(moments, table.column("at").type)}))
    optimize_as_spark_does(place, "")
    kept = read_all(DeltaDestination(path=str(tmp_path)), table)
    assert [at for batch in kept for at in batch.column("at").to_pylist()] == moments


def test_a_table_that_is_not_followed_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"main\.other"):
        list(verify(load(file), "main.other"))


def test_the_command_ends_with_8_where_sides_differ_and_shows_no_other_value(file: Path) -> None:
    app = typer.Typer()
    app.command()(command)
    keep(file, [("k", n, n / 3) for n in range(100)])
    assert CliRunner().invoke(app, [str(file)]).exit_code == 0
    keep(file, [("k", n, 0.123456 if n == 5 else n / 3) for n in range(100)])
    run = CliRunner().invoke(app, [str(file), "--json"])
    assert run.exit_code == 8
    report = json.loads(run.stdout)
    assert not report["equal"]
    assert report["tables"][0]["keys"] == [["k", "5"]]
    plain = CliRunner().invoke(app, [str(file), "--table", "main.t"])
    assert plain.exit_code == 8
    assert "(k, 5)" in plain.stdout
    assert "0.123456" not in run.stdout + plain.stdout


def test_a_replica_in_an_sqlite_file_is_read_back_as_it_is_kept(file: Path) -> None:
    config = yaml.safe_load(file.read_text()) | {"destination": {"type": "sqlite", "path": "replica.db"}}
    file.write_text(yaml.safe_dump(config))
    [verdict] = verify(load(file))
    assert (verdict.missing, verdict.destination_rows) == (100, 0)
    [table] = open_source(load(file)).tables()
    rows = [insert(a="k", b=n, v=n / 3, updated_at="2026-11-15") for n in range(100)]
    open_destination(load(file)).write_changes(TableBatch(table, Batch("p", 0), changes_of(table, *rows)))
    [verdict] = verify(load(file))
    assert verdict.equal
    with closing(sqlite3.connect(file.parent / "replica.db")) as replica, replica:
        replica.execute("UPDATE t SET v = 0.5 WHERE b = 7")
    [verdict] = verify(load(file))
    assert (verdict.different, verdict.keys) == (1, (("k", "7"),))


def test_a_key_that_the_destination_holds_twice_is_one_row_too_many(file: Path) -> None:
    keep(file, [*[("k", n, n / 3) for n in range(100)], ("k", 7, 7 / 3)])
    [verdict] = verify(load(file))
    assert not verdict.equal
    assert (verdict.extra, verdict.destination_rows, verdict.keys) == (1, 101, (("k", "7"),))


def test_as_many_keys_are_listed_as_are_asked_for(file: Path) -> None:
    [verdict] = verify(load(file), shown=3)
    assert (verdict.missing, len(verdict.keys)) == (100, 3)
    app = typer.Typer()
    app.command()(command)
    report = json.loads(CliRunner().invoke(app, [str(file), "--json", "--keys", "70"]).stdout)
    assert len(report["tables"][0]["keys"]) == 70


TABLE = TableSchema(TableName("s", "t"), (Column("id", pa.string()), Column("v", pa.int64())), ("id",))
SIDE = st.dictionaries(st.text("abc", max_size=3), st.integers(0, 2), max_size=30)


@settings(max_examples=50)
@given(SIDE, SIDE, st.sampled_from([1, 4, 1000]), st.integers(1, 9))
def test_sides_in_files_compare_as_those_in_memory(
    ours: dict[str, int], theirs: dict[str, int], run_rows: int, batch: int
) -> None:
    def batches(rows: dict[str, int]) -> list[pa.RecordBatch]:
        table = pa.table({"id": pa.array(list(rows), pa.string()), "v": pa.array(list(rows.values()), pa.int64())})
        return list(table.to_batches(max_chunksize=batch))

    with tempfile.TemporaryDirectory() as folder:
        here, there = (
            _spill(Path(folder) / name, TABLE, iter(batches(rows)), run_rows)
            for name, rows in (("ours", ours), ("theirs", theirs))
        )
        assert bool(list((Path(folder) / "ours").iterdir())) == (len(ours) >= run_rows)
        verdict = _Differences.of(TABLE, here, there, run_rows).verdict(1000)
    assert (verdict.source_rows, verdict.destination_rows) == (len(ours), len(theirs))
    missing, extra = ours.keys() - theirs.keys(), theirs.keys() - ours.keys()
    different = {key for key in ours.keys() & theirs.keys() if ours[key] != theirs[key]}
    assert (verdict.missing, verdict.extra, verdict.different) == (len(missing), len(extra), len(different))
    assert sorted(verdict.keys) == sorted((key,) for key in missing | extra | different)


def configure(folder: Path, source: Mapping[str, object], **sections: object) -> Path:
    lake = {"type": "delta", "path": str(folder / "lake")}
    config = {"name": "p", "source": dict(source), "destination": lake, "state": str(folder / "state"), **sections}
    (folder / "p.yaml").write_text(yaml.safe_dump(config))
    return folder / "p.yaml"


def bring_over(file: Path) -> None:
    """Write what the source holds now into the destination."""
    source, destination = open_source(load(file)), open_destination(load(file))
    for number, table in enumerate(source.tables()):
        chunks = [
            Changes.build(
                table,
                pa.StructArray.from_arrays(batch.columns[:-1], fields=list(table.row_type)),
                op=Op.INSERT,
                commit=number + 1,
                ordinal=np.arange(batch.num_rows, dtype=np.int64),
                exact=batch.column(batch.num_columns - 1),
            )
            for batch in read_all(source, table)
        ]
        destination.write_changes(TableBatch(table, Batch("p", number), chunks))


@pytest.mark.parametrize("kind", ["turso", "trigger"])
def test_a_file_whose_changes_are_captured_is_compared_as_it_is_now(kind: str, tmp_path: Path) -> None:
    application = Application(tmp_path / "app.db", "turso" if kind == "turso" else "trigger")
    with closing(application.connection):
        application.run("CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT, price REAL)")
        application.capture()
        for number in range(50):
            application.run("INSERT INTO items VALUES (?, ?, ?)", number, f"n{number}", number / 7)
        file = configure(tmp_path, {"type": "turso" if kind == "turso" else "sqlite", "path": str(tmp_path / "app.db")})
        bring_over(file)
        [verdict] = verify(load(file))
        assert (verdict.source_rows, verdict.equal) == (50, True)
        application.run("UPDATE items SET price = 0 WHERE id = 7")
        [verdict] = verify(load(file))
        assert (verdict.different, verdict.keys) == (1, (("7",),))


def test_a_slatedb_is_compared_with_what_is_durable_in_it_now(tmp_path: Path) -> None:
    with Writer(tmp_path / "store", TableOptions.model_validate(MAPPING)) as writer:
        for number in range(30):
            writer.put(b"c:%d" % number, number.to_bytes(8, "big"))
        store = {"type": "local", "path": str(tmp_path / "store")}
        file = configure(tmp_path, {"type": "slatedb", "path": "db1", "store": store}, tables=MAPPING)
        bring_over(file)
        [verdict] = verify(load(file), "slatedb.counter")
        assert (verdict.source_rows, verdict.equal) == (30, True)
        writer.put(b"c:5", (99).to_bytes(8, "big"))
        writer.delete(b"c:6")
        [verdict] = verify(load(file), "slatedb.counter")
        assert (verdict.different, verdict.extra) == (1, 1)
        assert not list((tmp_path / "state").rglob("verify-*"))


def test_an_rqlite_cluster_is_compared_through_its_api(tmp_path: Path) -> None:
    with RqliteNode("http://127.0.0.1:1/cdc", service="svc") as node:
        node.execute("CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT, price REAL)")
        node.execute("CREATE TABLE words (w TEXT NOT NULL PRIMARY KEY, n INTEGER) WITHOUT ROWID")
        for number in range(30):
            node.execute(["INSERT INTO items VALUES (?, ?, ?)", number, f"n{number}", number / 7])
            node.execute(["INSERT INTO words VALUES (?, ?)", f"w{number}", number])
        source = {"type": "rqlite", "listen": "127.0.0.1:1", "api": node.url, "copy": {"chunk_rows": 7}}
        file = configure(tmp_path, source)
        bring_over(file)
        assert [(one.source_rows, one.equal) for one in verify(load(file))] == [(30, True)] * 2
        node.execute("UPDATE words SET n = -1 WHERE w = 'w5'", "DELETE FROM items WHERE id = 6")
        found = {one.table: (one.different, one.extra, one.keys) for one in verify(load(file))}
        assert found == {"svc.items": (0, 1, (("6",),)), "svc.words": (1, 0, (("w5",),))}


def test_a_table_is_its_partitions_and_not_the_tables_that_inherit_from_it(
    tmp_path: Path, database: PostgresDatabase
) -> None:
    database.run(
        "CREATE TABLE parent (id int PRIMARY KEY)",
        "CREATE TABLE child (PRIMARY KEY (id)) INHERITS (parent)",
        "INSERT INTO parent VALUES (1)",
        "INSERT INTO child VALUES (2)",
        "CREATE TABLE split (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE low PARTITION OF split FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE high PARTITION OF split FOR VALUES FROM (10) TO (20)",
        "INSERT INTO split VALUES (3), (13)",
    )
    source = open_source(load(configure(tmp_path, {"type": "postgres", "dsn": database.dsn})))
    found = {
        table.table.name: sorted(n for batch in read_all(source, table) for n in batch.column("id").to_pylist())
        for table in source.tables()
    }
    assert found == {"parent": [1], "child": [2], "split": [3, 13]}


def test_tables_without_a_key_are_named_and_the_others_compared(tmp_path: Path, database: PostgresDatabase) -> None:
    database.run(
        "CREATE TABLE a (v int)",
        "ALTER TABLE a REPLICA IDENTITY FULL",
        "CREATE TABLE b (id int PRIMARY KEY)",
        "INSERT INTO b VALUES (1), (2)",
    )
    write_deltalake(str(tmp_path / "lake" / "public" / "b"), pa.table({"id": pa.array([1, 2], pa.int32())}))
    sections = {
        "name": "p",
        "source": {"type": "postgres", "dsn": database.dsn},
        "destination": {"type": "delta", "path": "lake"},
    }
    file = tmp_path / "p.yaml"
    file.write_text(yaml.safe_dump(sections))
    verdicts = [(each.table, each.compared, each.equal) for each in verify(load(file))]
    assert sorted(verdicts) == [("public.a", False, False), ("public.b", True, True)]
    result = CliRunner().invoke(app, ["verify", str(file)])
    assert result.exit_code == 0
    assert "public.a: it has no key" in result.output
    with pytest.raises(ConfigError, match="has no key"):
        list(verify(load(file), "public.a"))
    database.run("DROP TABLE b")
    assert CliRunner().invoke(app, ["verify", str(file)]).exit_code == ConfigError.exit_code


@pytest.mark.parametrize("kind", ["delta", "sqlite"])
def test_values_that_do_not_fit_are_equal_in_whatever_order_they_were_noted(
    tmp_path: Path, database: PostgresDatabase, kind: str
) -> None:
    database.run(
        "CREATE TABLE t (id int PRIMARY KEY, grid int[], day date, share float8)",
        "INSERT INTO t VALUES (1, '{{1}}', 'infinity', 'NaN'), (2, NULL, NULL, 1)",
    )
    lake = {"type": kind, "path": str(tmp_path / "lake")}
    file = configure(tmp_path, {"type": "postgres", "dsn": database.dsn}, destination=lake)
    bring_over(file)
    source, destination = open_source(load(file)), open_destination(load(file))
    [table] = source.tables()
    database.run("UPDATE t SET day = '-infinity' WHERE id = 1")
    rows = pa.array([{"id": 1, "grid": None, "day": None, "share": float("nan")}], table.row_type)
    update = Changes.build(
        table,
        rows,
        op=Op.UPDATE,
        commit=2,
        unchanged=pack_unchanged(np.array([[False, True, False, False]])),
        exact=pa.array(['{"day": "-infinity"}']),
    )
    destination.write_changes(TableBatch(table, Batch("p", 9), [update]))
    [verdict] = verify(load(file))
    assert verdict.equal, verdict


@pytest.mark.parametrize("kind", ["delta", "sqlite"])
def test_a_value_that_differs_only_in_the_wider_type_of_the_destination_is_found(
    tmp_path: Path, database: PostgresDatabase, kind: str
) -> None:
    database.run("CREATE TABLE t (id int PRIMARY KEY, v float8, n numeric(12,0))", "INSERT INTO t VALUES (1, 1.1, 5)")
    lake = {"type": kind, "path": str(tmp_path / "lake")}
    file = configure(tmp_path, {"type": "postgres", "dsn": database.dsn}, destination=lake)
    bring_over(file)
    database.run("ALTER TABLE t ALTER n TYPE int")
    [verdict] = verify(load(file))
    assert verdict.equal, verdict
    database.run("ALTER TABLE t ALTER v TYPE real")
    [verdict] = verify(load(file))
    assert verdict.different == 1


def test_a_sqlite_file_that_is_still_empty_lacks_every_row_and_one_of_another_program_is_refused(file: Path) -> None:
    path = file.parent / "replica.db"
    sections = {**yaml.safe_load(file.read_text()), "destination": {"type": "sqlite", "path": str(path)}}
    file.write_text(yaml.safe_dump(sections))
    path.touch()
    [verdict] = verify(load(file))
    assert verdict.missing == 100
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("CREATE TABLE t (a)")
    with pytest.raises(PreflightError, match="not made by tailrace"):
        list(verify(load(file)))


def test_what_is_selected_and_not_followed_is_named(file: Path) -> None:
    with closing(sqlite3.connect(file.parent / "app.db")) as app, app:
        app.execute("CREATE TABLE timeless (id INTEGER PRIMARY KEY)")
    keep(file, [("k", n, n / 3) for n in range(100)])
    said = invoke("verify", file)
    assert said.exit_code == 0
    assert "omitted main.timeless: it has no column updated_at" in said.output
    values = json.loads(invoke("verify", file, "--json").output)
    assert [finding["table"] for finding in values["omitted"]] == ["main.timeless"]


def test_a_table_that_cannot_be_read_is_skipped_with_the_reason_and_the_others_are_compared(
    tmp_path: Path, database: PostgresDatabase
) -> None:
    database.run(
        "CREATE TABLE a (id int PRIMARY KEY)",
        "CREATE TABLE b (id int PRIMARY KEY)",
        'CREATE TABLE twin (id int PRIMARY KEY, a int, "A" int)',
        "DROP ROLE IF EXISTS blind",
        "CREATE ROLE blind LOGIN REPLICATION",
        "GRANT SELECT ON b, twin TO blind",
    )
    for name in ("a", "b"):
        write_deltalake(str(tmp_path / "lake" / "public" / name), pa.table({"id": pa.array([], pa.int32())}))
    sections = {
        "name": "p",
        "source": {"type": "postgres", "dsn": database.server.dsn(database.name, user="blind")},
        "destination": {"type": "delta", "path": "lake"},
    }
    file = tmp_path / "p.yaml"
    file.write_text(yaml.safe_dump(sections))
    verdicts = {each.table: each for each in verify(load(file))}
    assert [name for name, each in verdicts.items() if each.compared] == ["public.b"]
    assert "permission denied" in (verdicts["public.a"].reason or "")
    assert "differ only in case" in (verdicts["public.twin"].reason or "")
    with pytest.raises(TableError, match="permission denied"):
        list(verify(load(file), "public.a"))
    database.run("DROP OWNED BY blind", "DROP ROLE blind")
