"""What cannot be synced is refused before anything happens, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tailrace.capture import layout, trigger
from tailrace.capture.layout import CaptureConnection, quoted
from tailrace.errors import PreflightError
from tailrace.sync.protobuf import PAGE_BYTES

MARK_TABLE = "turso_sync_last_change_id"
"""Turso's table on the remote: for each client, the last change that it pushed."""

_STORED = 3


def require_servable(connection: CaptureConnection, path: Path) -> None:
    """Raise PreflightError if the protocol cannot carry this file, or clients could not write its tables."""
    (size,) = connection.execute("PRAGMA page_size").fetchone()
    if size != PAGE_BYTES:
        raise PreflightError(
            f"{path} has pages of {size} bytes, and the protocol carries pages of {PAGE_BYTES}",
            fix=f"PRAGMA journal_mode = DELETE; PRAGMA page_size = {PAGE_BYTES}; VACUUM",
        )
    (encoding,) = connection.execute("PRAGMA encoding").fetchone()
    if encoding != "UTF-8":
        raise PreflightError(f"{path} stores text as {encoding}", fix="copy its tables to a file that stores UTF-8")
    require_uncaptured(connection, path)
    require_syncable(connection)


def require_uncaptured(connection: CaptureConnection, path: Path | str = "FILE") -> None:
    """Raise PreflightError if the file has tables of a capture."""
    reserved = layout.own_tables(connection) | {layout.DEFAULT_TABLE}
    owned = [table for table in sorted(reserved) if layout.has_table(connection, table)]
    if owned:
        raise PreflightError(
            f"the file captures its own changes ({owned[0]}), and every client would receive that capture with its "
            "pages",
            fix=f"tailrace sqlite disable {path} --drop; to follow the file with a pipeline: "
            f"tailrace serve-sync {path} --tape",
        )


def require_syncable(connection: CaptureConnection) -> None:
    """Raise PreflightError, naming every table that cannot be synced."""
    problems = list(_problems(connection))
    if problems:
        table, reason, fix = problems[0]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise PreflightError(f"{table} {reason}{more}", fix=fix, table=table)


def _problems(connection: CaptureConnection) -> Iterator[tuple[str, str, str]]:
    sql = "SELECT name, type FROM pragma_table_list WHERE schema = 'main' AND type = 'virtual' ORDER BY 1"
    for name, _ in connection.execute(sql).fetchall():
        yield name, "is a virtual table, which replicas cannot use", f"DROP TABLE {quoted(name)}, or use another file"
    # Their changes would never be pushed, and the next pull would undo them.
    uncapturable = {one.table: one for one in trigger.uncapturable(connection)}
    own = layout.own_tables(connection)
    for table in layout.list_tables(connection):
        if table == MARK_TABLE or table in own:
            continue
        columns = connection.execute(f"PRAGMA table_xinfo({quoted(table)})").fetchall()
        if table in uncapturable:
            yield table, f"cannot be captured: {uncapturable[table].reason}", uncapturable[table].fix
        if not any(column[5] for column in columns):
            yield (
                table,
                "has no primary key, so no one can tell which row of another replica a change is about",
                "create it again with a PRIMARY KEY",
            )
        if any(column[6] == _STORED for column in columns):
            yield table, "has a STORED generated column", "use VIRTUAL instead of STORED"
