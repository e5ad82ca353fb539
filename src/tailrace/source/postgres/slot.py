"""The replication slot and the publication: created once, read often."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psycopg
from psycopg import sql

from tailrace.errors import RESYNC, Finding, LostError
from tailrace.model.schema import TableName
from tailrace.source.postgres.connection import PgConnection
from tailrace.source.postgres.offset import format_lsn, parse_lsn
from tailrace.system.ticker import Ticker

STOP_CHECK_SECONDS = 0.1
PATIENCE_SECONDS = 3.0
"""How long a new slot may take before the log names what it waits for."""
REMINDER_SECONDS = 60.0

OPTION_LIST_VERSION = 150000
"""The first server that reads the options of CREATE_REPLICATION_SLOT as a list in parentheses."""

WAL_POSITION = "CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_flush_lsn() END"


@dataclass(frozen=True)
class SlotStatus:
    """A slot as the server sees it now, and the server's own WAL position."""

    confirmed: int
    restart: int
    server: int
    active_pid: int | None
    plugin: str
    wal_status: str
    is_standby: bool
    safe_wal_bytes: int | None
    """How much more WAL the server can write before it gives the slot up; None: it never does."""

    @property
    def backlog(self) -> int:
        """Bytes of WAL between what was confirmed and the server's head."""
        return self.server - self.confirmed


def read_slot(session: PgConnection, slot: str) -> SlotStatus | None:
    """The slot's status, None when there is no such slot."""
    row = session.execute(
        f"SELECT confirmed_flush_lsn, restart_lsn, {WAL_POSITION}, active_pid, plugin, wal_status,"  # noqa: S608
        " pg_is_in_recovery(), safe_wal_size FROM pg_replication_slots"
        " WHERE slot_name = %s AND database = current_database()",
        [slot],
    ).fetchone()
    if row is None:
        return None
    confirmed, restart, server, active_pid, plugin, wal_status, is_standby, safe_wal_bytes = row
    return SlotStatus(
        parse_lsn(confirmed or "0/0"),
        parse_lsn(restart or "0/0"),
        parse_lsn(server or "0/0"),
        active_pid,
        plugin or "",
        wal_status or "",
        is_standby,
        safe_wal_bytes,
    )


def require(status: SlotStatus | None, slot: str, resync: str) -> SlotStatus:
    """The status of a slot that must still be able to serve; LostError when it cannot."""
    if status is None:
        raise LostError(
            f"the replication slot {slot!r} is gone, and with it the changes since the last one read", fix=resync
        )
    if status.wal_status == "lost":
        raise LostError(f"the server removed WAL that the slot {slot!r} still needed", fix=resync)
    return status


def require_kept(status: SlotStatus, durable: int) -> None:
    """Raise LostError when the slot is confirmed past what the journal holds, which ends before `durable`."""
    if status.confirmed > durable:
        raise LostError(
            f"the slot is confirmed up to {format_lsn(status.confirmed)}, but the journal ends at"
            f" {format_lsn(durable)}: the journal was lost or replaced",
            fix=RESYNC,
        )


def server_position(session: PgConnection) -> int:
    row = session.execute(f"SELECT {WAL_POSITION}").fetchone()
    assert row is not None
    return parse_lsn(row[0])


def emit_heartbeat(session: PgConnection) -> None:
    """Write a tailrace message to the log, and flush everything before it. On a standby this does nothing."""
    with suppress(psycopg.errors.ReadOnlySqlTransaction):  # a standby's slot advances with the primary's WAL
        session.execute("SELECT pg_logical_emit_message(true, 'tailrace', 'heartbeat')")


def create_slot(session: PgConnection, slot: str, should_stop: Callable[[], bool], on_wait: Callable[[], None]) -> None:
    """Create the pipeline's slot. Waits for open write transactions, and calls `on_wait` repeatedly meanwhile.

    Raises QueryCanceled, without a slot, when `should_stop` returns true meanwhile.
    """
    remind_at = time.monotonic() + PATIENCE_SECONDS

    def check() -> None:
        nonlocal remind_at
        if should_stop():
            session.cancel_safe()
        elif time.monotonic() >= remind_at:
            on_wait()
            remind_at = time.monotonic() + REMINDER_SECONDS

    with Ticker(check, STOP_CHECK_SECONDS):
        session.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])


def snapshot_slot_command(slot: str, server_version: int) -> str:
    """The replication command for a temporary slot that exports its snapshot; `server_version` is as in 160004."""
    exporting = "(SNAPSHOT 'export')" if server_version >= OPTION_LIST_VERSION else "EXPORT_SNAPSHOT"
    return f'CREATE_REPLICATION_SLOT "{slot}" TEMPORARY LOGICAL pgoutput {exporting}'


def drop_slot(session: PgConnection, slot: str) -> None:
    """Drop the pipeline's slot, with the WAL it held. A missing slot is no error."""
    session.execute(
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
        " WHERE slot_name = %s AND database = current_database()",
        [slot],
    )


def waiting_for(session: PgConnection) -> list[Finding]:
    """The open write transactions that a new slot has to wait for, and how to end them."""
    findings = []
    open_ = session.execute(
        "SELECT pid FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid() ORDER BY xact_start"
    ).fetchall()
    if open_:
        pids = ", ".join(str(pid) for (pid,) in open_[:5])
        message = f"a new one waits for the open write transactions of processes {pids}"
        findings.append(Finding("warning", "slot", message, "let them commit, or SELECT pg_terminate_backend(pid);"))
    prepared = session.execute("SELECT quote_literal(gid) FROM pg_prepared_xacts ORDER BY prepared").fetchall()
    if prepared:
        message = f"a new one waits for the prepared transactions {', '.join(gid for (gid,) in prepared[:5])}"
        fix = f"COMMIT PREPARED {prepared[0][0]};  -- or ROLLBACK PREPARED"
        findings.append(Finding("warning", "slot", message, fix))
    return findings


def publication_exists(session: PgConnection, publication: str) -> bool:
    return session.execute("SELECT 1 FROM pg_publication WHERE pubname = %s", [publication]).fetchone() is not None


def create_publication(
    session: PgConnection, publication: str, tables: Sequence[TableName], *, via_root: bool, mark: PublicationMark
) -> None:
    """Publish exactly these tables; partitions appear as their root. The mark shows that tailrace created it.

    Does nothing when another process created it in the meantime.
    """
    with _alone(session, publication):
        if publication_exists(session, publication):
            return
        session.execute(publication_sql(publication, tables, via_root=via_root))
        session.execute(mark.comment_sql(publication))


@dataclass(frozen=True)
class PublicationMark:
    """The comment on a publication that tailrace created, so that it adds tables to no other.

    `selection` is a hash of the patterns that it was last compared with. `declined` are the OIDs of tables that match
    them and that someone removed from it. A mark of an earlier version of tailrace has only the highest OID that was
    `seen`: of the tables up to that, those that are not in the publication were left out or removed.
    """

    selection: str
    declined: frozenset[int] = frozenset()
    seen: int = 0

    def comment_sql(self, publication: str) -> sql.Composed:
        declined = "".join(f" {oid}" for oid in sorted(self.declined))
        text = f"tailrace made this and adds new tables to it: {self.selection} 0 without{declined}"
        return sql.SQL("COMMENT ON PUBLICATION {} IS {}").format(sql.Identifier(publication), sql.Literal(text))


_MARK = re.compile(r"tailrace made this .*: (\w+) (\d+)(?: without((?: \d+)*))?")


def read_mark(session: PgConnection, publication: str) -> PublicationMark | None:
    """The mark of a publication; None if tailrace did not create it, or the role may not change it."""
    row = session.execute(
        "SELECT obj_description(oid, 'pg_publication') FROM pg_publication WHERE pubname = %s"
        " AND pg_has_role(pubowner, 'USAGE')",
        [publication],
    ).fetchone()
    found = _MARK.fullmatch(row[0]) if row and row[0] else None
    return PublicationMark(found[1], frozenset(map(int, (found[3] or "").split())), int(found[2])) if found else None


def extend_publication(
    session: PgConnection, publication: str, tables: Sequence[TableName], mark: PublicationMark
) -> None:
    """Add tables, and update the mark. Tables that another process added in the meantime are skipped."""
    with _alone(session, publication):
        members = session.execute(_MEMBERS, [publication]).fetchall()
        new = [table for table in tables if (table.schema, table.name) not in members]
        if new:
            session.execute(addition_sql(publication, new))
        session.execute(mark.comment_sql(publication))


_MEMBERS = (
    "SELECT n.nspname, c.relname FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid"
    " JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace WHERE p.pubname = %s"
)


@contextmanager
def _alone(session: PgConnection, publication: str) -> Iterator[None]:
    """A transaction in which no other tailrace process creates or extends the publication."""
    with session.transaction():
        session.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [f"tailrace {publication}"])
        yield


def addition_sql(publication: str, tables: Sequence[TableName]) -> sql.Composed:
    # Without ONLY, tables that inherit from one are added too, and the command fails if one of them is already in.
    only = sql.SQL(", ").join(sql.SQL("ONLY {}").format(sql.Identifier(table.schema, table.name)) for table in tables)
    return sql.SQL("ALTER PUBLICATION {} ADD TABLE {}").format(sql.Identifier(publication), only)


def publication_sql(publication: str, tables: Sequence[TableName], *, via_root: bool) -> sql.Composed:
    return sql.SQL("CREATE PUBLICATION {} FOR TABLE {} WITH (publish_via_partition_root = {})").format(
        sql.Identifier(publication), _names(tables), sql.Literal(via_root)
    )


def _names(tables: Sequence[TableName]) -> sql.Composed:
    return sql.SQL(", ").join(sql.Identifier(table.schema, table.name) for table in tables)
