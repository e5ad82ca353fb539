"""`tailrace verify` on rows that were put on both sides by hand."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest
import typer
import yaml
from deltalake import write_deltalake
from typer.testing import CliRunner

from tailrace.cli.verify import verify as command
from tailrace.config import load
from tailrace.destination import Batch
from tailrace.errors import ConfigError
from tailrace.registry import open_destination, open_source
from tailrace.stream.verify import verify
from tailrace.testing.destination import changes_of, insert


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


def test_equal_sides_are_equal_in_whatever_order_their_rows_lie(file: Path) -> None:
    keep(file, [("k", n, n / 3) for n in reversed(range(100))])
    [verdict] = verify(load(file))
    assert verdict.equal
    assert (verdict.source_rows, verdict.destination_rows) == (100, 100)


def test_every_kind_of_difference_is_counted_and_its_key_listed(file: Path) -> None:
    keep(file, [*[("k", n, n / 3) for n in range(98)], ("k", 98, -1.0), ("extra", 1, 0.0)])
    [verdict] = verify(load(file))
    assert (verdict.missing, verdict.extra, verdict.different) == (1, 1, 1)
    assert set(verdict.keys) == {("k", "98"), ("k", "99"), ("extra", "1")}


def test_a_table_that_is_not_there_yet_lacks_every_row(file: Path) -> None:
    [verdict] = verify(load(file))
    assert (verdict.source_rows, verdict.missing, len(verdict.keys)) == (100, 100, 20)


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
    told = json.loads(run.stdout)
    assert not told["equal"]
    assert told["tables"][0]["keys"] == [["k", "5"]]
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
    open_destination(load(file)).write_changes(table, changes_of(table, *rows), Batch("p", 0))
    [verdict] = verify(load(file))
    assert verdict.equal
    with closing(sqlite3.connect(file.parent / "replica.db")) as replica, replica:
        replica.execute("UPDATE t SET v = 0.5 WHERE b = 7")
    [verdict] = verify(load(file))
    assert (verdict.different, verdict.keys) == (1, (("k", "7"),))
