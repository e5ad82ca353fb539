"""The shop and its traffic: the same for everyone who gives the same seed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from tailrace.demo.server import EmbeddedPostgres
from tailrace.demo.traffic import Traffic
from tailrace.demo.workload import TABLES, create_shop, load_shop
from tailrace.testing.wait import wait_until
from tests.support.database import PostgresDatabase


def _open_shop(database: PostgresDatabase, scale: float = 0.02) -> dict[str, int]:
    with database.connect() as conn:
        create_shop(conn)
        return load_shop(conn, scale)


def _content(database: PostgresDatabase) -> dict[str, str]:
    return {
        table: database.rows(f"SELECT md5(coalesce(string_agg(t::text, '|' ORDER BY t::text), '')) FROM {table} t")[0][
            0
        ]
        for table in TABLES
    }


def test_the_shop_has_the_rows_it_says(database: PostgresDatabase) -> None:
    counts = _open_shop(database)
    assert counts["orders"] == 200
    assert counts == {table: database.rows(f"SELECT count(*) FROM {table}")[0][0] for table in TABLES}


def test_orders_have_ten_columns_and_documents_are_stored_out_of_line(database: PostgresDatabase) -> None:
    _open_shop(database)
    columns = database.rows("SELECT count(*) FROM information_schema.columns WHERE table_name = 'orders'")
    assert columns == [(10,)]
    toast = "SELECT pg_relation_size(reltoastrelid) > 0 FROM pg_class WHERE relname = 'documents'"
    assert database.rows(toast) == [(True,)]


@pytest.mark.parametrize("truncates", [False, True])
def test_the_same_seed_leaves_the_same_rows(
    truncates: bool, postgres: EmbeddedPostgres, make_database: Callable[[EmbeddedPostgres], PostgresDatabase]
) -> None:
    contents, counts = [], []
    for seed in (7, 7, 8):
        database = make_database(postgres)
        _open_shop(database)
        traffic = Traffic(database.dsn, seed, truncates=truncates)
        traffic.run(300)
        contents.append(_content(database))
        counts.append(traffic.counts)
    assert contents[0] == contents[1]
    assert counts[0] == counts[1]
    assert contents[0] != contents[2]


def test_every_kind_of_change_reaches_the_log(database: PostgresDatabase) -> None:
    _open_shop(database)
    database.run(
        "CREATE PUBLICATION p FOR ALL TABLES", "SELECT pg_create_logical_replication_slot('follower', 'pgoutput')"
    )
    traffic = Traffic(database.dsn, seed=3, truncates=True)
    traffic.run(600)
    changes = (
        "pg_logical_slot_peek_binary_changes('follower', NULL, NULL, 'proto_version', '1', 'publication_names', 'p')"
    )
    kinds = dict(database.rows(f"SELECT substr(data, 1, 1), count(*) FROM {changes} GROUP BY 1"))
    assert kinds[b"I"] == traffic.counts["insert"]
    assert kinds[b"U"] == traffic.counts["update"]
    assert kinds[b"D"] == traffic.counts["delete"]
    assert kinds[b"T"] == traffic.counts["truncate"]
    moved = f"SELECT count(*) FROM {changes} WHERE substr(data, 1, 1) = 'U' AND substr(data, 6, 1) = 'K'"
    assert database.rows(moved)[0][0] > 10
    assert traffic.counts["undone"] > 0


def test_traffic_goes_on_until_stopped(database: PostgresDatabase) -> None:
    _open_shop(database)
    with Traffic(database.dsn, rate=500) as traffic:
        wait_until(lambda: traffic.counts.get("transactions", 0) >= 50)
    stopped_at = traffic.counts
    assert _content(database) == _content(database)
    assert traffic.counts == stopped_at


def test_traffic_goes_on_after_a_crash_of_the_server(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / "data") as server, PostgresDatabase(server, "shop") as database:
        _open_shop(database)
        with Traffic(database.dsn) as traffic:
            wait_until(lambda: traffic.counts.get("transactions", 0) >= 20)
            server.restart("immediate")
            wait_until(lambda: traffic.counts.get("reconnects", 0) >= 1)
            reached = traffic.counts["transactions"]
            wait_until(lambda: traffic.counts["transactions"] >= reached + 20)


def test_an_error_that_is_not_the_connection_is_raised_when_it_stops(database: PostgresDatabase) -> None:
    traffic = Traffic(database.dsn).start()
    with pytest.raises(psycopg.errors.UndefinedTable):
        traffic.stop()
