"""What was applied durably, what operators asked for, and what was set aside, in SQL."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tailrace.errors import LostError
from tailrace.state.activity import ActivityStore
from tailrace.state.record import (
    LETTER_COLUMNS,
    STATUS_COLUMNS,
    BatchRecord,
    DeadLetter,
    DeadLetterStatus,
    OperatorRequest,
    RequestKind,
    SourceStatus,
    TableRecord,
    TableUpdate,
    now,
    read_batch,
    read_dead_letter,
    read_request,
    read_source_status,
    storable,
    text_of,
    write_source_status,
)
from tailrace.state.state_machine import TableState
from tailrace.state.table import TableStore, add_up
from tailrace.state.transaction import StateSession, StateTransaction

_KEPT_BATCHES = 1000
_SAVE_STATUS = (
    f"INSERT INTO source_status (pipeline, {', '.join(STATUS_COLUMNS)})"  # noqa: S608 - names of columns, all ours
    f" VALUES (:pipeline, {', '.join(f':{name}' for name in STATUS_COLUMNS)}) ON CONFLICT (pipeline)"
    f" DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in STATUS_COLUMNS)}"
)


class ProgressStore(TableStore, ActivityStore):
    """What was applied durably: a batch is recorded together with what it did to its tables."""

    def apply_batch(self, batch: BatchRecord, updates: Sequence[TableUpdate] = ()) -> bool:
        """Record a batch and what it did to its tables in one transaction; False when it was recorded before.

        Raises LostError for an old batch id with another offset: then checkpoint and state are of different pipelines.
        """
        offset = json.dumps(batch.offset, sort_keys=True)
        with self._session.write() as tx:
            last = tx.run("SELECT MAX(batch_id) AS id FROM progress WHERE pipeline = :pipeline")[0]["id"]
            if last is not None and batch.id <= last:
                known = tx.run(
                    'SELECT "offset" FROM progress WHERE pipeline = :pipeline AND batch_id = :id', id=batch.id
                )
                if not known or known[0]["offset"] != offset:
                    raise LostError(
                        f"batch {batch.id} comes again with another offset; batch {last} was applied before it",
                        fix="restore the checkpoint that belongs to this state, or move both away and copy again",
                    )
                return False
            tx.run(
                'INSERT INTO progress (pipeline, batch_id, "offset", position, rows, bytes, seconds, at)'
                " VALUES (:pipeline, :id, :offset, :position, :rows, :bytes, :seconds, :at)",
                id=batch.id,
                offset=offset,
                position=batch.position,
                rows=batch.rows,
                bytes=batch.bytes,
                seconds=float(batch.seconds),
                at=text_of(batch.at or now()),
            )
            tx.run(
                "DELETE FROM progress WHERE pipeline = :pipeline AND batch_id <= :oldest",
                oldest=batch.id - _KEPT_BATCHES,
            )
            self._update(tx, updates)
            self._record_activity(tx, batch, updates, _KEPT_BATCHES)
        return True

    def _update(self, tx: StateTransaction, updates: Sequence[TableUpdate]) -> None:
        if len(updates) > 1:
            tx.memory.tables(tx.run)  # one question instead of one for each table
        changed: dict[str, TableRecord] = {}
        for update in updates:
            before = changed.get(update.upstream_id) or self._find(tx, update.upstream_id)
            changed[update.upstream_id] = add_up(before, update, now())
        self._save(tx, changed.values())
        self._drop_dead_letters(tx, [update.upstream_id for update in updates if TableState.INIT in update.steps])

    def last_batch(self) -> BatchRecord | None:
        batches = self.recent_batches(1)
        return batches[0] if batches else None

    def recent_batches(self, count: int) -> list[BatchRecord]:
        """The newest batches, newest first."""
        rows = self._session.read(
            "SELECT * FROM progress WHERE pipeline = :pipeline ORDER BY batch_id DESC LIMIT :count", count=count
        )
        return [read_batch(row) for row in rows]

    def pass_over(self, position: str) -> None:
        """The log after the last batch holds nothing for its tables up to here: its position moves on, never back."""
        with self._session.write() as tx:
            tx.run(
                "UPDATE progress SET position = :position WHERE pipeline = :pipeline AND position < :position"
                " AND batch_id = (SELECT MAX(batch_id) FROM progress WHERE pipeline = :pipeline)",
                position=position,
            )

    def put_source_status(self, status: SourceStatus) -> None:
        """Replace what the receiving half said before."""
        with self._session.write() as tx:
            tx.run(_SAVE_STATUS, **write_source_status(status))

    def source_status(self) -> SourceStatus | None:
        rows = self._session.read("SELECT * FROM source_status WHERE pipeline = :pipeline")
        return read_source_status(rows[0]) if rows else None


# What operators ask of the runner, in SQL. Requests are kept after they are done, with what came of them.

_UNDONE_BY: dict[RequestKind, RequestKind] = {"pause": "resume", "resume": "pause"}


class RequestStore:
    """What operators ask of the runner."""

    _session: StateSession

    def ask(self, kind: RequestKind, table: str, argument: str | None = None) -> OperatorRequest:
        """Leave a request, also while a runner works. The same request again, while it is open, is the same one.

        A pause after a resume is not the pause before it, and so the other way round: the last one counts.
        """
        # An operator's command is no runner: it must work next to one.
        with self._session.write(fenced=False) as tx:
            rows = tx.run(
                'SELECT * FROM request WHERE pipeline = :pipeline AND kind IN (:kind, :undone_by) AND "table" = :table'
                " AND done_at IS NULL ORDER BY id",
                kind=kind,
                undone_by=_UNDONE_BY.get(kind, kind),
                table=table,
            )
            last = [row for row in rows if row["argument"] == argument][-1:]
            row = (
                [row for row in last if row["kind"] == kind]
                or tx.run(
                    'INSERT INTO request (pipeline, id, kind, "table", argument, at)'
                    " VALUES (:pipeline, :id, :kind, :table, :argument, :at) RETURNING *",
                    id=tx.next_id(),
                    kind=kind,
                    table=table,
                    argument=argument,
                    at=text_of(now()),
                )
            )[0]
        return read_request(row)

    def open_requests(self) -> list[OperatorRequest]:
        """What was asked and not done yet, oldest first."""
        rows = self._session.read("SELECT * FROM request WHERE pipeline = :pipeline AND done_at IS NULL ORDER BY id")
        return [read_request(row) for row in rows]

    def recent_requests(self, count: int) -> list[OperatorRequest]:
        """The newest, done or not, newest first."""
        rows = self._session.read(
            "SELECT * FROM request WHERE pipeline = :pipeline ORDER BY id DESC LIMIT :count", count=count
        )
        return [read_request(row) for row in rows]

    def request(self, request_id: int) -> OperatorRequest | None:
        rows = self._session.read("SELECT * FROM request WHERE pipeline = :pipeline AND id = :id", id=request_id)
        return read_request(rows[0]) if rows else None

    def finish_request(self, request_id: int, outcome: str | None = None) -> None:
        """The runner has done what was asked, and what came of it. A repeat changes nothing."""
        with self._session.write() as tx:
            tx.run(
                "UPDATE request SET done_at = :at, outcome = :outcome"
                " WHERE pipeline = :pipeline AND id = :id AND done_at IS NULL",
                at=text_of(now()),
                outcome=storable(outcome) if outcome else outcome,
                id=request_id,
            )


# Changes that could not be applied, in SQL.

_LETTER_HEAD = ", ".join(f'"{name}"' for name in LETTER_COLUMNS if name != "raw")


class DeadLetterStore:
    """Changes that could not be applied, as their upstream sent them."""

    _session: StateSession

    def put_dead_letter(
        self,
        upstream_id: str,
        table: str,
        position: str,
        *,
        kind: str,
        reason: str,
        fix: str | None = None,
        raw: bytes | None = None,
        version: int | None = None,
    ) -> DeadLetter:
        """Keep a change. The same one again, by table and position, counts a try and keeps the newest reason.

        A resolved one waits again; a skipped one stays skipped.
        """
        with self._session.write() as tx:
            rows = tx.run(
                'INSERT INTO dead_letter (pipeline, id, upstream_id, "table", position, kind, reason, fix, raw,'
                " version, tries, first_at, last_at, status) VALUES (:pipeline, :id, :upstream_id, :table, :position,"
                " :kind, :reason, :fix, :raw, :version, 1, :at, :at, 'waiting')"
                " ON CONFLICT (pipeline, upstream_id, position) DO UPDATE SET"
                ' "table" = excluded."table", kind = excluded.kind, reason = excluded.reason, fix = excluded.fix,'
                " raw = COALESCE(excluded.raw, dead_letter.raw),"
                " version = COALESCE(excluded.version, dead_letter.version),"
                " tries = dead_letter.tries + 1, last_at = excluded.last_at,"
                " status = CASE dead_letter.status WHEN 'skipped' THEN 'skipped' ELSE 'waiting' END RETURNING *",
                id=tx.next_id(),
                upstream_id=upstream_id,
                table=table,
                position=position,
                kind=kind,
                reason=storable(reason),
                fix=storable(fix) if fix else fix,
                raw=raw,
                version=version,
                at=text_of(now()),
            )
        return read_dead_letter(rows[0])

    def dead_letters(self, table: str | None = None, status: DeadLetterStatus | None = None) -> list[DeadLetter]:
        """The oldest first; of one table, by its name, or of one status."""
        wanted = "SELECT * FROM dead_letter WHERE pipeline = :pipeline"
        wanted += ' AND "table" = :table' if table is not None else ""
        wanted += " AND status = :status" if status is not None else ""
        rows = self._session.read(f"{wanted} ORDER BY id", table=table, status=status)
        return [read_dead_letter(row) for row in rows]

    def recent_letters(self, count: int, table: str | None = None) -> list[DeadLetter]:
        """The newest first, of any status, without their bytes; of one table, by its name, or of all."""
        wanted = f"SELECT {_LETTER_HEAD}, NULL AS raw FROM dead_letter WHERE pipeline = :pipeline"  # noqa: S608 - ours
        wanted += ' AND "table" = :table' if table is not None else ""
        rows = self._session.read(f"{wanted} ORDER BY last_at DESC, id DESC LIMIT :count", table=table, count=count)
        return [read_dead_letter(row) for row in rows]

    def letter_counts(self) -> dict[str, int]:
        """By the tables' upstream ids, how many of their changes wait."""
        rows = self._session.read(
            "SELECT upstream_id, COUNT(*) AS waiting FROM dead_letter"
            " WHERE pipeline = :pipeline AND status = 'waiting' GROUP BY upstream_id"
        )
        return {row["upstream_id"]: row["waiting"] for row in rows}

    def dead_letter(self, letter_id: int) -> DeadLetter | None:
        rows = self._session.read("SELECT * FROM dead_letter WHERE pipeline = :pipeline AND id = :id", id=letter_id)
        return read_dead_letter(rows[0]) if rows else None

    def settle_dead_letter(self, letter_id: int, status: DeadLetterStatus) -> None:
        """Say what became of it. A repeat changes nothing."""
        with self._session.write() as tx:
            tx.run(
                "UPDATE dead_letter SET status = :status WHERE pipeline = :pipeline AND id = :id",
                status=status,
                id=letter_id,
            )

    def skips(self) -> dict[str, list[str]]:
        """By the tables' upstream ids, the positions to leave out of what is still to be applied.

        A position that the table's stored one has reached is not given: it will not be read again.
        """
        rows = self._session.read(
            "SELECT d.upstream_id, d.position FROM dead_letter AS d LEFT JOIN table_state AS t"
            " ON t.pipeline = d.pipeline AND t.upstream_id = d.upstream_id WHERE d.pipeline = :pipeline"
            " AND d.status = 'skipped' AND (t.position IS NULL OR d.position > t.position)"
            " ORDER BY d.upstream_id, d.position"
        )
        skipped: dict[str, list[str]] = {}
        for row in rows:
            skipped.setdefault(row["upstream_id"], []).append(row["position"])
        return skipped
