"""Files that Turso keeps in MVCC mode are named as such, and capture and MVCC exclude each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.capture.replica import open_file
from tailrace.errors import ConfigError, PreflightError
from tailrace.source.sqlite.connection import CapturedFile, EngineName

RUN = """
import sys, turso
connection = turso.connect(sys.argv[1], isolation_level=None)
for sql in sys.argv[2:]:
    try:
        connection.execute(sql).fetchall()
    except turso.Error as error:
        print(error)
connection.close()
"""

TABLE = "CREATE TABLE IF NOT EXISTS t(id INTEGER PRIMARY KEY)"
CAPTURE = "PRAGMA capture_data_changes_conn('full')"
MVCC = "PRAGMA journal_mode = 'mvcc'"


def run(path: Path, *statements: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(path), *statements], capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "turso.db"


def test_a_captured_connection_of_turso_stays_out_of_mvcc(path: Path) -> None:
    assert "while CDC capture is active" in run(path, TABLE, CAPTURE, MVCC)
    with open_file(path, writes=False) as connection:
        assert connection.execute("SELECT count(*) FROM turso_cdc").fetchone()[0] == 0


@pytest.mark.parametrize("engine", ["sqlite", "turso"])
def test_a_file_in_mvcc_mode_is_no_source_and_says_why(path: Path, engine: EngineName) -> None:
    run(path, TABLE, MVCC, CAPTURE, "INSERT INTO t VALUES (1)")
    with (
        pytest.raises(PreflightError, match="MVCC mode") as refused,
        CapturedFile(engine, str(path)).snapshot("looking") as connection,
    ):
        connection.execute("SELECT 1 FROM sqlite_schema").fetchall()
    assert "journal_mode = 'wal'" in (refused.value.fix or "")


def test_the_fix_for_a_file_in_mvcc_mode_makes_it_readable(path: Path) -> None:
    run(path, TABLE, MVCC, "INSERT INTO t VALUES (1)")
    with pytest.raises(ConfigError, match="MVCC mode") as refused, open_file(path):
        pass
    run(path, (refused.value.fix or "").partition("Turso: ")[2])
    with open_file(path) as connection:
        assert connection.execute("SELECT id FROM t").fetchall() == [(1,)]
