"""What users of a Postgres server need of libpq: connection strings, and what helps a server that cannot serve now."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import conninfo

from tailrace.errors import ConfigError

# By state; by text as well, because an error while connecting comes without its state, and any cancel has one state.
_RELIEFS = (
    ("53100", ("No space left on device",), "make room on the server's disk"),
    ("53200", ("out of memory",), "give the server more memory, or lower its work_mem and max_connections"),
    (
        "53300",
        ("too many clients", "too many connections", "connection slots are reserved", "max_wal_senders"),
        "end sessions that nobody needs, or raise max_connections (for replication max_wal_senders)",
    ),
    ("53400", ("replication slots are in use",), "drop slots that nobody needs, or raise max_replication_slots"),
    ("55P03", ("due to lock timeout",), "end who holds the lock; pg_stat_activity names it"),
    (
        None,
        ("due to statement timeout",),
        "raise statement_timeout for the dsn's role; of a polled source, source.statement_timeout",
    ),
)


def read_dsn(dsn: str, whose: str) -> dict[str, Any]:
    """The parts of a connection string. Raises ConfigError, which shows nothing of it, for one that is none."""
    try:
        parts = conninfo.conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        # The driver's message may quote the DSN, and with it the password.
        raise ConfigError(
            f"the {whose}'s dsn is not a Postgres connection string",
            fix="use postgresql://user:password@host:5432/database or host=… dbname=… user=…",
        ) from None
    # A password with a bare @ or / ends up in the host or port, which messages show.
    hosts, ports = (str(parts.get(key) or "").split(",") for key in ("host", "port"))
    if any("@" in host and host[0] not in "@/" for host in hosts) or not all(
        port.isdigit() or not port for port in ports
    ):
        raise ConfigError(
            f"the {whose}'s dsn holds a host or port that cannot be one",
            fix="in user and password of a URI write @ as %40, / as %2F and : as %3A",
        )
    return parts


def relief(state: str | None, text: str) -> str | None:
    """What helps a server that answers but is out of room, memory, connections or time; None for any other error."""
    for known, signs, fix in _RELIEFS:
        if state == known if state and known else any(sign in text for sign in signs):
            return f"{fix}; it is tried again"
    return "relieve the server; it is tried again" if (state or "").startswith("53") else None
