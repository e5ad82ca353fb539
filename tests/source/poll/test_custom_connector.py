"""Connectors that are not part of tailrace, written as their authors would: one for SQL, one for a list of records."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tailrace.errors import UnavailableError
from tailrace.model.digest import row_digests
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.option.table import TableOptions
from tailrace.source.follower import Limit
from tailrace.source.poll import connector
from tailrace.source.poll.connector import Connector, ConnectorSession, Page, Polled, Query
from tailrace.source.poll.option import path_of
from tailrace.source.poll.sql_session import SqlSession
from tailrace.testing.replay import SourceReplay
from tests.support.source_making import make_polled

COLUMNS = tuple(Column(name, kind) for name, kind in (("id", pa.int64()), ("v", pa.string()), ("rev", pa.int64())))
ITEMS = TableSchema(TableName("main", "t"), COLUMNS, ("id",), upstream_id="t")
Rows = dict[int, tuple[str, int]]


class SqlItems(SqlSession):
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def tables(self) -> list[TableSchema]:
        return [ITEMS]

    def ask(self, sql: str, table: Polled | None = None) -> Sequence[tuple[Any, ...]]:
        return self._connection.execute(sql).fetchall()


class SqlItemsConnector(Connector):
    @contextmanager
    def open(self) -> Iterator[SqlItems]:
        with closing(sqlite3.connect(path_of(self.dsn))) as connection:
            yield SqlItems(connection)


class ListedItems(ConnectorSession):
    def __init__(self, path: Path) -> None:
        self._path = path

    def tables(self) -> list[TableSchema]:
        return [ITEMS]

    def select(self, query: Query) -> Page:
        after, upto = query.stretch
        rows = [dict(zip(("id", "v", "rev"), row, strict=True)) for row in json.loads(self._path.read_text())]
        placed = sorted((tuple(row[name] for name in query.order), row) for row in rows)
        if query.keys is not None:
            placed = [(place, row) for place, row in placed if row["id"] in query.keys.column("id").to_pylist()]
        if after:
            whole = len(after) == len(query.order)
            placed = [one for one in placed if (one[0] > after if whole else one[0][: len(after)] >= after)]
        if upto is not None:
            whole = len(upto) == len(query.order)
            placed = [one for one in placed if (one[0] <= upto if whole else one[0][: len(upto)] < upto)]
        placed = placed[: query.rows]
        found = pa.array([row for _, row in placed], ITEMS.row_type)
        shown = [found.field(column.name) for column in query.columns.columns]
        page = pa.StructArray.from_arrays(shown, fields=list(query.columns.row_type))
        hashes = row_digests(found.flatten()) if query.hashed else None
        return Page(page, None, hashes, placed[-1][0] if placed else None)


class ListedItemsConnector(Connector):
    @contextmanager
    def open(self) -> Iterator[ListedItems]:
        path = path_of(self.dsn)
        if not path.exists():
            raise UnavailableError(f"there is no file {path}", fix="write one")
        yield ListedItems(path)


def write(scheme: str, path: Path, rows: Rows) -> None:
    listed = [(key, *values) for key, values in rows.items()]
    if scheme == "listed":
        path.write_text(json.dumps(listed))
        return
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE IF NOT EXISTS t (id INTEGER PRIMARY KEY, v TEXT, rev INTEGER)")
        connection.execute("DELETE FROM t")
        connection.executemany("INSERT INTO t VALUES (?, ?, ?)", listed)


@pytest.fixture(params=["sqlitems", "listed"])
def scheme(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    classes = {"sqlitems": "SqlItemsConnector", "listed": "ListedItemsConnector"}
    points = [EntryPoint(name, f"{__name__}:{made}", connector.GROUP) for name, made in classes.items()]
    monkeypatch.setattr(connector, "entry_points", lambda group: EntryPoints(points).select(group=group))
    return str(request.param)


def test_a_connector_with_few_methods_is_copied_followed_and_compared(scheme: str, tmp_path: Path) -> None:
    path = tmp_path / "items"
    rows: Rows = {key: ("copied", key) for key in range(35)}
    write(scheme, path, rows)
    defaults = {"updated_at": "rev", "deletes": {"full_diff": {"every_cycles": 1}}}
    source = make_polled(
        f"{scheme}:///{path}",
        tmp_path / "known",
        TableOptions.model_validate({"defaults": defaults}),
        page_rows=7,
        chunk_rows=15,
        interval=1e-6,
        idle_interval=1e-6,
    )
    assert [finding.level for finding in source.check()] == ["ok"] * len(source.check())
    with SourceReplay(source, Limit(rows=100_000, bytes=1 << 30)) as replay:

        def holds() -> Rows:
            return {row[0]: (row[1], row[2]) for row in replay.contents()["main.t"]}

        replay.catch_up()
        assert holds() == rows
        rows |= {key: ("changed", 100 + key) for key in range(30, 45)}
        write(scheme, path, rows)
        replay.catch_up()
        assert holds() == rows
        rows = {key: values for key, values in rows.items() if key % 5}
        write(scheme, path, rows)
        replay.catch_up()
        assert holds() == rows


def test_a_connector_that_cannot_be_opened_is_a_finding() -> None:
    [finding] = ListedItemsConnector("listed:///nowhere").check()
    assert (finding.level, finding.fix) == ("error", "write one")
