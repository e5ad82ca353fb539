"""`tailrace init` on real databases: the file it writes, what it says, and what it never shows."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from tailrace.cli import app
from tailrace.config.draft import quote
from tailrace.config.pipeline import load
from tailrace.config.registry import SOURCES, open_source
from tests.support.database import PostgresDatabase

CANARY = "c4nary-Pa55"
ODD_NAMES = [
    "o dd",
    'quo"te',
    "dots.in.it",
    "Upper",
    "star*[x]?",
    "$" + "{HOME}",
    "null",
    "läng\tß",
    "- # : x",
    "new\nline",
]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def init(*words: object) -> Result:
    result = CliRunner().invoke(app, ["init", *map(str, words)])
    assert CANARY not in result.output
    for file in Path().rglob("*"):
        assert not file.is_file() or CANARY.encode() not in file.read_bytes()
    return result


def value(result: Result, code: int = 0) -> Any:
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def with_password(dsn: str) -> str:
    """The server trusts every user, whatever password it sends."""
    return dsn.replace("postgres@", f"postgres:{CANARY}@", 1)


def make_sqlite(*statements: str) -> Path:
    with closing(sqlite3.connect("app.db", isolation_level=None)) as connection:
        for sql in statements:
            connection.execute(sql)
    return Path("app.db")


def identifier(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def test_the_file_for_a_postgres_database_passes_its_check(
    database: PostgresDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.run(
        "CREATE TABLE orders (id bigint PRIMARY KEY, note text)",
        "INSERT INTO orders SELECT n, 'x' FROM generate_series(1, 250) n",
        "ANALYZE orders",
        "CREATE TABLE log (line text)",
        "CREATE TABLE whole (line text)",
        "ALTER TABLE whole REPLICA IDENTITY FULL",
        'CREATE TABLE twice (id int PRIMARY KEY, a int, "A" int)',
        *(f"CREATE TABLE {identifier(name)} (id int PRIMARY KEY)" for name in ODD_NAMES),
    )
    dsn = with_password(database.dsn)
    done = init(dsn, "--name", "shop", "--yes")
    assert done.exit_code == 0, done.output
    text = Path("shop.yaml").read_text("utf-8")
    assert text.startswith("# yaml-language-server: $schema=.tailrace/schema.json\n")
    assert json.loads(Path(".tailrace/schema.json").read_text("utf-8"))["properties"]["source"]
    assert yaml.safe_load(text)["source"]["dsn"] == "${SHOP_DSN}"
    assert "- public.orders  # key id, about 250 rows" in text
    assert "# - public.log  # left out: no primary key, so publishing it would make Postgres refuse" in text
    assert '#     fix: ALTER TABLE "public"."log" ADD PRIMARY KEY (…);' in text
    assert "# - public.whole  # left out: no primary key: it can only be kept as an append-only log" in text
    assert "# - public.twice  # left out: two columns differ only in case" in text
    assert "export SHOP_DSN='postgresql://postgres:***@127.0.0.1:" in done.stdout
    assert done.stdout.endswith("next: tailrace run shop.yaml\n")
    monkeypatch.setenv("SHOP_DSN", dsn)
    followed = {table.table.name for table in open_source(load("shop.yaml")).tables()}
    assert followed == {"orders", *ODD_NAMES}
    assert CliRunner().invoke(app, ["check", "shop.yaml"]).exit_code == 0
    assert not database.rows("SELECT 1 FROM pg_publication UNION ALL SELECT 1 FROM pg_replication_slots")


def test_as_json_a_variable_that_holds_the_dsn_is_the_one_the_file_refers_to(
    database: PostgresDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.run("CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id)", "CREATE TABLE log (line text)")
    monkeypatch.setenv("WAREHOUSE", with_password(database.dsn))
    for words in (["--env", "WAREHOUSE", "--output", "a.yaml"], [os.environ["WAREHOUSE"], "--output", "b.yaml"]):
        found = value(init(*words, "--json"))
        assert found["variables"] == [{"name": "WAREHOUSE", "is_set": True}]
        assert (found["name"], found["source"], found["ok"]) == (database.name, "postgres", True)
        assert found["next"] == f"tailrace run {words[-1]}"
        log, parts = found["tables"]
        assert (log["key"], log["reason"] is None, parts["key"], parts["reason"]) == ([], False, ["id"], None)
        assert (log["rows"], parts["rows"]) == (0, 0)


def test_a_database_that_is_not_ready_gets_its_file_and_the_sql_that_fixes_it(database: PostgresDatabase) -> None:
    found = value(init(database.dsn, "--json", "--name", "empty"), 3)
    assert [one["subject"] for one in found["findings"] if one["level"] == "error"] == ["tables"]
    assert found["next"] == "tailrace check empty.yaml"
    assert load("empty.yaml", connects=False).tables.include == ["*.*"]


@pytest.mark.parametrize(
    ("change", "code"),
    [(("/test_", "/no_such_"), 3), (("127.0.0.1:", "127.0.0.1:1"), 2), (("@127.0.0.1", "@127.0.0.1:1,x@y"), 2)],
)
def test_a_wrong_dsn_is_an_error_and_writes_nothing(
    database: PostgresDatabase, change: tuple[str, str], code: int
) -> None:
    done = init(with_password(database.dsn).replace(*change), "--yes")
    assert done.exit_code in (code, 4), done.output
    assert "fix: " in done.stderr
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    "address", [f"mysql://root:{CANARY}@h/d", f"http://u:{CANARY}@", f"postgresql://u:{CANARY}@h:x/d"]
)
def test_an_address_that_no_source_takes_is_refused_without_being_shown(address: str) -> None:
    done = init(address)
    assert done.exit_code == 2
    assert "error[config]: " in done.stderr
    assert list(Path().iterdir()) == []


def test_a_file_that_exists_stays_as_it_is() -> None:
    make_sqlite("CREATE TABLE t (id INTEGER PRIMARY KEY)")
    Path("app.yaml").write_text("mine")
    done = init("app.db", "--yes")
    assert done.exit_code == 2
    assert "app.yaml exists and is not overwritten" in done.stderr
    assert Path("app.yaml").read_text() == "mine"


def test_the_file_for_an_sqlite_file_passes_once_its_changes_are_captured() -> None:
    make_sqlite(
        "CREATE TABLE t (id INTEGER PRIMARY KEY)",
        "INSERT INTO t VALUES (5), (7)",
        "CREATE TABLE bare (a)",
        "CREATE TABLE w (k PRIMARY KEY) WITHOUT ROWID",
        *(f"CREATE TABLE {identifier(name)} (id INTEGER PRIMARY KEY)" for name in ODD_NAMES),
    )
    done = init("app.db")
    assert done.exit_code == 3
    assert "fix: tailrace sqlite enable " in done.stdout
    assert "main.t" in done.stdout
    text = Path("app.yaml").read_text("utf-8")
    assert "- main.t  # key id, about 2 rows" in text
    assert "# - main.bare  # left out: no primary key" in text
    assert "# - main.w  # left out: has no rowid" in text
    assert yaml.safe_load(text)["source"] == {"type": "sqlite", "path": "./app.db"}
    assert CliRunner().invoke(app, ["sqlite", "enable", "app.db"]).exit_code == 0
    checked = CliRunner().invoke(app, ["check", "app.yaml"])
    assert checked.exit_code == 0, checked.output
    assert {table.table.name for table in open_source(load("app.yaml")).tables()} == {"t", *ODD_NAMES}
    assert value(init("app.db", "--output", "again.yaml", "--json"))["ok"]


@pytest.mark.parametrize("type_", [name for name in SOURCES.names() if name in SOURCES.built_in])
def test_without_a_dsn_a_template_of_the_type_can_be_loaded(type_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = value(init("--source", type_, "--name", "shop", "--json"))
    for variable in found["variables"]:
        monkeypatch.setenv(variable["name"], "postgresql://shop@localhost/shop")
    assert load("shop.yaml").source.type == type_
    assert found["next"] == "tailrace check shop.yaml"


def test_a_password_in_the_url_of_rqlite_becomes_a_variable() -> None:
    done = init(f"http://reader:{CANARY}@127.0.0.1:1", "--yes")
    assert done.exit_code == 4, done.output


@pytest.mark.parametrize(
    "text", [*ODD_NAMES, "", "yes", "1e3", "a: b", "\U0001f600", "\x7f", "\ufeff", "#", "'", "\\n"]
)
def test_quoted_text_is_read_by_every_parser_as_it_was(text: str) -> None:
    assert yaml.safe_load(f"- {quote(text)}") == [text]
