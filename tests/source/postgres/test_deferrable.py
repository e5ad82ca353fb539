"""A primary key that is deferrable may be violated for a while, so it does not identify rows."""

from __future__ import annotations

from tailrace.source.postgres import event_trigger
from tailrace.source.postgres.catalog import describe, list_published, list_tables
from tailrace.source.postgres.connection import session
from tests.support.database import PostgresDatabase


def test_a_deferrable_primary_key_is_no_key_for_the_catalog_and_for_the_trigger(database: PostgresDatabase) -> None:
    database.run(
        "CREATE TABLE checked_late (id int PRIMARY KEY DEFERRABLE, a text)",
        "CREATE TABLE checked_last (id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, a text)",
        "CREATE TABLE checked (id int PRIMARY KEY, a text)",
        "CREATE PUBLICATION pub FOR TABLE checked, checked_last, checked_late",
    )
    with session(database.dsn, "testing") as connection:
        tables = describe(connection, list_tables(connection), list_published(connection, "pub"))
        assert {each.schema.table.name: each.schema.key for each in tables} == {
            "checked": ("id",),
            "checked_last": (),
            "checked_late": (),
        }
        event_trigger.install(connection)
    described = database.rows(
        "SELECT relname::text, tailrace.describe(oid) -> 'primary' FROM pg_class"
        " WHERE relnamespace = 'public'::regnamespace AND relkind = 'r' ORDER BY 1"
    )
    assert described == [("checked", [1]), ("checked_last", None), ("checked_late", None)]
