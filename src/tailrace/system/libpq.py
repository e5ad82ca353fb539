"""Postgres connection strings, and fixes for a server that is out of space, memory, connections or time."""

from __future__ import annotations

import re
from typing import Any

import psycopg
from psycopg import conninfo

from tailrace.errors import ConfigError

EXACT_TEXT = {
    "DateStyle": "ISO,MDY",
    "TimeZone": "UTC",
    "IntervalStyle": "postgres",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "client_encoding": "UTF8",
    # Names of tables and functions (regclass, regproc) are printed in full only outside the search path.
    "search_path": "pg_catalog",
    "quote_all_identifiers": "off",
}
"""Settings under which the server prints every value in one exact form."""

_QUOTED = re.compile(r'"[^"]*"')
"""A name in a message of the server."""

# Matched by SQLSTATE. An error while connecting has none, and all cancellations share one: there the text decides.
_CANCELED = "57014"
_RELIEFS = (
    ("53100", ("No space left on device",), "free space on the server's disk"),
    ("53200", ("out of memory",), "give the server more memory, or lower its work_mem and max_connections"),
    (
        "53300",
        ("too many clients", "too many connections", "connection slots are reserved", "max_wal_senders"),
        "end sessions that are not needed, or raise max_connections (for replication max_wal_senders)",
    ),
    ("53400", ("replication slots are in use",), "drop slots that are not needed, or raise max_replication_slots"),
    ("55P03", ("due to lock timeout",), "end the session that holds the lock; pg_stat_activity shows it"),
    (
        _CANCELED,
        ("due to statement timeout",),
        "raise statement_timeout for the dsn's role, or source.statement_timeout for a polled source",
    ),
)


def read_dsn(dsn: str, whose: str) -> dict[str, Any]:
    """The parts of a connection string. Raises ConfigError, without quoting the string, if it is not valid."""
    try:
        parts = conninfo.conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        # The driver's message may quote the DSN, and with it the password.
        raise ConfigError(
            f"the {whose}'s dsn is not a Postgres connection string",
            fix="use postgresql://user:password@host:5432/database or host=… dbname=… user=…",
        ) from None
    # A password with an unescaped @ or / would become part of the host or port, which messages show.
    hosts, ports = (str(parts.get(key) or "").split(",") for key in ("host", "port"))
    if any("@" in host and host[0] not in "@/" for host in hosts) or not all(
        port.isdigit() or not port for port in ports
    ):
        raise ConfigError(
            f"the {whose}'s dsn has an invalid host or port",
            fix="in the user and password of a URI write @ as %40, / as %2F and : as %3A",
        )
    return parts


def ports_of(conninfo_string: str) -> list[int]:
    """The ports of the servers that a connection string names."""
    return [int(port or 5432) for port in str(conninfo.conninfo_to_dict(conninfo_string).get("port") or "").split(",")]


def relief(state: str | None, text: str) -> str | None:
    """The fix for a server that answers but is out of space, memory, connections or time; None for other errors."""
    said = _QUOTED.sub("", text)
    for known, signs, fix in _RELIEFS:
        is_said = any(sign in said for sign in signs)
        if is_said if not state else state == known and (is_said or known != _CANCELED):
            return f"{fix}; tailrace retries by itself"
    return "reduce the load on the server; tailrace retries by itself" if (state or "").startswith("53") else None
