"""What a run reports for people, in SQL: how it ended, what it leaves out, how its deliveries stand."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any, Literal

from tailrace.errors import Finding, TailraceError
from tailrace.model.delivery_status import DeliveryStatus
from tailrace.state.record import now, storable, text_of, time_of
from tailrace.state.transaction import StateSession, StateTransaction

_FIRST_FORMAT = 4
"""Older stores lack the table, and have no report."""

ReportSubject = Literal["run", "notices", "delivery", "destination", "alerts"]


@dataclass(frozen=True)
class RunRecord:
    """The last run. `ended_at` is None while it goes on, and also after its process was killed.

    `kind`, `message`, `table` and `fix` are those of the error that ended it; None after an end without one.
    """

    begun_at: datetime
    ended_at: datetime | None = None
    kind: str | None = None
    message: str | None = None
    table: str | None = None
    fix: str | None = None

    def end(self, error: TailraceError | None) -> RunRecord:
        """The run, ended now."""
        ended = replace(self, ended_at=now())
        if error is None:
            return ended
        return replace(ended, kind=type(error).__name__, message=error.message, table=error.table, fix=error.fix)

    def to_dict(self) -> dict[str, Any]:
        ended = text_of(self.ended_at) if self.ended_at else None
        return {**asdict(self), "begun_at": text_of(self.begun_at), "ended_at": ended}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunRecord:
        ended = time_of(values["ended_at"]) if values["ended_at"] else None
        return cls(**{**values, "begun_at": time_of(values["begun_at"]), "ended_at": ended})


@dataclass(frozen=True)
class AlertRecord:
    """What is known of one alert. Since `since` it holds, or does not.

    `told_at` is when people were last told that it holds, in the sentence `text`, and about which `tables`; None while
    they need not know. `failure` is why they could not be told.
    """

    name: str
    holds: bool
    since: datetime
    told_at: datetime | None = None
    text: str | None = None
    tables: tuple[str, ...] = ()
    failure: str | None = None

    def to_dict(self) -> dict[str, Any]:
        told = text_of(self.told_at) if self.told_at else None
        return {**asdict(self), "since": text_of(self.since), "told_at": told, "tables": list(self.tables)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> AlertRecord:
        told = time_of(values["told_at"]) if values["told_at"] else None
        since, tables = time_of(values["since"]), tuple(values["tables"])
        return cls(**{**values, "since": since, "told_at": told, "tables": tables})


# The code of the error that stopped each table: a report on a subject of its own.

_FAILURE = "failure "
_PUT = (
    "INSERT INTO report (pipeline, subject, value, at) VALUES (:pipeline, :subject, :value, :at)"
    " ON CONFLICT (pipeline, subject) DO UPDATE SET value = excluded.value, at = excluded.at"
)


def put_failure_code(tx: StateTransaction, upstream_id: str, code: str) -> None:
    tx.run(_PUT, subject=_FAILURE + upstream_id, value=code, at=text_of(now()))


def drop_failure_code(tx: StateTransaction, upstream_id: str) -> None:
    tx.run("DELETE FROM report WHERE pipeline = :pipeline AND subject = :subject", subject=_FAILURE + upstream_id)


class ReportStore:
    """What the last run reported. Each report replaces the one before it on the same subject."""

    _session: StateSession
    _reported: dict[str, str] | None = None

    def put_run(self, run: RunRecord) -> None:
        self._put_report("run", run.to_dict())

    def last_run(self) -> RunRecord | None:
        found = self._report("run")
        return RunRecord.from_dict(found) if found else None

    def put_notices(self, notices: Sequence[Finding]) -> None:
        """Replace what the run leaves out: tables that are selected and not followed, columns that are not sent."""
        self._put_report("notices", [notice.to_dict() for notice in notices])

    def notices(self) -> list[Finding]:
        return [Finding(**each) for each in self._report("notices") or []]

    def put_delivery(self, status: DeliveryStatus) -> None:
        self._put_report("delivery", asdict(status))

    def delivery(self) -> DeliveryStatus | None:
        found = self._report("delivery")
        return DeliveryStatus(**found) if found else None

    def put_alerts(self, alerts: Sequence[AlertRecord]) -> None:
        self._put_report("alerts", [alert.to_dict() for alert in alerts])

    def alerts(self) -> list[AlertRecord]:
        return [AlertRecord.from_dict(each) for each in self._report("alerts") or []]

    def put_destination(self, name: str) -> None:
        """Store where batches are written. A path may contain bytes that are not valid text."""
        self._put_report("destination", os.fsencode(name).hex())

    def destination(self) -> str | None:
        """Where earlier batches were written; None before the first run, and in a store of an older tailrace."""
        found = self._report("destination")
        return os.fsdecode(bytes.fromhex(found)) if found else None

    def _put_report(self, subject: ReportSubject, value: object) -> None:
        text = storable(json.dumps(value, ensure_ascii=False))
        written = self._reported = self._reported or {}
        if written.get(subject) == text:
            return
        with self._session.write() as tx:
            tx.run(
                _PUT,
                subject=subject,
                value=text,
                at=text_of(now()),
            )
            tx.then(lambda: written.update({subject: text}))

    def failure_codes(self) -> dict[str, str]:
        """By the tables' upstream ids, the code of the error that stopped each last, also of those that go on since."""
        if not self._has_reports():
            return {}
        rows = self._session.read(
            "SELECT subject, value FROM report WHERE pipeline = :pipeline AND subject LIKE :subjects",
            subjects=f"{_FAILURE}%",
        )
        return {row["subject"].removeprefix(_FAILURE): row["value"] for row in rows}

    def _has_reports(self) -> bool:
        database = self._session.database
        with self._session.lock:
            if self._reported is None and database.format(database.read) < _FIRST_FORMAT:
                return False
            self._reported = self._reported or {}
            return True

    def _report(self, subject: ReportSubject) -> Any:
        if not self._has_reports():
            return None
        rows = self._session.read(
            "SELECT value FROM report WHERE pipeline = :pipeline AND subject = :subject", subject=subject
        )
        return json.loads(rows[0]["value"]) if rows else None
