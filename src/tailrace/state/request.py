"""What operators ask of the runner, in SQL. Requests are kept after they are done, with what came of them."""

from __future__ import annotations

from tailrace.state.record import OperatorRequest, RequestKind
from tailrace.state.row import now, read_request, storable, text_of
from tailrace.state.session import StateSession

_UNDONE_BY: dict[RequestKind, RequestKind] = {"pause": "resume", "resume": "pause"}


class RequestStore:
    """Implements `Requests` over a session."""

    _session: StateSession

    def ask(self, kind: RequestKind, table: str, argument: str | None = None) -> OperatorRequest:
        # An operator's command is no runner: it must work beside one.
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
        rows = self._session.read("SELECT * FROM request WHERE pipeline = :pipeline AND done_at IS NULL ORDER BY id")
        return [read_request(row) for row in rows]

    def request(self, request_id: int) -> OperatorRequest | None:
        rows = self._session.read("SELECT * FROM request WHERE pipeline = :pipeline AND id = :id", id=request_id)
        return read_request(rows[0]) if rows else None

    def finish_request(self, request_id: int, outcome: str | None = None) -> None:
        with self._session.write() as tx:
            tx.run(
                "UPDATE request SET done_at = :at, outcome = :outcome"
                " WHERE pipeline = :pipeline AND id = :id AND done_at IS NULL",
                at=text_of(now()),
                outcome=storable(outcome) if outcome else outcome,
                id=request_id,
            )
