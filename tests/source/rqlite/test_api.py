"""rqlite's API as the source uses it."""

from __future__ import annotations

import pickle
from pathlib import Path

import pyarrow as pa
import pytest

from tailrace.change import START
from tailrace.errors import PreflightError, UnavailableError
from tailrace.source.rqlite import catalog
from tailrace.source.rqlite.api import Api, QueryRefusedError
from tailrace.source.rqlite.query import fetch_by_key
from tailrace.source.sqlite.catalog import describe
from tailrace.testing.rqlite import RqliteNode
from tests.source.rqlite.following import free_port, make_source

NOWHERE = "http://127.0.0.1:1/cdc"


def test_a_query_answers_with_exact_integers() -> None:
    with RqliteNode(NOWHERE) as node:
        assert Api(node.url).query("SELECT ?, ?, NULL", 2**60 + 1, "x") == [[2**60 + 1, "x", None]]


def test_refused_sql_and_a_missing_server_are_told_apart() -> None:
    with RqliteNode(NOWHERE) as node, pytest.raises(QueryRefusedError, match="no such table"):
        Api(node.url).query("SELECT * FROM absent")
    with pytest.raises(UnavailableError, match="does not answer"):
        Api(f"http://127.0.0.1:{free_port()}", "user", "canary").query("SELECT 1")


def test_a_node_tells_its_service_and_what_it_has_yet_to_send() -> None:
    with RqliteNode(NOWHERE, service="svc") as node:
        node.execute("CREATE TABLE t (v)", "INSERT INTO t VALUES (1)")
        pending = Api(node.url).pending()
    assert pending is not None
    assert (pending.service, pending.batches) == ("svc", 1)


def test_tables_are_listed_without_what_is_not_the_applications() -> None:
    with RqliteNode(NOWHERE) as node:
        node.execute("CREATE TABLE t (id INTEGER PRIMARY KEY AUTOINCREMENT)", "CREATE VIEW v AS SELECT 1")
        node.execute("CREATE TABLE w (k TEXT PRIMARY KEY) WITHOUT ROWID", "CREATE TABLE _rqlite_state (v)")
        listed = catalog.ask_tables(Api(node.url))
    assert list(listed) == ["t", "w"]


def test_rows_are_fetched_by_their_keys() -> None:
    sql = "CREATE TABLE t (a TEXT, b BLOB, v REAL, PRIMARY KEY (a, b))"
    with RqliteNode(NOWHERE) as node:
        node.execute(sql, "INSERT INTO t VALUES ('x', x'00FF', 2.0), ('y', x'01', 9e999), ('z', x'', NULL)")
        table = catalog.begin(None, describe(sql), "svc", START, rowids=True)
        keys = pa.table({"a": ["x", "y", "gone"], "b": pa.array([b"\x00\xff", b"\x01", b""], pa.binary())})
        assert fetch_by_key(Api(node.url), table, keys).to_pylist() == [
            {"a": "x", "b": b"\x00\xff", "v": 2.0, "rowid": 1},
            {"a": "y", "b": b"\x01", "v": float("inf"), "rowid": 2},
        ]


def test_neither_source_nor_api_show_a_password(tmp_path: Path) -> None:
    source = make_source(tmp_path, 8099, api="http://127.0.0.1:4001", api_username="reader", api_password="canary")
    assert "canary" not in repr(source) + repr(source.apis())
    assert pickle.loads(pickle.dumps(source)) == source


def test_a_check_says_what_is_wrong_with_a_cluster(tmp_path: Path) -> None:
    with RqliteNode(NOWHERE, service="svc") as node:
        node.execute("CREATE TABLE good (id INTEGER PRIMARY KEY)", "CREATE TABLE bad (rowid, _rowid_, oid)")
        findings = make_source(tmp_path, free_port(), api=(("other", node.url),)).check()
        assert [one.level for one in findings] == ["ok", "error", "error", "ok"]
        assert "sends its changes as service svc" in findings[1].message
        single = make_source(tmp_path, free_port(), api=node.url)
        assert [str(table.table) for table in single.tables()] == ["svc.good"]
        with pytest.raises(PreflightError, match=r"svc\.bad"):
            single.prepare()
    (tmp_path / "schema.sql").write_text("CREATE TABLE t (")
    findings = make_source(tmp_path, free_port(), schema_file=str(tmp_path / "schema.sql")).check()
    assert [one.level for one in findings] == ["ok", "error", "warning"]
