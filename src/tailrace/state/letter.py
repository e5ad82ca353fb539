"""Changes that could not be applied, in SQL."""

from __future__ import annotations

from tailrace.state.record import DeadLetter, DeadLetterStatus
from tailrace.state.row import now, read_dead_letter, storable, text_of
from tailrace.state.session import StateSession


class DeadLetterStore:
    """Implements `DeadLetters` over a session."""

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
        wanted = "SELECT * FROM dead_letter WHERE pipeline = :pipeline"
        wanted += ' AND "table" = :table' if table is not None else ""
        wanted += " AND status = :status" if status is not None else ""
        rows = self._session.read(f"{wanted} ORDER BY id", table=table, status=status)
        return [read_dead_letter(row) for row in rows]

    def dead_letter(self, letter_id: int) -> DeadLetter | None:
        rows = self._session.read("SELECT * FROM dead_letter WHERE pipeline = :pipeline AND id = :id", id=letter_id)
        return read_dead_letter(rows[0]) if rows else None

    def settle_dead_letter(self, letter_id: int, status: DeadLetterStatus) -> None:
        with self._session.write() as tx:
            tx.run(
                "UPDATE dead_letter SET status = :status WHERE pipeline = :pipeline AND id = :id",
                status=status,
                id=letter_id,
            )

    def skips(self) -> dict[str, list[str]]:
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
