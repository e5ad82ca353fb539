"""The proxy breaks connections exactly as asked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tailrace.demo.server import EmbeddedPostgres
from tailrace.testing.certificate import make_authority
from tests.support.proxy import Proxy


@pytest.fixture
def proxy(postgres: EmbeddedPostgres) -> Iterator[Proxy]:
    with Proxy("127.0.0.1", postgres.port) as proxy:
        yield proxy


def _connect(proxy: Proxy, **options: Any) -> psycopg.Connection:
    return psycopg.connect(
        host="127.0.0.1", port=proxy.port, user="postgres", dbname="postgres", autocommit=True, **options
    )


def _answers(conn: psycopg.Connection) -> bool:
    return conn.execute("SELECT 1").fetchone() == (1,)


def test_what_goes_through_arrives_whole(proxy: Proxy) -> None:
    with _connect(proxy) as conn:
        row = conn.execute("SELECT repeat('x', 5000000)").fetchone()
        assert row is not None
        assert len(row[0]) == 5_000_000


def test_a_cut_ends_every_connection_and_takes_new_ones(proxy: Proxy) -> None:
    first, second = _connect(proxy), _connect(proxy)
    proxy.cut()
    assert proxy.connections == 0
    for conn in (first, second):
        with pytest.raises(psycopg.OperationalError):
            conn.execute("SELECT 1")
        conn.close()
    with _connect(proxy) as conn:
        assert _answers(conn)


def test_a_black_hole_neither_answers_nor_closes_until_restored(proxy: Proxy) -> None:
    with _connect(proxy) as conn:
        proxy.blackhole()
        conn.pgconn.send_query(b"SELECT 1")
        conn.pgconn.flush()
        with pytest.raises(psycopg.errors.ConnectionTimeout):
            _connect(proxy, connect_timeout=2)
        conn.pgconn.consume_input()
        assert conn.pgconn.is_busy()
        proxy.restore()
        result = conn.pgconn.get_result()
        assert result is not None
        assert result.get_value(0, 0) == b"1"
        while conn.pgconn.get_result():
            pass


def test_a_cut_ends_what_a_black_hole_holds(proxy: Proxy) -> None:
    with _connect(proxy) as conn:
        proxy.blackhole()
        proxy.cut()
        with pytest.raises(psycopg.OperationalError):
            conn.execute("SELECT 1")


def test_a_delay_holds_both_directions(proxy: Proxy) -> None:
    with _connect(proxy) as conn:
        proxy.delay(0.1)
        started = time.monotonic()
        assert _answers(conn)
        assert time.monotonic() - started >= 0.2
        proxy.restore()


def test_refusal_leaves_open_connections_alone_and_ends_on_the_same_port(proxy: Proxy) -> None:
    port = proxy.port
    with _connect(proxy) as conn:
        proxy.refuse()
        proxy.refuse()
        with pytest.raises(psycopg.OperationalError, match="refused"):
            _connect(proxy)
        assert _answers(conn)
    proxy.restore()
    assert proxy.port == port
    with _connect(proxy) as conn:
        assert _answers(conn)


def test_a_target_that_is_down_closes_the_connection() -> None:
    with Proxy("127.0.0.1", 1) as proxy, pytest.raises(psycopg.OperationalError):
        _connect(proxy, sslmode="disable", gssencmode="disable")


def test_tls_can_be_put_before_a_server_that_has_none(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    authority = make_authority(tmp_path / "tls")
    assert make_authority(tmp_path / "tls") == authority
    with Proxy("127.0.0.1", postgres.port, tls=authority) as proxy:
        with _connect(proxy, sslmode="verify-full", sslrootcert=str(authority.ca_file)) as conn:
            assert conn.pgconn.ssl_in_use
            assert conn.execute("SELECT length(repeat('x', 1000000))").fetchone() == (1_000_000,)
        with pytest.raises(psycopg.OperationalError):
            _connect(proxy, sslmode="disable")
        other = make_authority(tmp_path / "other")
        with pytest.raises(psycopg.OperationalError, match="SSL error"):
            _connect(proxy, sslmode="verify-full", sslrootcert=str(other.ca_file))
