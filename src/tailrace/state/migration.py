"""State files of older formats, made new in place."""

from __future__ import annotations

import sqlite3

from tailrace.state import layout

_FROM_1 = """
INSERT INTO pipeline (name, created_at, epoch, fingerprint, run, serial)
    SELECT name, created_at, epoch, fingerprint, run, COALESCE((SELECT MAX(id) FROM old_request), 0) FROM old_pipeline;
INSERT INTO table_state
    SELECT pipeline.name, upstream_id, old.name,
        CASE WHEN state IN ('SyncWait', 'Catchup') THEN 'FinishedCopy' ELSE state END,
        since, reason, fix, CASE retry WHEN 'automatic' THEN 'timed' ELSE retry END, 0, NULL, NULL, resume,
        CASE WHEN failed_in IN ('SyncWait', 'Catchup') THEN 'FinishedCopy' ELSE failed_in END,
        rows_copied, rows_total, chunks_done, chunks_total, changes_applied, position,
        last_change_committed_at, last_applied_at
    FROM old_table_state AS old, pipeline;
INSERT INTO schema_version (pipeline, upstream_id, position, version, schema)
    SELECT pipeline.name, upstream_id, position, version, schema FROM old_schema_version AS old, pipeline
    WHERE NOT EXISTS (SELECT 1 FROM old_schema_version AS newer WHERE newer.upstream_id = old.upstream_id
        AND newer.position = old.position AND newer.version > old.version);
INSERT INTO progress (pipeline, batch_id, "offset", position, rows, bytes, seconds, at)
    SELECT pipeline.name, batch_id, "offset", position, rows, bytes, seconds, at FROM old_progress, pipeline;
INSERT INTO source_status
    (pipeline, gear, received, journal_bytes, server, slot_restart, slot_confirmed, error, fix, at)
    SELECT pipeline.name, gear, received, journal_bytes, server, slot_restart, slot_confirmed, error, fix, at
    FROM old_source_status, pipeline;
INSERT INTO request (pipeline, id, kind, "table", at, done_at)
    SELECT pipeline.name, id, kind, "table", at, done_at FROM old_request, pipeline
"""

_TABLES_OF_1 = ("pipeline", "table_state", "schema_version", "progress", "source_status", "request")


def upgrade(connection: sqlite3.Connection, found: int, dialect: layout.Dialect) -> None:
    """Bring the tables from format `found` (0: none are there) to the newest, inside the caller's transaction."""
    old = _TABLES_OF_1 if found == 1 else ()
    for name in old:
        connection.execute(f"ALTER TABLE {name} RENAME TO old_{name}")
    for statement in layout.statements(dialect, found):
        connection.execute(statement)
    if old:
        for statement in _FROM_1.strip().split(";\n"):
            connection.execute(statement)
    for name in old:
        connection.execute(f"DROP TABLE old_{name}")
    connection.execute(f"PRAGMA user_version = {layout.FORMAT}")
