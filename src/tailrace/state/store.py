"""The state of one pipeline in one SQLite file.

Every write is one transaction that is on disk when the method returns, so a killed process leaves the state before
or after it, nothing between. A store can be used from several threads.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from tailrace.errors import ConfigError, LostError, OwnedError
from tailrace.state import layout
from tailrace.state.machine import TableState, check_move
from tailrace.state.record import BatchRecord, PipelineRecord, Request, Retry, SourceStatus, TableRecord, TableUpdate
from tailrace.state.row import (
    find_table,
    now,
    read_batch,
    read_request,
    read_source_status,
    read_table,
    text_of,
    time_of,
)

if TYPE_CHECKING:
    from tailrace.change import Position
    from tailrace.schema import TableSchema

_KEPT_BATCHES = 1000


class StateStore:
    """Table states, schema versions, progress and requests of one pipeline. See the protocols in `tailrace.state`."""

    def __init__(self, connection: sqlite3.Connection, state_dir: Path) -> None:
        self._connection = connection
        self._lock = threading.RLock()
        self._run: int | None = None
        self.state_dir = state_dir

    @classmethod
    def open(cls, state_dir: str | Path, *, name: str, fingerprint: str = "") -> StateStore:
        """The state in a folder, made for pipeline `name` if there is none. Raises ConfigError if it is another's."""
        store = cls(layout.open_writing(Path(state_dir)), Path(state_dir))
        with store._write() as db:
            db.execute(
                "INSERT INTO pipeline (only, name, created_at, epoch, fingerprint) VALUES (1, ?, ?, ?, ?)"
                " ON CONFLICT (only) DO NOTHING",
                (name, text_of(now()), str(uuid.uuid4()), fingerprint),
            )
            owner = db.execute("SELECT name FROM pipeline").fetchone()["name"]
            if owner == name and fingerprint:
                db.execute("UPDATE pipeline SET fingerprint = ?", (fingerprint,))
        if owner != name:
            store.close()
            raise ConfigError(
                f"the state in {state_dir} belongs to pipeline {owner}, not {name}",
                fix="give each pipeline its own `state`",
            )
        return store

    @classmethod
    def open_reading(cls, state_dir: str | Path) -> StateStore:
        """The same without the right to write, also while a runner writes. Raises ConfigError if there is no state."""
        return cls(layout.open_reading(Path(state_dir)), Path(state_dir))

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def claim_run(self) -> int:
        """Become the runner: from now on writes through any earlier runner's store raise OwnedError."""
        with self._write(fenced=False) as db:
            self._run = int(db.execute("UPDATE pipeline SET run = run + 1 RETURNING run").fetchone()["run"])
        return self._run

    def require_owner(self) -> None:
        """Raises OwnedError when a later runner has claimed the pipeline. Cheap: called before every batch."""
        with self._lock:
            self._check_fence(self._connection)

    def pipeline(self) -> PipelineRecord:
        rows = self._read("SELECT * FROM pipeline")
        if not rows:  # a reader may come between the making of the file and its first row
            raise ConfigError(f"the state in {self.state_dir} is only being made", fix="try again in a moment")
        row = rows[0]
        return PipelineRecord(row["name"], time_of(row["created_at"]), row["epoch"], row["fingerprint"], row["run"])

    # Table states

    def tables(self) -> list[TableRecord]:
        return [read_table(row) for row in self._read("SELECT * FROM table_state ORDER BY name, upstream_id")]

    def table(self, upstream_id: str) -> TableRecord | None:
        rows = self._read("SELECT * FROM table_state WHERE upstream_id = ?", upstream_id)
        return read_table(rows[0]) if rows else None

    def add_table(self, upstream_id: str, name: str) -> TableRecord:
        with self._write() as db:
            since = json.dumps({TableState.INIT: text_of(now())})
            row = db.execute(
                "INSERT INTO table_state (upstream_id, name, state, since) VALUES (?, ?, ?, ?)"
                " ON CONFLICT (upstream_id) DO UPDATE SET name = excluded.name RETURNING *",
                (upstream_id, name, TableState.INIT, since),
            ).fetchone()
        return read_table(row)

    def move_table(self, upstream_id: str, *steps: TableState) -> None:
        with self._write() as db:
            self._step(db, upstream_id, steps)

    def fail_table(
        self,
        upstream_id: str,
        reason: str,
        *,
        fix: str | None = None,
        retry: Retry = "manual",
        resume: str | None = None,
    ) -> None:
        with self._write() as db:
            before = find_table(db, upstream_id)
            if before.state is not TableState.ERRORED:
                self._step(db, upstream_id, (TableState.ERRORED,))
            db.execute(
                "UPDATE table_state SET reason = ?, fix = ?, retry = ?, resume = ?, failed_in = ?"
                " WHERE upstream_id = ?",
                (reason, fix, retry, resume, before.failed_in or before.state, upstream_id),
            )

    def forget_table(self, upstream_id: str) -> None:
        with self._write() as db:
            db.execute("DELETE FROM table_state WHERE upstream_id = ?", (upstream_id,))
            db.execute("DELETE FROM schema_version WHERE upstream_id = ?", (upstream_id,))

    def _step(self, db: sqlite3.Connection, upstream_id: str, steps: Sequence[TableState]) -> None:
        table = find_table(db, upstream_id)
        state, since = table.state, dict(table.since)
        for step in steps:
            check_move(state, step)
            if step is TableState.INIT:
                # A copy from nothing: its counts begin again, and so do the times of its states.
                since = {}
                db.execute(
                    "UPDATE table_state SET rows_copied = 0, rows_total = NULL, chunks_done = 0, chunks_total = NULL,"
                    " position = NULL, last_change_committed_at = NULL WHERE upstream_id = ?",
                    (upstream_id,),
                )
            state, since[step] = step, now()
        db.execute(
            "UPDATE table_state SET state = ?, since = ? WHERE upstream_id = ?",
            (state, json.dumps({name: text_of(at) for name, at in since.items()}), upstream_id),
        )
        if state is not TableState.ERRORED:
            db.execute(
                "UPDATE table_state SET reason = NULL, fix = NULL, retry = NULL, resume = NULL, failed_in = NULL"
                " WHERE upstream_id = ?",
                (upstream_id,),
            )

    # Schema versions

    def put_schema(self, schema: TableSchema, position: Position) -> None:
        with self._write() as db:
            db.execute(
                "INSERT INTO schema_version (upstream_id, version, position, schema) VALUES (?, ?, ?, ?)"
                " ON CONFLICT DO NOTHING",
                (schema.upstream_id, schema.version, str(position), schema.to_json()),
            )

    def schema_at(self, upstream_id: str, position: Position | None = None) -> TableSchema | None:
        from tailrace.schema import TableSchema  # pyarrow: only who asks for a schema pays for it

        rows = self._read(
            "SELECT schema FROM schema_version WHERE upstream_id = ? AND position <= ? ORDER BY version DESC LIMIT 1",
            upstream_id,
            "g" if position is None else str(position),  # "g" sorts behind every hex digit
        )
        return TableSchema.from_json(rows[0]["schema"]) if rows else None

    def prune_schemas(self, upto: Position) -> int:
        with self._write() as db:
            return db.execute(
                "DELETE FROM schema_version AS old WHERE EXISTS (SELECT 1 FROM schema_version AS new WHERE"
                " new.upstream_id = old.upstream_id AND new.version > old.version AND new.position <= ?)",
                (str(upto),),
            ).rowcount

    # Progress

    def apply_batch(self, batch: BatchRecord, updates: Sequence[TableUpdate] = ()) -> bool:
        offset = json.dumps(batch.offset, sort_keys=True)
        with self._write() as db:
            last = db.execute("SELECT MAX(batch_id) AS id FROM progress").fetchone()["id"]
            if last is not None and batch.id <= last:
                known = db.execute("SELECT offset FROM progress WHERE batch_id = ?", (batch.id,)).fetchone()
                if known is None or known["offset"] != offset:
                    raise LostError(
                        f"batch {batch.id} comes again with another offset; batch {last} was applied before it",
                        fix="restore the checkpoint that belongs to this state, or move both away and copy again",
                    )
                return False
            db.execute(
                "INSERT INTO progress (batch_id, offset, position, rows, bytes, seconds, at)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (batch.id, offset, batch.position, batch.rows, batch.bytes, batch.seconds, text_of(batch.at or now())),
            )
            db.execute("DELETE FROM progress WHERE batch_id <= ?", (batch.id - _KEPT_BATCHES,))
            for update in updates:
                self._update(db, update)
        return True

    def _update(self, db: sqlite3.Connection, update: TableUpdate) -> None:
        if update.steps:
            self._step(db, update.upstream_id, update.steps)
        else:
            find_table(db, update.upstream_id)
        committed_at = update.last_change_committed_at
        db.execute(
            "UPDATE table_state SET rows_copied = rows_copied + ?, rows_total = COALESCE(?, rows_total),"
            " chunks_done = chunks_done + ?, chunks_total = COALESCE(?, chunks_total),"
            " changes_applied = changes_applied + ?, position = COALESCE(?, position),"
            " last_change_committed_at = COALESCE(?, last_change_committed_at),"
            " last_applied_at = CASE WHEN ? THEN ? ELSE last_applied_at END WHERE upstream_id = ?",
            (
                update.rows_copied,
                update.rows_total,
                update.chunks_done,
                update.chunks_total,
                update.changes_applied,
                update.position,
                text_of(committed_at) if committed_at else None,
                bool(update.rows_copied or update.changes_applied),
                text_of(now()),
                update.upstream_id,
            ),
        )

    def last_batch(self) -> BatchRecord | None:
        batches = self.recent_batches(1)
        return batches[0] if batches else None

    def recent_batches(self, count: int) -> list[BatchRecord]:
        """The newest batches, newest first."""
        rows = self._read("SELECT * FROM progress ORDER BY batch_id DESC LIMIT ?", count)
        return [read_batch(row) for row in rows]

    # The receiving half, and requests of operators

    def put_source_status(self, status: SourceStatus) -> None:
        """Replace what the receiving half said before."""
        values = {**vars(status), "at": text_of(status.at or now())}
        with self._write() as db:
            db.execute(
                "INSERT OR REPLACE INTO source_status (only, gear, received, journal_bytes, server, slot_restart,"
                " slot_confirmed, error, fix, at) VALUES (1, :gear, :received, :journal_bytes, :server, :slot_restart,"
                " :slot_confirmed, :error, :fix, :at)",
                values,
            )

    def source_status(self) -> SourceStatus | None:
        rows = self._read("SELECT * FROM source_status")
        return read_source_status(rows[0]) if rows else None

    def ask(self, kind: Literal["resync"], table: str) -> Request:
        """Leave a request for the runner. The same request again, while it is open, is the same one."""
        # An operator's command is no runner: it must work beside one.
        with self._write(fenced=False) as db:
            row = db.execute(
                'SELECT * FROM request WHERE kind = ? AND "table" = ? AND done_at IS NULL', (kind, table)
            ).fetchone()
            row = (
                row
                or db.execute(
                    'INSERT INTO request (kind, "table", at) VALUES (?, ?, ?) RETURNING *',
                    (kind, table, text_of(now())),
                ).fetchone()
            )
        return read_request(row)

    def open_requests(self) -> list[Request]:
        """What was asked and not done yet, oldest first."""
        return [read_request(row) for row in self._read("SELECT * FROM request WHERE done_at IS NULL ORDER BY id")]

    def finish_request(self, request_id: int) -> None:
        """The runner has done what was asked. A repeat changes nothing."""
        with self._write() as db:
            db.execute("UPDATE request SET done_at = ? WHERE id = ? AND done_at IS NULL", (text_of(now()), request_id))

    # Transactions

    def _read(self, statement: str, *values: object) -> list[sqlite3.Row]:
        with self._lock:
            try:
                return self._connection.execute(statement, values).fetchall()
            except sqlite3.Error as error:
                raise layout.unusable(self.state_dir, error) from error

    @contextmanager
    def _write(self, *, fenced: bool = True) -> Iterator[sqlite3.Connection]:
        with self._lock:
            db = self._connection
            try:
                db.execute("BEGIN IMMEDIATE")
                if fenced:
                    self._check_fence(db)
                yield db
                db.execute("COMMIT")
            except sqlite3.Error as error:
                raise layout.unusable(self.state_dir, error) from error
            finally:
                if db.in_transaction:
                    db.execute("ROLLBACK")

    def _check_fence(self, db: sqlite3.Connection) -> None:
        run = db.execute("SELECT run FROM pipeline").fetchone()
        if self._run is not None and run["run"] != self._run:
            raise OwnedError(
                f"run {run['run']} of the pipeline has begun; this is run {self._run} and may not write any more",
                fix="stop this process; `tailrace status FILE` names the one that runs",
            )
