"""A receiver process whose connection breaks while the server decodes."""

from __future__ import annotations

from psycopg import conninfo

from tailrace.source.postgres.offset import before
from tailrace.source.postgres.source import PostgresSource
from tailrace.testing.wait import wait_until
from tests.support.database import PostgresDatabase
from tests.support.postgres_receiving import Session, mark, server_lsn
from tests.support.proxy import Proxy
from tests.support.source_making import with_options

DECODING = "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'COPY%pg_logical_slot_peek%' AND state = 'active'"


def test_a_connection_that_breaks_while_the_server_decodes_a_backlog_ends_no_receiver(
    database: PostgresDatabase, session: Session, source: PostgresSource
) -> None:
    session.execute("INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 400000) i")
    goal = before(server_lsn(session))
    with Proxy("127.0.0.1", database.server.port) as proxy:
        address = conninfo.make_conninfo(source.dsn, host="127.0.0.1", port=proxy.port)
        with with_options(source, dsn=address).receiver() as child:
            wait_until(lambda: bool(session.execute(DECODING).fetchall()))
            proxy.cut()

            def arrived() -> bool:
                child.require_alive()
                return mark(source) >= goal

            wait_until(arrived)
