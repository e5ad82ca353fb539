"""Stops tables: from an error, or a finding of a check, to what the state store keeps of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from tailrace.advice import advice_for
from tailrace.errors import Finding, PreflightError, TailraceError
from tailrace.option.table import TableOptions
from tailrace.state import StateStore, TableRecord
from tailrace.state.record import Retry
from tailrace.system.backoff import Backoff

_log = logging.getLogger(__name__)

LONGEST_WAIT_SECONDS = 3600.0

UNFOLLOWED = "unfollowed "
"""Before the name, the upstream id of a table that is selected but that the source cannot follow."""


class TableFailures:
    """Records why tables are stopped, and how they are retried."""

    def __init__(
        self, store: StateStore, tables: TableOptions, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._store = store
        self._tables = tables
        self._clock = clock

    def fail(self, table: TableRecord, error: TailraceError, *, reached: str | None, attempts: int) -> None:
        """Stop a table with the error of a batch. `reached` is where it continues; None: with a new copy."""
        advice, settings = advice_for(type(error)), self._tables.settings_of(table.name).errors
        retry = self._retry_of(table, advice.retry)
        if retry == "timed" and not advice.recopies and attempts >= settings.attempts:
            retry = "manual"
        _log.info("%s is stopped: %s", table.name, error.message, extra={"table": table.name, "code": error.code})
        if error.raw is not None and error.position is not None:
            self._store.put_dead_letter(
                table.upstream_id,
                table.name,
                error.position,
                kind=type(error).__name__,
                reason=error.message,
                fix=error.fix,
                raw=error.raw,
                version=table.version,
            )
        self._stop(
            table,
            error.message,
            error.fix or advice.text,
            retry,
            resume=None if advice.recopies else reached,
            attempts=attempts,
            code=error.code,
            wait=0.0 if advice.recopies else None,
        )

    def refuse(self, table: TableRecord, finding: Finding, *, reached: str | None) -> None:
        """Stop a table because of a finding. A retry begins with a check, so that the number of retries has no limit:
        each costs no batch."""
        retry = self._retry_of(table, "timed")
        attempts = table.attempts + 1
        code = PreflightError.code
        self._stop(table, finding.message, finding.fix, retry, resume=reached, attempts=attempts, code=code)

    def _retry_of(self, table: TableRecord, advised: Retry) -> Retry:
        own = self._tables.settings_of(table.name).errors.retry
        return advised if own == "timed" else own

    def _stop(
        self,
        table: TableRecord,
        reason: str,
        fix: str | None,
        retry: Retry,
        *,
        resume: str | None,
        attempts: int,
        code: str,
        wait: float | None = None,
    ) -> None:
        if wait is None:
            first = self._tables.settings_of(table.name).errors.backoff
            wait = Backoff((first,), LONGEST_WAIT_SECONDS, factor=2.0).delay(attempts)
        self._store.fail_table(
            table.upstream_id,
            reason,
            fix=fix,
            retry=retry,
            resume=None if retry == "none" else resume,
            attempts=attempts,
            code=code,
            next_try=self._clock() + timedelta(seconds=wait) if retry == "timed" else None,
        )
