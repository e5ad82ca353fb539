"""Events that came without their row: the first after ADD COLUMN, those with an error, all of `row_ids_only`.

With an API, the row's current state is queried. It may be newer than the event: the changes in between follow in the
log, and every key ends at its last one. A row that is gone has its delete later in the log.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tailrace.model.schema import TableSchema
from tailrace.source.rqlite.api import Api
from tailrace.source.rqlite.decode import EventDict, Events, identifies_row, needs_image, unreadable
from tailrace.source.rqlite.query import fetch_by_rowid
from tailrace.source.sqlite.catalog import rowid_column

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Completed:
    """Complete events, and for each the columns whose value is no longer known."""

    events: Events
    gone: list[set[str]] | None = None


def complete(table: TableSchema, events: Events, api: Api | None, *, passes: bool) -> Completed:
    """The events with their images. What cannot be completed raises TableError, or with `passes` is left out.

    `passes` applies only without an API. Not repeatable byte for byte: a repeat reads the rows as they are by then.
    """
    by_rowid = rowid_column(table) is not None
    lacking = [at for at, event in enumerate(events.events) if needs_image(event, by_rowid=by_rowid)]
    if not lacking:
        return Completed(events)
    if api is None:
        return _without_api(table, events, lacking, passes=passes)
    for at in lacking:
        _require_identity(table, events, at, by_rowid=by_rowid)
    rows, columns = fetch_by_rowid(api, table, [events.events[at].get("new_row_id", 0) for at in lacking])
    whole, found = set(range(len(events))) - set(lacking), Events()
    gone: list[set[str]] = []
    for at, event in enumerate(events.events):
        if at in whole:
            found.events.append(event)
            gone.append(set())
        else:
            row = rows.get(event.get("new_row_id", 0))
            kept = {**event, "after": row} if row is not None else _deletion(event, by_rowid=by_rowid)
            if kept is None:
                continue
            found.events.append(kept)
            gone.append(columns if row is not None else set())
        found.lines.append(events.lines[at])
    return Completed(found, gone)


def _deletion(event: EventDict, *, by_rowid: bool) -> EventDict | None:
    """What remains of an insert or update whose row is gone: a delete of its old row, if the event identifies it."""
    if not by_rowid or event["op"] == "INSERT":
        return None
    return {name: value for name, value in event.items() if name != "new_row_id"} | {"op": "DELETE"}


def _require_identity(table: TableSchema, events: Events, at: int, *, by_rowid: bool) -> None:
    if identifies_row(events.events[at], by_rowid=by_rowid):
        return
    raise unreadable(
        table,
        events,
        at,
        f"it came without its row, and its key ({', '.join(table.key)}) is not the rowid",
        fix=f"tailrace resync FILE {table.table}",
    )


def _without_api(table: TableSchema, events: Events, lacking: list[int], *, passes: bool) -> Completed:
    if not passes:
        raise unreadable(
            table,
            events,
            lacking[0],
            "it came without its row, and no API is configured to read it from",
            fix=f"give source.api for {table.table.schema} and tailrace resync FILE {table.table}; "
            "or tailrace errors skip FILE ID; or set missing_images: pass",
        )
    _log.warning("%d changes of %s came without their row and were skipped", len(lacking), table.table)
    left = sorted(set(range(len(events))) - set(lacking))
    return Completed(Events([events.events[at] for at in left], [events.lines[at] for at in left]))
