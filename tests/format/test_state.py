"""State stores of every format open, mean what they meant, and are written again to the byte."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tailrace.destination.webhook.sender.leader import Leadership, open_engine
from tailrace.model.change import START, Position
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.state import SqliteStore, TableState
from tailrace.state.status import PipelineStatus
from tailrace.testing.standing import all_versions
from tests.support.format_fixture import unpack_state

AT = datetime(2025, 6, 7, 8, 9, 10, 123456, tzinfo=UTC)


def stored(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Every row of every table, by the names of its columns."""
    with closing(sqlite3.connect(folder / "state.db")) as connection:
        connection.row_factory = sqlite3.Row
        names = [row[0] for row in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        return {name: [dict(row) for row in connection.execute(f"SELECT * FROM {name}")] for name in sorted(names)}


def orders(*extra: str) -> TableSchema:
    columns = tuple(Column(name, pa.int64(), number=number) for number, name in enumerate(("id", *extra), 1))
    return TableSchema(TableName("public", "orders"), columns, ("id",), 1 + len(extra), "16400")


@pytest.mark.parametrize("number", [2, 3])
def test_a_store_is_read_with_the_values_it_was_written_with(number: int, tmp_path: Path) -> None:
    with SqliteStore("shop", unpack_state(number, tmp_path)).open() as store:
        pipeline = store.pipeline()
        assert (pipeline.name, pipeline.run) == ("shop", 1)
        assert pipeline.owner is not None
        items, late, mine = store.tables()
        assert (items.state, items.reason, items.fix, items.retry) == (TableState.ERRORED, "why", "how", "timed")
        assert (items.attempts, items.next_try, items.failed_in) == (3, AT, TableState.INIT)
        assert items.resume == str(Position(8, 1))
        assert (late.state, late.paused_at is not None) == (TableState.INIT, True)
        assert (mine.state, mine.version, mine.position) == (TableState.FINISHED_COPY, 2, str(Position(9, 1)))
        assert (mine.rows_copied, mine.rows_total, mine.chunks_done, mine.chunks_total) == (5, 10, 2, 2)
        assert (mine.changes_applied, mine.last_change_committed_at) == (3, AT)
        assert set(mine.since) == {
            TableState.INIT,
            TableState.DATA_SYNC,
            TableState.FINISHED_COPY,
            TableState.SYNC_WAIT,
        }
        assert all_versions(store, "16400") == [(START, orders()), (Position(5, 0), orders("total"))]
        batch, status = store.last_batch(), store.source_status()
        assert batch is not None
        assert (batch.id, batch.position, batch.rows, batch.bytes, batch.seconds, batch.at) == (
            4,
            str(Position(9, 1)),
            8,
            100,
            0.5,
            AT,
        )
        assert batch.offset == {"log": str(Position(9, 1)), "tables": {"16400": {"phase": "ready"}}}
        assert status is not None
        assert (status.gear, status.received, status.journal_bytes, status.server) == ("streaming", "a", 17, "b")
        assert (status.slot_restart, status.slot_confirmed, status.fix, status.at) == ("c", "d", "a fix", AT)
        (letter,) = store.dead_letters()
        assert (letter.id, letter.upstream_id, letter.table, letter.position) == (1, "16401", "public.items", "8")
        assert (letter.kind, letter.reason, letter.fix, letter.raw) == ("TableError", "r", "f", b"\0\xff")
        assert (letter.version, letter.tries, letter.status) == (1, 1, "waiting")
        (resync,) = store.open_requests()
        assert (resync.id, resync.kind, resync.table, resync.argument) == (2, "resync", "public.late", None)
        skip = store.request(3)
        assert skip is not None
        assert (skip.kind, skip.argument, skip.outcome, skip.done_at is not None) == ("skip", "1", "skipped", True)


def test_a_store_is_rewritten_byte_for_byte(tmp_path: Path) -> None:
    folder = unpack_state(3, tmp_path)
    before = stored(folder)
    with SqliteStore("shop", folder).open() as store:
        status, batch = store.source_status(), store.last_batch()
        assert status is not None
        assert batch is not None
        assert not store.apply_batch(batch)
        store.put_source_status(status)
        for table in store.tables():
            # Another name for a moment: a record that is not changed is not written.
            store.add_table(table.upstream_id, "another")
            store.add_table(table.upstream_id, table.name)
    after = stored(folder)
    added = {"applied_batch", "held_batch", "report", "planned_batch", "activity", "batch_detail", "sample"}
    assert after.keys() - before.keys() == added
    for name in before:
        changed = [{**row, "changed": 0} if name == "pipeline" else row for row in after[name]]
        assert changed == [{**row, "changed": 0} if name == "pipeline" else row for row in before[name]]


def test_the_leadership_of_senders_is_read_with_the_values_it_was_written_with(tmp_path: Path) -> None:
    engine = open_engine(str(unpack_state(3, tmp_path)))
    with closing(Leadership(engine, "shop", node="n2", queue="another", seconds=10.0)) as leadership:
        assert leadership.watermarks() == {"public.orders": Position(9, 1)}
        assert leadership.places() == {"n1": Position(3, 2)}
        standing = leadership.claim()
        assert standing is not None
        assert (standing.epoch, standing.watermarks) == (2, {"public.orders": Position(9, 1)})


def test_a_store_of_an_older_format_is_upgraded_to_the_newest(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        (tmp_path / str(number)).mkdir()
        with SqliteStore("shop", unpack_state(number, tmp_path / str(number))).open():
            pass
    first, second, third = (stored(tmp_path / str(number)).keys() for number in (1, 2, 3))
    assert second == third
    # What SQLite keeps for itself stays.
    assert first - {"sqlite_sequence"} == third


def test_the_status_as_json_has_the_keys_that_it_had(tmp_path: Path) -> None:
    with SqliteStore("shop", unpack_state(3, tmp_path)).open_reading() as store:
        status = PipelineStatus.read(store, at=AT).to_dict()
    assert list(status) == [
        "pipeline",
        "at",
        "runner",
        "tables",
        "batch",
        "position",
        "rows_per_second",
        "copied_per_second",
        "changes_per_second",
        "bytes_per_second",
        "last_batch",
        "lag_bytes",
        "lag_seconds",
        "source",
        "requests",
        "recent_requests",
        "last_run",
        "notices",
        "delivery",
        "slot",
        "phases",
        "alerts",
    ]
    items = status["tables"][0]
    assert {key: items[key] for key in ("name", "state", "reason", "fix", "retry", "attempts", "letters")} == {
        "name": "public.items",
        "state": "Errored",
        "reason": "why",
        "fix": "how",
        "retry": "timed",
        "attempts": 3,
        "letters": 1,
    }
    assert list(items) == [
        "name",
        "state",
        "since",
        "rows_copied",
        "rows_total",
        "chunks_done",
        "chunks_total",
        "changes_applied",
        "inserts",
        "updates",
        "deletes",
        "position",
        "lag_bytes",
        "lag_seconds",
        "rows_per_second",
        "last_change_committed_at",
        "last_applied_at",
        "reason",
        "code",
        "fix",
        "retry",
        "attempts",
        "next_try",
        "paused_at",
        "version",
        "letters",
    ]
    assert status["source"] == {
        "gear": "streaming",
        "received": "a",
        "journal_bytes": 17,
        "server": "b",
        "slot_restart": "c",
        "slot_confirmed": "d",
        "error": "an error\N{REPLACEMENT CHARACTER}of bytes",
        "fix": "a fix",
        "at": AT.isoformat(),
    }
    assert status["requests"] == ["resync public.late"]
