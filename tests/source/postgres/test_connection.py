"""What an error of Postgres means never depends on the name of a table."""

from __future__ import annotations

import psycopg
import pytest

from tailrace.errors import PreflightError, TailraceError, UnavailableError
from tailrace.source.postgres.connection import Replication, later_settings, translate
from tailrace.source.postgres.slot import snapshot_slot_command
from tests.support.database import PostgresDatabase

NAMES = ["connections", "timeout", "terminating", "permission denied", "authentication failed", "is active for PID 1"]


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_table_is_never_taken_for_a_server_that_is_down(name: str) -> None:
    found = translate(psycopg.errors.UndefinedTable(f'relation "public.{name}" does not exist'), "copying")
    assert type(found) is TailraceError


@pytest.mark.parametrize("name", NAMES)
def test_a_name_within_quotes_does_not_count_where_there_is_only_text(name: str) -> None:
    found = translate(psycopg.ProgrammingError(f'[libpq] relation "public.{name}" is odd'), "copying")
    assert type(found) is TailraceError


def test_a_server_that_closed_the_connection_is_tried_again() -> None:
    text = "[libpq] server closed the connection unexpectedly"
    assert isinstance(translate(psycopg.DatabaseError(text), "copying"), UnavailableError)


def test_a_role_that_is_not_there_is_a_refused_login() -> None:
    text = 'connection failed: FATAL: role "shop" does not exist'
    assert isinstance(translate(psycopg.OperationalError(text), "connecting"), PreflightError)


def test_a_statement_that_took_too_long_names_the_timeout() -> None:
    found = translate(psycopg.errors.QueryCanceled("canceling statement due to statement timeout"), "copying")
    assert isinstance(found, UnavailableError)
    assert "statement_timeout" in (found.fix or "")


@pytest.mark.parametrize("sqlstate", ["42601", "0A000"])
def test_a_command_that_the_server_does_not_know_is_no_server_that_is_down(sqlstate: str) -> None:
    found = translate(psycopg.errors.lookup(sqlstate)("syntax error"), "copying")
    assert isinstance(found, PreflightError)
    assert "PostgreSQL 14 or later" in (found.fix or "")


def test_a_replication_command_that_the_server_does_not_know_is_not_tried_again(database: PostgresDatabase) -> None:
    with Replication(database.dsn) as replication:
        with pytest.raises(PreflightError, match=r"does not understand .* syntax error"):
            replication.execute('CREATE_REPLICATION_SLOT "s" TEMPORARY LOGICAL pgoutput SNAPSHOT_EXPORT')
        with pytest.raises(PreflightError, match="does not understand"):
            replication.execute('CREATE_REPLICATION_SLOT "s" TEMPORARY LOGICAL pgoutput (SNAPSHOT export me)')


@pytest.mark.parametrize(("version", "words"), [(140019, "EXPORT_SNAPSHOT"), (150000, "(SNAPSHOT 'export')")])
def test_a_snapshot_is_exported_in_the_words_of_the_servers_version(version: int, words: str) -> None:
    assert snapshot_slot_command("s", version) == f'CREATE_REPLICATION_SLOT "s" TEMPORARY LOGICAL pgoutput {words}'


def test_a_server_is_only_given_settings_that_it_has() -> None:
    assert set(later_settings(140012)) == {"idle_session_timeout"}
    assert set(later_settings(140013)) == {"idle_session_timeout", "restrict_nonsystem_relation_kind"}
    assert set(later_settings(160004)) == {"idle_session_timeout", "restrict_nonsystem_relation_kind"}
    assert "transaction_timeout" in later_settings(170000)
