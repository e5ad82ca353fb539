"""What `tailrace run` and `tailrace status` show: a live table on a terminal, lines of text or JSON elsewhere."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from tailrace.cli.log import stamp
from tailrace.cli.text import say
from tailrace.errors import Finding, PipelinePlace, name_file
from tailrace.model.quantity_text import format_bytes, format_seconds
from tailrace.state import Owner, RunRecord, TableState
from tailrace.state.report import AlertRecord
from tailrace.state.status import PipelineStatus, TableStatus
from tailrace.system.plain_text import plain

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live

_LINE_SECONDS = 5.0
_STYLES = {TableState.READY: "green", TableState.ERRORED: "bold red", TableState.INIT: "dim"}


class ProgressView(Protocol):
    """Shows one status after the other within its `with` block. `show` may be called at any rate."""

    def show(self, status: PipelineStatus) -> None: ...

    def note(self, text: str) -> None:
        """Say something next to it, from any thread."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class LiveView:
    """A table on the terminal that is drawn again with every status."""

    def __init__(self, console: Console, file: Path | None = None) -> None:
        self._console = console
        self._file = file
        self._live: Live | None = None
        self._drawn: dict[str, Group] = {}

    def show(self, status: PipelineStatus) -> None:
        from rich.console import Group

        if self._live:
            self._drawn[status.pipeline] = draw(status, self._file)
            self._live.update(Group(*self._drawn.values()), refresh=True)

    def note(self, text: str) -> None:
        # Above the table: a line on stderr would be written into it.
        self._console.print(plain(text), markup=False)

    def __enter__(self) -> Self:
        from rich.live import Live

        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.__exit__(kind, error, trace)
            self._live = None


class LineView:
    """Lines for logs: one for each change of a table's state or pause, one for each new notice, and one for the
    pipeline every few seconds.

    `key=value` text, or JSON objects with `as_json`. Keys and their order are stable.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        file: Path | None = None,
        *,
        as_json: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write
        self._file = file
        self._as_json = as_json
        self._clock = clock
        self._states: dict[tuple[str, str], tuple[TableState, bool]] = {}
        self._notices: dict[str, tuple[Finding, ...]] = {}
        self._next: dict[str, float] = {}

    def show(self, status: PipelineStatus) -> None:
        name, place = status.pipeline, _place_of(status, self._file)
        for table in status.tables:
            standing = (table.state, table.paused_at is not None)
            if self._states.get((name, table.name)) != standing:
                self._states[name, table.name] = standing
                level = "error" if table.state is TableState.ERRORED else "info"
                self._line(status, level, "table", _table_values(table, place))
        for notice in status.notices:
            if notice not in self._notices.get(name, ()):
                fix = name_file(notice.fix, place)
                self._line(status, notice.level, "notice", {**notice.to_dict(), "fix": fix})
        self._notices[name] = status.notices
        if self._clock() >= self._next.get(name, float("-inf")):
            self._next[name] = self._clock() + _LINE_SECONDS
            is_waiting = status.source is not None and status.source.error is not None
            self._line(status, "warning" if is_waiting else "info", "progress", _values(status))

    def note(self, text: str) -> None:
        say(text, err=True)

    def _line(self, status: PipelineStatus, level: str, event: str, values: dict[str, object]) -> None:
        stamped = {**stamp(status.pipeline, level, event, status.at), **values}
        known = {key: value for key, value in stamped.items() if value is not None}
        self._write(json.dumps(stamped) if self._as_json else " ".join(f"{k}={_plain(v)}" for k, v in known.items()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def _place_of(status: PipelineStatus, file: Path | None) -> PipelinePlace | None:
    return PipelinePlace.of(file, status.pipeline) if file is not None else None


def _table_values(table: TableStatus, file: PipelinePlace | None) -> dict[str, object]:
    return {
        "table": table.name,
        "state": str(table.state),
        "rows_copied": table.rows_copied,
        "changes_applied": table.changes_applied,
        "reason": table.reason,
        "fix": name_file(table.fix, file),
        "next_try": table.next_try.isoformat(timespec="seconds") if table.next_try else None,
        "paused_at": table.paused_at.isoformat(timespec="seconds") if table.paused_at else None,
        "retry": table.retry,
        "attempts": table.attempts or None,
        "letters": table.letters or None,
    }


def _values(status: PipelineStatus) -> dict[str, object]:
    source, delivery = status.source, status.delivery
    return {
        "tables": len(status.tables),
        "ready": sum(table.state is TableState.READY for table in status.tables),
        "errored": len(status.errored),
        "batch": status.batch,
        "rows_copied": sum(table.rows_copied for table in status.tables),
        "changes_applied": sum(table.changes_applied for table in status.tables),
        "rows_per_second": round(status.rows_per_second, 1),
        "copied_per_second": round(status.copied_per_second, 1),
        "changes_per_second": round(status.changes_per_second, 1),
        "lag_bytes": status.lag_bytes,
        "gear": source.gear if source else None,
        "journal_bytes": source.journal_bytes if source else None,
        "error": source.error if source else None,
        "pending": delivery.pending if delivery else None,
        "delivery_lag_seconds": status.delivery_lag,
        "delivery_failures": delivery.failures if delivery else None,
        "delivery_error": delivery.error if delivery else None,
    }


def _plain(value: object) -> str:
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or set(text) & set(' ="\n\t') else text


def draw(status: PipelineStatus, file: Path | None = None) -> Group:
    """The status as a table with a header, for a terminal of any width. Fixes name the pipeline's file."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    table = Table(expand=False, box=None, pad_edge=False, header_style="bold")
    for column in ("table", "state"):
        table.add_column(column, overflow="fold")
    for column in ("schema", "copied", "applied", "rows/s", "lag"):
        table.add_column(column, justify="right", no_wrap=True)
    # Those in error come first: a long list may not fit the terminal.
    for row in sorted(status.tables, key=lambda row: row.state is not TableState.ERRORED):
        style = _STYLES.get(row.state, "cyan")
        state = Text(f"{row.state}, paused" if row.paused_at else str(row.state), style)
        version = "" if row.version is None else f"v{row.version}"
        applied = f"{row.changes_applied:,}"
        table.add_row(escape(plain(row.name)), state, version, _copied(row), applied, _rate(row), _lag(row))
    place = _place_of(status, file)
    lines = [(_headline(status), "bold"), *_errors(status, place), *_notices(status, place)]
    lines += [(line, "yellow") for alert in status.alerts for line in _alert(alert, place)]
    lines += [(f"asked for: {request}", "yellow") for request in status.requests]
    first, *rest = [Text(plain(line), style) for line, style in lines]
    return Group(first, table, *rest)


Line = tuple[str, str]
"""A line and its style."""


def _errors(status: PipelineStatus, file: PipelinePlace | None) -> Iterator[Line]:
    """Why something does not go on, each with its fix."""
    run = status.last_run
    if status.runner is None and run is not None:
        yield from _ended(run, file)
    for row in status.errored:
        yield f"{row.name}: {row.reason or 'no reason was recorded'}", "red"
        yield from _fix(row.fix, file)
        yield f"  {_next_try(row)}", ""
        if row.letters:
            waiting = f"{row.letters} of its changes waiting: tailrace errors list FILE"
            yield f"  {name_file(waiting, file)}", ""
    if status.source and status.source.error:
        yield f"source: {status.source.error}", "red"
        yield from _fix(status.source.fix, file)
    if status.delivery and status.delivery.error:
        yield f"delivery: {status.delivery.error}", "red"
        yield from _fix(status.delivery.fix, file)


def _ended(run: RunRecord, file: PipelinePlace | None) -> Iterator[Line]:
    if run.ended_at is None:
        begun = f"{run.begun_at:%Y-%m-%d %H:%M:%S} UTC"
        yield f"the last run, begun at {begun}, did not end by itself: it was killed, or its machine stopped", "yellow"
        return
    ended = f"the last run ended at {run.ended_at:%Y-%m-%d %H:%M:%S} UTC"
    if run.message is None:
        yield ended, ""
        return
    where = f" [table {run.table}]" if run.table else ""
    yield f"{ended}: {name_file(run.message, file)}{where}", "red"
    yield from _fix(run.fix, file)


def _notices(status: PipelineStatus, file: PipelinePlace | None) -> Iterator[Line]:
    for notice in status.notices:
        yield f"{notice.subject}: {notice.message}", "yellow"
        yield from _fix(notice.fix, file)


def _alert(alert: AlertRecord, file: PipelinePlace | None) -> Iterator[str]:
    if alert.told_at is not None:
        yield f"alert {alert.name}, sent at {alert.told_at:%Y-%m-%d %H:%M:%S} UTC: {name_file(alert.text, file)}"
    if alert.failure is not None:
        yield f"the alert {alert.name} could not be sent: {alert.failure}"


def _fix(fix: str | None, file: PipelinePlace | None) -> Iterator[Line]:
    for number, line in enumerate((name_file(fix, file) or "").split("\n") if fix else ()):
        yield f"       {line.lstrip()}" if number else f"  fix: {line}", ""


def _next_try(table: TableStatus) -> str:
    tried = f"it was tried {table.attempts} times" if table.attempts != 1 else "it was tried once"
    if table.next_try:
        return f"{tried}; the next attempt is at {table.next_try:%H:%M:%S} UTC"
    return f"{tried}; only a new copy helps" if table.retry == "none" else f"{tried}, and waits for `tailrace retry`"


def _headline(status: PipelineStatus) -> str:
    source = status.source
    parts = [status.pipeline, _running(status.runner) if status.runner else "is not running"]
    if source and source.gear:
        parts.append(source.gear)
    if source and source.journal_bytes is not None:
        parts.append(f"journal {format_bytes(source.journal_bytes)}")
    if status.errored:
        parts.append(f"{len(status.errored)} of {len(status.tables)} tables in error")
    if status.lag_bytes is not None:
        parts.append(f"lag {format_bytes(status.lag_bytes)}")
    if status.delivery and status.delivery.pending:
        lag = f", the oldest {status.delivery_lag:,.0f} s old" if status.delivery_lag is not None else ""
        parts.append(f"{status.delivery.pending:,} events not delivered{lag}")
    if status.copied_per_second:
        parts.append(f"{status.copied_per_second:,.0f} rows/s copied")
    parts.append(f"{status.changes_per_second:,.0f} changes/s")
    if status.slot and status.slot.full_in is not None:
        parts.append(f"slot full in {format_seconds(status.slot.full_in)}")
    return " · ".join(parts)


def _running(owner: Owner) -> str:
    elsewhere = f" on {owner.host}" if owner.host != socket.gethostname() else ""
    return f"process {owner.pid}{elsewhere}"


def _copied(table: TableStatus) -> str:
    if table.state is TableState.DATA_SYNC and table.rows_total:
        # The total is the upstream's estimate; the copy may find more.
        share = min(99, 100 * table.rows_copied // table.rows_total)
        return f"{table.rows_copied:,} of ~{table.rows_total:,} {share:>2}%"
    return f"{table.rows_copied:,}"


def _rate(table: TableStatus) -> str:
    return "" if table.rows_per_second is None else f"{table.rows_per_second:,.0f}"


def _lag(table: TableStatus) -> str:
    parts = [format_bytes(table.lag_bytes)] if table.lag_bytes is not None else []
    if table.lag_seconds is not None:
        parts.append(f"{table.lag_seconds:,.1f} s")
    return " ".join(parts)
