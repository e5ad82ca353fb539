"""`tailrace sqlite …` and `tailrace tape …`: what they print, and how they end."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tailrace.cli import app


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "app.db"
    execute(file, "CREATE TABLE t(id INTEGER PRIMARY KEY, a)")
    return file


def execute(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for sql in statements:
            connection.execute(sql)


def sqlite(*words: object) -> Result:
    return CliRunner().invoke(app, ["sqlite", *map(str, words)])


def tape(*words: object) -> Result:
    return CliRunner().invoke(app, ["tape", *map(str, words)])


def value(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_file_is_captured_inspected_purged_and_released(path: Path) -> None:
    state = {"mode": "full", "table": "turso_cdc", "version": "triggers-v1", "excluded": []}
    assert value(sqlite("enable", path, "--json")) == state
    execute(path, "INSERT INTO t VALUES (1, 'x'), (2, 'y')", "CREATE TABLE u(x)")
    state = value(sqlite("status", path, "--json"))
    assert (state["mode"], state["pending_schema_changes"]) == ("full", 1)
    assert state["tape"]["changes"] == {"t": {"insert": 2}}
    assert "pending" in sqlite("status", path).stdout
    assert value(sqlite("purge", path, "--upto", 2, "--json")) == {"purged": 1}
    assert "off" in sqlite("disable", path).stdout
    assert value(sqlite("status", path, "--json"))["mode"] == "off"


def test_a_table_that_is_not_captured_is_a_finding_of_each_command(path: Path, tmp_path: Path) -> None:
    execute(path, "CREATE TABLE w(k PRIMARY KEY) WITHOUT ROWID", "INSERT INTO w VALUES (1)")
    for done in (sqlite("enable", path), sqlite("status", path), tape("apply", path, tmp_path / "replica.db")):
        assert "main.w is not captured: w has no rowid" in done.stdout
    (found,) = value(sqlite("status", path, "--json"))["excluded"]
    assert (found["level"], found["table"]) == ("warning", "main.w")
    assert "WITHOUT ROWID" in found["fix"]


def test_a_tape_is_merged_into_what_a_file_holds(path: Path, tmp_path: Path) -> None:
    sqlite("enable", path)
    execute(path, "INSERT INTO t VALUES (1, 'x')", "CREATE TABLE u(x)")
    sqlite("enable", path)
    other = tmp_path / "other.db"
    execute(other, "CREATE TABLE t(id INTEGER PRIMARY KEY, a)", "INSERT INTO t VALUES (1, 'own'), (2, 'own')")
    refused = tape("apply", path, other)
    assert refused.exit_code != 0
    assert "--merge" in refused.output
    assert value(tape("apply", path, other, "--merge", "--json"))["changes"] == 2
    assert value(tape("apply", path, other, "--merge", "--json"))["changes"] == 0
    with closing(sqlite3.connect(other)) as connection:
        assert connection.execute("SELECT * FROM t").fetchall() == [(1, "x"), (2, "own")]


def test_a_tape_is_reported_dropped_only_when_it_is(path: Path) -> None:
    assert value(sqlite("disable", path, "--drop", "--json")) == {"mode": "off", "dropped": False}
    sqlite("enable", path)
    assert sqlite("disable", path).stdout == "off\n"
    assert "the tape is dropped" in sqlite("disable", path, "--drop").stdout
    assert value(sqlite("status", path, "--json"))["tape"] is None


def test_a_replica_follows_and_the_file_goes_back(path: Path, tmp_path: Path) -> None:
    sqlite("enable", path)
    execute(path, "INSERT INTO t VALUES (1, 'x')")
    replica = tmp_path / "replica.db"
    done = {"transactions": 0, "changes": 0, "last": 1, "copied": True, "excluded": []}
    assert value(tape("apply", path, replica, "--json")) == done
    execute(path, "UPDATE t SET a = 'it''s'")
    assert "1 changes" in tape("apply", path, replica).stdout
    assert "~ t #1  a: 'x' → 'it''s'" in tape("show", path).stdout
    assert value(tape("revert", path, "--last", 1, "--json")) == {"changes": 1, "to": 1}
    shown = value(tape("show", path, "--after", 2, "--json"))["transactions"]
    assert [(c["type"], c["after"]["a"]) for group in shown for c in group["changes"]] == [("update", "'x'")]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["enable", "none.db"], 2, "no file"),
        (["enable", "{path}", "--mode", "all"], 2, "unknown capture mode"),
        (["purge", "{path}", "--upto", "1"], 3, "no capture table"),
    ],
)
def test_sqlite_commands_end_with_a_reason_and_its_code(path: Path, words: list[str], code: int, said: str) -> None:
    done = sqlite(*[word.format(path=path) for word in words])
    assert done.exit_code == code
    assert said in done.stderr
    assert "fix:" in done.stderr


def test_tape_commands_end_with_a_reason_and_its_code(path: Path, tmp_path: Path) -> None:
    assert tape("show", path).exit_code == 3
    sqlite("enable", path)
    assert tape("revert", path).exit_code == 2
    assert tape("revert", path, "--to", 1, "--last", 1).exit_code == 2
    assert tape("revert", path, "--to", 77).exit_code == 6
    execute(path, "ALTER TABLE t ADD COLUMN b")
    failed = tape("apply", path, tmp_path / "replica.db", "--json")
    assert failed.exit_code == 8
    assert "tailrace sqlite enable" in json.loads(failed.stdout)["error"]["fix"]
