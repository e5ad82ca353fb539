"""What an error of Postgres means never depends on the name of a table."""

from __future__ import annotations

import psycopg
import pytest

from tailrace.errors import PreflightError, TailraceError, UnavailableError
from tailrace.source.postgres.connection import translate

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
