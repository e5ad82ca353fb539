"""rqlite's API as the source uses it."""

from __future__ import annotations

import pickle
from pathlib import Path

import pyarrow as pa
import pytest

from tailrace.errors import ConfigError, UnavailableError
from tailrace.model.change import START
from tailrace.option.table import TableOptions
from tailrace.option.value import OptionContext, Secret
from tailrace.source.rqlite import catalog
from tailrace.source.rqlite.api import Api, ApiTls, QueryRefusedError
from tailrace.source.rqlite.option import AuthOptions, RqliteOptions
from tailrace.source.rqlite.query import fetch_by_key
from tailrace.source.rqlite.source import RqliteSource
from tailrace.source.source import SourceContext
from tailrace.source.sqlite.catalog import describe
from tailrace.system.http_listener import secure
from tailrace.testing.certificate import make_authority
from tests.support.rqlite_following import free_port, make_source
from tests.support.rqlite_node import RqliteNode

NOWHERE = "http://127.0.0.1:1/cdc"


def test_a_query_answers_with_exact_integers() -> None:
    with RqliteNode(NOWHERE) as node:
        assert Api(node.url).query("SELECT ?, ?, NULL", 2**60 + 1, "x") == [[2**60 + 1, "x", None]]


def test_refused_sql_and_a_missing_server_are_different_errors() -> None:
    with RqliteNode(NOWHERE) as node, pytest.raises(QueryRefusedError, match="no such table"):
        Api(node.url).query("SELECT * FROM absent")
    with pytest.raises(UnavailableError, match="does not answer"):
        Api(f"http://127.0.0.1:{free_port()}", "user", "canary").query("SELECT 1")


def test_a_node_reports_its_service_and_what_it_has_yet_to_send() -> None:
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


def test_an_api_may_have_certificates_of_its_own_authority(tmp_path: Path) -> None:
    authority = make_authority(tmp_path)
    files = [str(file) for file in (authority.ca_file, authority.client_cert_file, authority.client_key_file)]
    context = secure(str(authority.cert_file), str(authority.key_file), None)
    with RqliteNode(NOWHERE, tls=context) as node:
        assert Api(node.url, tls=ApiTls(files[0])).query("SELECT 1") == [[1]]
        with pytest.raises(UnavailableError, match="certificate is not accepted") as caught:
            Api(node.url).query("SELECT 1")
        assert "api_tls.ca" in (caught.value.fix or "")
    mutual = secure(str(authority.cert_file), str(authority.key_file), str(authority.ca_file))
    with RqliteNode(NOWHERE, tls=mutual) as node:
        assert Api(node.url, tls=ApiTls(*files)).query("SELECT 1") == [[1]]
        with pytest.raises(UnavailableError, match="does not answer"):
            Api(node.url, tls=ApiTls(files[0])).query("SELECT 1")
    expired = secure(str(authority.expired_file), str(authority.key_file), None)
    with RqliteNode(NOWHERE, tls=expired) as node, pytest.raises(UnavailableError, match="expired"):
        Api(node.url, tls=ApiTls(files[0])).query("SELECT 1")


def test_unusable_certificates_are_reported_as_such(tmp_path: Path) -> None:
    authority = make_authority(tmp_path)
    for tls in (
        ApiTls(str(tmp_path / "absent")),
        ApiTls(cert=str(authority.cert_file), key=str(authority.client_key_file)),
    ):
        with pytest.raises(ConfigError, match="api_tls cannot be used") as caught:
            Api("https://127.0.0.1:1", tls=tls).query("SELECT 1")
        assert caught.value.fix is not None


def test_the_options_for_the_api_reach_it(tmp_path: Path) -> None:
    given = {"api": "https://n:4001", "api_tls": {"ca": "ca.pem", "cert": "c.pem", "key": "c.key"}}
    place = OptionContext("p", tmp_path, tmp_path / "state")
    options = RqliteOptions.model_validate({"type": "rqlite", **given}, context=place)
    source = RqliteSource(options, SourceContext("p", TableOptions(), tmp_path))
    assert source.apis()[""].tls == ApiTls(*(str(tmp_path / name) for name in ("ca.pem", "c.pem", "c.key")))


def test_rows_are_fetched_without_the_columns_that_are_gone() -> None:
    sql = "CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT, w TEXT)"
    with RqliteNode(NOWHERE) as node:
        node.execute(sql, "INSERT INTO t VALUES (1, 'a', 'b')", "ALTER TABLE t DROP COLUMN w")
        table = catalog.begin(None, describe(sql), "svc", START, rowids=False)
        keys = pa.table({"id": [1, 2]})
        assert fetch_by_key(Api(node.url), table, keys).to_pylist() == [{"id": 1, "v": "a", "w": None}]
        node.execute("DROP TABLE t")
        assert fetch_by_key(Api(node.url), table, keys).num_rows == 0


def test_neither_source_nor_api_show_a_password(tmp_path: Path) -> None:
    source = make_source(
        tmp_path, 8099, api="http://127.0.0.1:4001", api_auth=AuthOptions(username="reader", password=Secret("canary"))
    )
    assert "canary" not in repr(source) + repr(source.apis())
    assert pickle.loads(pickle.dumps(source)) == source


def test_a_check_says_what_is_wrong_with_a_cluster(tmp_path: Path) -> None:
    with RqliteNode(NOWHERE, service="svc") as node:
        node.execute("CREATE TABLE good (id INTEGER PRIMARY KEY)", "CREATE TABLE bad (rowid, _rowid_, oid)")
        findings = make_source(tmp_path, free_port(), api={"other": node.url}).check()
        assert [one.level for one in findings] == ["ok", "error", "error", "ok"]
        assert "sends its changes as service svc" in findings[1].message
        single = make_source(tmp_path, free_port(), api=node.url)
        assert [str(table.table) for table in single.tables()] == ["svc.good"]
        [finding] = [one for one in single.check() if one.level == "error"]
        assert finding.table == "svc.bad"
        single.prepare()  # it stops that table alone
    (tmp_path / "schema.sql").write_text("CREATE TABLE t (")
    findings = make_source(tmp_path, free_port(), schema_file=tmp_path / "schema.sql").check()
    assert [one.level for one in findings] == ["ok", "error", "warning"]


def test_check_warns_of_dropped_changes_and_of_tables_that_every_change_copies(tmp_path: Path) -> None:
    with RqliteNode("http://127.0.0.1:1/cdc") as node:
        node.execute("CREATE TABLE sums (w TEXT PRIMARY KEY, n INT, twice INT AS (n * 2) VIRTUAL)")
        node.overflowed = 7
        said = [f"{one.level}: {one.message}" for one in make_source(tmp_path, 0, api=node.url).check()]
    assert any(one.startswith("warning") and "dropped 7" in one for one in said)
    assert any(one.startswith("warning") and "every change copies the table again" in one for one in said)


def test_another_node_is_asked_when_the_first_does_not_answer(tmp_path: Path) -> None:
    with RqliteNode("http://127.0.0.1:1/cdc", service="svc") as node:
        node.execute("CREATE TABLE t (id INTEGER PRIMARY KEY)")
        source = make_source(tmp_path, 0, api=["http://127.0.0.1:1", node.url])
        assert source.services() == ["svc"]
        assert [str(table.table) for table in source.tables()] == ["svc.t"]
        by_service = make_source(tmp_path, 0, api={"svc": [node.url, "http://127.0.0.1:1"]})
        assert [str(table.table) for table in by_service.tables()] == ["svc.t"]
