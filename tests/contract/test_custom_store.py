"""A store that is not part of tailrace, written as its author would: three methods and what differs in its SQL."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tailrace.extend import Row, RunSql, StateDatabase, StoreAddress, UnavailableError, Values
from tailrace.testing.store import StoreContract


class CommonFile(StateDatabase):
    catalog = "SELECT name FROM sqlite_schema"

    def __init__(self, path: Path) -> None:
        self.place = str(path)
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.row_factory = sqlite3.Row

    @contextmanager
    def transaction(self, *, writes: bool = True) -> Iterator[RunSql]:
        try:
            self._connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
            with self._connection:
                yield self._run
        except sqlite3.Error as error:
            raise UnavailableError(f"cannot use {self.place}: {error}", fix="check who else uses it") from error

    def _run(self, statement: str, values: Values) -> list[Row]:
        return [dict(row) for row in self._connection.execute(statement, dict(values))]

    def close(self) -> None:
        self._connection.close()


@dataclass(frozen=True)
class CommonStore(StoreAddress):
    """One SQLite file for all pipelines of a machine."""

    path: Path = Path("pipelines.db")

    def connect(self, *, writes: bool) -> StateDatabase:
        return CommonFile(self.path)


class TestCommonStore(StoreContract):
    @pytest.fixture
    def address(self, tmp_path: Path) -> StoreAddress:
        return CommonStore("shop", tmp_path, tmp_path / "pipelines.db")
