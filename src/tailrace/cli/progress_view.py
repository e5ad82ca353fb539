"""What `tailrace run` and `tailrace status` show: a live table on a terminal, lines of text or JSON elsewhere."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from tailrace.cli.error import name_file
from tailrace.state import Owner, TableState
from tailrace.state.status import PipelineStatus, TableStatus

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live

_LINE_SECONDS = 5.0
_STYLES = {TableState.READY: "green", TableState.ERRORED: "bold red", TableState.INIT: "dim"}


class ProgressView(Protocol):
    """Shows one status after the other within its `with` block. `show` may be called at any rate."""

    def show(self, status: PipelineStatus) -> None: ...

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

    def show(self, status: PipelineStatus) -> None:
        if self._live:
            self._live.update(draw(status, self._file), refresh=True)

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
    """Lines for logs: one for each change of a table's state or pause, and one for the pipeline every few seconds.

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
        self._states: dict[str, tuple[TableState, bool]] = {}
        self._next = float("-inf")

    def show(self, status: PipelineStatus) -> None:
        for table in status.tables:
            standing = (table.state, table.paused_at is not None)
            if self._states.get(table.name) != standing:
                self._states[table.name] = standing
                self._line(status, {"event": "table", **_table_values(table, self._file)})
        if self._clock() >= self._next:
            self._next = self._clock() + _LINE_SECONDS
            self._line(status, {"event": "progress", **_values(status)})

    def _line(self, status: PipelineStatus, values: dict[str, object]) -> None:
        stamped = {"at": status.at.isoformat(timespec="milliseconds"), "pipeline": status.pipeline, **values}
        known = {key: value for key, value in stamped.items() if value is not None}
        self._write(json.dumps(stamped) if self._as_json else " ".join(f"{k}={_plain(v)}" for k, v in known.items()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def _table_values(table: TableStatus, file: Path | None) -> dict[str, object]:
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
    source = status.source
    return {
        "tables": len(status.tables),
        "ready": sum(table.state is TableState.READY for table in status.tables),
        "errored": len(status.errored),
        "batch": status.batch,
        "rows_copied": sum(table.rows_copied for table in status.tables),
        "changes_applied": sum(table.changes_applied for table in status.tables),
        "rows_per_second": round(status.rows_per_second, 1),
        "lag_bytes": status.lag_bytes,
        "gear": source.gear if source else None,
        "journal_bytes": source.journal_bytes if source else None,
        "error": source.error if source else None,
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
    for row in status.tables:
        style = _STYLES.get(row.state, "cyan")
        state = Text(f"{row.state}, paused" if row.paused_at else str(row.state), style)
        version = "" if row.version is None else f"v{row.version}"
        applied = f"{row.changes_applied:,}"
        table.add_row(escape(row.name), state, version, _copied(row), applied, _rate(row), _lag(row))
    parts: list[Table | Text] = [Text(_headline(status), "bold"), table]
    for row in status.errored:
        parts.append(Text(f"{row.name}: {row.reason or 'no reason was recorded'}", "red"))
        if row.fix:
            parts.append(Text(f"  fix: {name_file(row.fix, file)}"))
        parts.append(Text(f"  {_next_try(row)}"))
        if row.letters:
            waiting = f"{row.letters} of its changes waiting: tailrace errors list FILE"
            parts.append(Text(f"  {name_file(waiting, file)}"))
    if status.source and status.source.error:
        parts.append(Text(f"source: {status.source.error}", "red"))
        if status.source.fix:
            parts.append(Text(f"  fix: {name_file(status.source.fix, file)}"))
    parts += [Text(f"asked for: {request}", "yellow") for request in status.requests]
    return Group(*parts)


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
    if status.lag_bytes is not None:
        parts.append(f"lag {format_bytes(status.lag_bytes)}")
    parts.append(f"{status.rows_per_second:,.0f} rows/s")
    return " · ".join(parts)


def _running(owner: Owner) -> str:
    elsewhere = f" on {owner.host}" if owner.host != socket.gethostname() else ""
    return f"runs as process {owner.pid}{elsewhere}"


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


def format_bytes(count: int) -> str:
    """`12.3 MB` for people."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
