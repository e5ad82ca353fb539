"""Connection strings that show nothing, and advice for servers that cannot serve now."""

from __future__ import annotations

import pytest

from tailrace.errors import ConfigError
from tailrace.system.libpq import read_dsn, relief


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://u:CAN@ARY@localhost:5432/shop",
        "postgresql://u:CAN/ARY@localhost:5432/shop",
        "postgresql://u@server:CANARY@localhost/shop",
        "mysql://u:CANARY@localhost/shop",
    ],
)
def test_a_password_that_reads_as_something_else_is_refused_and_not_shown(dsn: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_dsn(dsn, "source")
    assert not any(piece in str(refused.value) for piece in ("CAN", "ARY"))


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://u:p%40ss@one:5432,two:5433/shop",
        "host=/run/a@b dbname=shop",
        "host=@abstract dbname=shop",
        "postgresql:///shop",
        "postgresql://[::1]:5432/shop",
    ],
)
def test_every_place_a_server_can_be_is_taken(dsn: str) -> None:
    assert read_dsn(dsn, "source")["dbname"] == "shop"


@pytest.mark.parametrize(
    ("state", "text", "advice"),
    [
        ("53100", "could not extend file", "free space"),
        ("53200", "out of memory", "memory"),
        ("53300", "too many connections for role", "max_connections"),
        ("53400", "all replication slots are in use", "max_replication_slots"),
        ("55P03", "canceling statement due to lock timeout", "pg_stat_activity"),
        ("53000", "insufficient resources", "reduce the load"),
        ("57014", "canceling statement due to statement timeout", "statement_timeout"),
        (None, "FATAL: sorry, too many clients already", "max_connections"),
    ],
)
def test_an_error_of_a_server_that_is_short_of_something_comes_with_advice(
    state: str | None, text: str, advice: str
) -> None:
    assert advice in (relief(state, text) or "")


def test_a_server_that_is_down_or_cancelled_a_query_is_short_of_nothing() -> None:
    assert relief("57014", "canceling statement due to user request") is None
    assert relief("57P01", "terminating connection due to administrator command") is None
    assert relief(None, "connection refused") is None
