"""The version of a capture table: who may read it, and what a file of an earlier build becomes."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import apsw
import pytest
from typer.testing import CliRunner

from tailrace.capture import CdcVersion, Tape, capture, disable, enable
from tailrace.cli import app as cli
from tailrace.errors import PreflightError


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as opened:
        opened.execute("CREATE TABLE t(id INTEGER PRIMARY KEY, a)")
        yield opened


def stored(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    return connection.execute("SELECT * FROM turso_cdc_version").fetchall()


def ids(connection: sqlite3.Connection) -> list[object]:
    return [row.id for batch in Tape(connection).iterate() for row in batch if row.type != 2]


def test_only_the_second_version_has_commit_records() -> None:
    assert [version for version in CdcVersion if version.has_commit_record] == [CdcVersion.V2]
    assert [str(version) for version in CdcVersion] == ["v1", "v2", "triggers-v1"]
    assert CdcVersion("v1") is CdcVersion.V1


def test_the_tape_of_an_earlier_build_is_read_as_it_is_and_named_by_the_next_enable(
    connection: sqlite3.Connection,
) -> None:
    enable(connection)
    connection.execute("INSERT INTO t(id) VALUES (1)")
    connection.execute("UPDATE turso_cdc_version SET version = 'v2'")
    assert Tape(connection).version is CdcVersion.TRIGGERS
    assert ids(connection) == [1]
    assert enable(connection).version == "triggers-v1"
    assert stored(connection) == [("turso_cdc", "triggers-v1")]
    connection.execute("INSERT INTO t(id) VALUES (2)")
    assert ids(connection) == [1, 2]


def test_a_stopped_tape_of_triggers_is_not_continued_by_a_connection() -> None:
    with closing(apsw.Connection(":memory:")) as connection:
        connection.execute("CREATE TABLE t(id INTEGER PRIMARY KEY, a)")
        enable(connection)
        disable(connection)
        with pytest.raises(PreflightError, match="tape of triggers"):
            capture(connection, "full")
        capture(connection, "full,other")
        connection.execute("INSERT INTO t(id) VALUES (1)")
        assert [row.id for batch in Tape(connection, "other").iterate() for row in batch] == [1, None]


def test_an_unknown_version_is_refused(connection: sqlite3.Connection) -> None:
    enable(connection)
    connection.execute("UPDATE turso_cdc_version SET version = 'v9'")
    with pytest.raises(PreflightError, match="v9"):
        Tape(connection)


APPLICATION = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=300)
connection.execute("PRAGMA synchronous = OFF")
number = 0
while True:
    number += 1
    connection.execute("INSERT INTO t(id) VALUES (?)", (number,))
    print(number, flush=True)
"""


def test_a_file_in_use_is_upgraded_without_a_change_lost_or_doubled(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with closing(sqlite3.connect(path, isolation_level=None, timeout=300)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE t(id INTEGER PRIMARY KEY, a)")
        connection.execute("CREATE TABLE w(k PRIMARY KEY) WITHOUT ROWID")
        enable(connection)
        connection.execute("UPDATE turso_cdc_version SET version = 'v2'")
    with subprocess.Popen([sys.executable, "-c", APPLICATION, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for _ in range(50):
                assert process.stdout.readline()
            done = CliRunner().invoke(cli, ["sqlite", "enable", str(path)])
            assert done.exit_code == 0, done.output
            seen = [int(process.stdout.readline()) for _ in range(50)]
        finally:
            process.kill()
    with closing(sqlite3.connect(path)) as connection:
        assert stored(connection) == [("turso_cdc", "triggers-v1")]
        rows = [number for (number,) in connection.execute("SELECT id FROM t ORDER BY 1")]
        assert ids(connection) == rows
        assert rows[-1] >= seen[-1]
