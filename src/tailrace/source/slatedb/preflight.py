"""Is a SlateDB database ready to be followed?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.errors import Finding, TailraceError
from tailrace.source.slatedb.store import binding
from tailrace.source.slatedb.wal import Head, find_tail, read_head
from tailrace.statusfile import read_file

if TYPE_CHECKING:
    from tailrace.source.slatedb.source import SlateDbSource


def check(source: SlateDbSource) -> list[Finding]:
    """Everything that stands in the way, and what may before long. Reads the manifest and the end of the WAL."""
    where = f"database {source.database.path}"
    try:
        binding()
        head = read_head(source.database)
        tail = find_tail(source.database, head.flushed)
    except TailraceError as error:
        return [Finding("error", where, error.message, error.fix)]
    return [_log(head, tail), _retention(source), *_tables(source), Finding("ok", where, "can be read")]


def _log(head: Head, tail: int) -> Finding:
    # Every writer begins with an empty file: rows without any other file did not come through the WAL.
    if head.seq and tail <= head.writers:
        return Finding(
            "error",
            "WAL",
            "the database is written with wal_enabled=false: there is no change stream",
            "open it with wal_enabled=true (the default)",
        )
    return Finding("ok", "WAL", f"ends with file {tail}")


def _retention(source: SlateDbSource) -> Finding:
    if source.keep_wal is not None:
        return Finding("ok", "WAL retention", f"files are copied to {source.keep_wal}")
    status = read_file(source.status_file)
    if status.get("error"):
        return Finding("warning", "WAL retention", status["error"], status.get("fix"))
    return Finding(
        "ok",
        "WAL retention",
        f"a copy or an outage must not last longer than {source.min_age_seconds:.0f} s (min_age of the writer's garbage"
        " collection); keep_wal lifts that while the pipeline runs",
    )


def _tables(source: SlateDbSource) -> list[Finding]:
    names = [rule.name for rule in source.rules]
    idle = source.tables_wanted.idle_patterns(names)
    found = [Finding("warning", "tables", f"the pattern {pattern} matches no table") for pattern in idle]
    strangers = [name for name, one in source.tables_wanted.settings.items() if name not in names and not one.mapping]
    found += [Finding("warning", "tables", f"settings name {name}, which is no table here") for name in strangers]
    if not source.followed:
        found.append(Finding("error", "tables", "no table is followed", f"include one of {', '.join(names)}"))
    return found
