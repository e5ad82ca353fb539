"""What an error of a file means, whatever its tables are called."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tailrace.errors import DamagedError, PreflightError, UnavailableError
from tailrace.source.sqlite.connection import CapturedFile, EngineName


@pytest.mark.parametrize("engine", ["sqlite", "turso"])
@pytest.mark.parametrize("name", ["corrupt", "malformed", "locks", "busy", "not a database"])
def test_a_table_name_does_not_decide_what_an_error_means(tmp_path: Path, engine: EngineName, name: str) -> None:
    path = tmp_path / "a.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE t (a)")
    with (
        pytest.raises(UnavailableError, match="could not be read") as caught,
        CapturedFile(engine, str(path)).session("reading") as opened,
    ):
        opened.execute(f'SELECT * FROM "{name}"').fetchall()
    assert "locked" not in caught.value.message


@pytest.mark.parametrize("engine", ["sqlite", "turso"])
def test_a_file_that_is_no_database_is_named_as_such(tmp_path: Path, engine: EngineName) -> None:
    path = tmp_path / "a.db"
    path.write_bytes(b"not a database at all" * 1000)
    with (
        pytest.raises((PreflightError, DamagedError), match="is not an SQLite database"),
        CapturedFile(engine, str(path)).session("reading") as connection,
    ):
        connection.execute("SELECT * FROM sqlite_schema").fetchall()
