"""Whether a SlateDB database can be followed, now and in the near future."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrace.errors import Finding, TailraceError
from tailrace.source.slatedb.object_store import binding
from tailrace.source.slatedb.offset import SlateDbOffset
from tailrace.source.slatedb.wal import Head, find_tail, read_head
from tailrace.system.status_file import read_file, write_file

if TYPE_CHECKING:
    from tailrace.source.slatedb.follower import CopyAttempt
    from tailrace.source.slatedb.source import SlateDbSource


def check(source: SlateDbSource) -> list[Finding]:
    """Everything that prevents following it, or soon may. Reads the manifest and the end of the WAL."""
    where = f"database {source.database.path}"
    try:
        binding()
        head = read_head(source.database)
        tail = find_tail(source.database, head.flushed)
    except TailraceError as error:
        return [Finding("error", where, error.message, error.fix)]
    return [_log(head, tail), _retention(source), *_tables(source), Finding("ok", where, "can be read")]


def _log(head: Head, tail: int) -> Finding:
    # Every writer begins with an empty file. If there are rows but no other file, they were not written to the WAL.
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
        f"an outage must not last longer than {source.options.min_age:.0f} s (min_age of the writer's garbage"
        " collection); keep_wal removes that limit while the pipeline runs",
    )


def _tables(source: SlateDbSource) -> list[Finding]:
    names = [rule.name for rule in source.rules]
    idle = source.context.tables.idle_patterns(names)
    found = [Finding("warning", "tables", f"the pattern {pattern} matches no table") for pattern in idle]
    strangers = [name for name, one in source.context.tables.settings.items() if name not in names and not one.mapping]
    found += [Finding("warning", "tables", f"settings name {name}, which is not a table here") for name in strangers]
    if not source.followed:
        found.append(Finding("error", "tables", "no table is followed", f"include one of {', '.join(names)}"))
    return found


# The follower's status, for `tailrace status` and `check`: a small file in the state folder.

_EVERY_SECONDS = 1.0
_WARN_FRACTION = 0.5
"""Warn once the oldest file that is still needed has reached this fraction of `min_age`."""


class Watch:
    """Writes the status at most once a second. `min_age` is None where WAL files are kept."""

    def __init__(self, file: Path, min_age_seconds: float | None) -> None:
        self._file = file
        self._min_age = min_age_seconds
        self._written = 0.0

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._written >= _EVERY_SECONDS

    def write(
        self,
        now: SlateDbOffset,
        tail: int,
        oldest_ms: int | None,
        kept_bytes: int | None,
        retries: Mapping[str, CopyAttempt],
    ) -> None:
        """`oldest_ms` is when the oldest file that is still needed and not kept was written; None when there is none.

        `retries` are the tables whose copy lost its log.
        """
        self._written = time.monotonic()
        age = 0.0 if oldest_ms is None else max(0.0, time.time() - oldest_ms / 1000)
        status: dict[str, Any] = {
            "gear": "tail" if now.low_water.wal >= tail else "behind",
            "received": str(now.log.position),
            "journal_bytes": kept_bytes,
            "wal": now.low_water.wal,
            "tail": tail,
            "age": age,
            **self._warning(now, age, retries),
        }
        write_file(self._file, status)

    def _warning(self, now: SlateDbOffset, age: float, retries: Mapping[str, CopyAttempt]) -> dict[str, str]:
        for name, attempt in retries.items():
            return {
                "error": f"SlateDB deleted WAL files that the copy of {name} needed, {attempt.failures} times"
                + (f"; it starts again in {attempt.seconds_left:.0f} s" if attempt.seconds_left else "; it runs again"),
                "fix": "raise min_age of the writer's WAL garbage collection, raise copy_buffer, or set keep_wal",
            }
        if self._min_age is None or age < self._min_age * _WARN_FRACTION:
            return {}
        return {
            "error": f"WAL file {now.low_water.wal + 1} is still needed and {age:.0f} s old; SlateDB may delete it from"
            f" {self._min_age:.0f} s on",
            "fix": "raise min_age of the writer's WAL garbage collection, or set keep_wal",
        }
