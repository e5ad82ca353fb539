"""One table: its error and what to do, its columns over time, its counts by hour, what can be asked for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from tailrace import errors
from tailrace.config.pipeline import PipelineConfig
from tailrace.dashboard.answer import JsonAnswer
from tailrace.dashboard.event import events_of
from tailrace.dashboard.fix import command, fix_of
from tailrace.dashboard.record import hour_to_dict, iso, letter_to_dict, request_to_dict
from tailrace.dashboard.row import row_of
from tailrace.state import StateStore, TableState
from tailrace.state.activity import KEPT_HOURS
from tailrace.state.operation import EFFECTS, NEEDS, OpenRequests, is_of_use, open_requests
from tailrace.state.record import RETRIES, RequestKind
from tailrace.state.status import TableStatus

if TYPE_CHECKING:
    from tailrace.model.schema import Column, TableSchema

KINDS: tuple[RequestKind, ...] = get_args(RequestKind)
_READ_REQUESTS = 200
_SHOWN_LETTERS = 50


@dataclass(frozen=True)
class TableView:
    """The answer about one table."""

    config: PipelineConfig
    file: Path | errors.PipelinePlace
    table: TableStatus

    def read(self, store: StateStore) -> JsonAnswer:
        table = self.table
        requests = [one for one in store.recent_requests(_READ_REQUESTS) if one.table == table.name]
        letters = store.recent_letters(_SHOWN_LETTERS, table.name)
        since = datetime.now(UTC) - timedelta(hours=KEPT_HOURS)
        versions = _versions(store, table.upstream_id)
        return JsonAnswer.of(
            {
                "pipeline": self.config.name,
                "file": str(self.file),
                **row_of(table),
                "hours": [hour_to_dict(hour) for hour in store.activity(since, table.upstream_id)],
                "position": table.position,
                "chunks_done": table.chunks_done,
                "chunks_total": table.chunks_total,
                "last_change_committed_at": iso(table.last_change_committed_at),
                "last_applied_at": iso(table.last_applied_at),
                "states": [
                    {"state": state.value, "at": iso(at)}
                    for state, at in sorted(table.since.items(), key=lambda one: one[1])
                ],
                "error": self._error() if table.state is TableState.ERRORED else None,
                "columns": [_column(column, versions[-1][1]) for column in versions[-1][1].columns] if versions else [],
                "versions": _history(versions),
                "letters": [letter_to_dict(letter, self.file) for letter in letters],
                "requests": [request_to_dict(request) for request in requests],
                "actions": [self._action(kind, open_requests(requests)) for kind in KINDS],
                "events": [event.to_dict() for event in events_of([table], requests, letters)],
            }
        )

    def _error(self) -> dict[str, Any]:
        table, settings = self.table, self.config.tables.settings_of(self.table.name).errors
        code = table.code or errors.TableError.code
        is_kept = table.resume is not None
        return {
            "code": code,
            "docs": f"docs/errors.md#{code}",
            "message": errors.name_file(table.reason, self.file),
            "fix": fix_of(table.fix, self.file, table.name),
            "retry": table.retry,
            "retry_meaning": RETRIES[table.retry] if table.retry else None,
            "attempts": table.attempts,
            "attempts_allowed": settings.attempts,
            "next_try": iso(table.next_try),
            "failed_in": table.failed_in.value if table.failed_in else None,
            "resumes_at": table.resume,
            "log_kept_until": iso(table.entered_at + timedelta(seconds=settings.hold)) if is_kept else None,
        }

    def _action(self, kind: RequestKind, opened: OpenRequests) -> dict[str, Any]:
        """What can be asked for the table, and why not if it would do nothing."""
        table = self.table
        possible = table.letters > 0 if kind == "skip" else is_of_use(kind, table, opened)
        hindrance = f"it is {NEEDS[kind][1]}" if kind in NEEDS else "no change waits to be skipped"
        return {
            "action": kind,
            "command": command(kind, self.file, table.name),
            "effect": EFFECTS[kind],
            "possible": possible,
            "hindrance": None if possible else hindrance,
            "asked": (kind, table.name) in opened,
        }


def _versions(store: StateStore, upstream_id: str) -> list[tuple[str, TableSchema]]:
    """Every version that is kept, with the position where it begins, oldest first."""
    from tailrace.model.change import START, Position, end_of  # pyarrow: loaded only where a table is looked at

    found: list[tuple[Position, TableSchema]] = store.schemas_between(upstream_id, START, end_of(2**63 - 1))
    return [(str(position), schema) for position, schema in found]


def _history(versions: Sequence[tuple[str, TableSchema]]) -> list[dict[str, Any]]:
    """What each version changed, newest first."""
    history = []
    for index, (position, schema) in enumerate(versions):
        before = versions[index - 1][1] if index else None
        changes = compare(before, schema) if before else [f"{len(schema.columns)} columns"]
        history.append({"version": schema.version, "position": position, "changes": changes})
    return history[::-1]


def compare(before: TableSchema, after: TableSchema) -> list[str]:
    """What became of the columns, in words."""
    old, new = ({_identity(column): column for column in schema.columns} for schema in (before, after))
    found = [f"{new[key].name} {_type(new[key])} added" for key in new if key not in old]
    found += [f"{old[key].name} dropped" for key in old if key not in new]
    for key in [key for key in new if key in old]:
        one, other = old[key], new[key]
        if one.name != other.name:
            found.append(f"{one.name} renamed to {other.name}")
        if _type(one) != _type(other):
            found.append(f"{other.name} {_type(one)} became {_type(other)}")
        if one.nullable != other.nullable:
            found.append(f"{other.name} {'may' if other.nullable else 'must not'} be null")
    if before.key != after.key:
        found.append(f"key ({', '.join(before.key)}) became ({', '.join(after.key)})")
    if before.table != after.table:
        found.append(f"table {before.table} renamed to {after.table}")
    return found or ["nothing that columns show"]


def _identity(column: Column) -> object:
    # The upstream's number of a column survives its rename; not every upstream has one.
    return column.number or column.name


def _type(column: Column) -> str:
    return column.upstream_type or str(column.type)


def _column(column: Column, schema: TableSchema) -> dict[str, Any]:
    return {
        "name": column.name,
        "type": str(column.type),
        "upstream_type": column.upstream_type,
        "nullable": column.nullable,
        "key": column.name in schema.key,
    }
