"""Polling without Spark: one process that reads changes as they arrive, and commits once they are applied.

with PollConsumer(source, FileWatermarks(Path("shop.watermark"))) as consumer:
    while consumer.wait():
        for changes in consumer.poll():
            apply(changes)
        consumer.commit()
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Self

from tailrace.errors import DamagedError, TableError, problems, require, require_some
from tailrace.model.change import Changes
from tailrace.source.follower import Limit, Offset, TableDirectives
from tailrace.source.poll.follower import PollFollower
from tailrace.source.poll.offset import PollOffset
from tailrace.source.poll.source import PollSource
from tailrace.source.poll.watermark import WatermarkStore
from tailrace.source.schema_file import SchemaFile
from tailrace.source.split import Split
from tailrace.system.atomic_file import make_folder, replace_durably
from tailrace.system.backoff import Backoff

log = logging.getLogger(__name__)

LIMIT = Limit(rows=1_000_000, bytes=1 << 30)
_RETRIES = Backoff((1.0,), longest_seconds=60.0, factor=2.0)
_LEAST_WAIT_SECONDS = 0.01


@dataclass
class _Failure:
    """A table that could not continue, and when it is tried again."""

    error: TableError
    attempts: int
    due: float


class PollConsumer:
    """Delivers every change at least once. For one thread: two consumers would overwrite each other's watermarks.

    What a call of `poll` reads is decided once and stored in the source's folder until it is committed, so that a
    process that ended before its commit is followed by one that reads the same again.
    """

    def __init__(self, source: PollSource, store: WatermarkStore, limit: Limit = LIMIT) -> None:
        self._source = replace(source, alone=True)
        self._store = store
        self._limit = limit
        self._follower: PollFollower | None = None
        self._offset: Offset = {}
        self._planned: Offset | None = None
        self._given = False
        self._failures: dict[str, _Failure] = {}

    def __enter__(self) -> Self:
        """Continue after the stored watermark. Raises DamagedError if it is unusable, unless the source rewinds it.

        Raises PreflightError when the database, or every table of it, cannot be polled.
        """
        self._offset = self._load()
        findings = self._source.check()
        require(findings)
        require_some(findings, [str(table.table) for table in self._source.tables()])
        for name, finding in problems(findings).items():
            log.error("%s is not followed: %s", name, finding.message)
        self._source.prepare()
        make_folder(self._source.folder)
        self._follower = self._source.follow(SchemaFile(self._source.schema_file))
        self._planned = self._load_plan()
        return self

    def __exit__(self, *_: object) -> None:
        if self._follower is not None:
            self._follower.stop()
            self._follower = None

    @property
    def failed(self) -> Mapping[str, TableError]:
        """The tables that cannot continue, by name, each with its last error. They are tried again now and then."""
        return {str(one.error.table): one.error for one in self._failures.values()}

    def retry(self) -> None:
        """Try the failed tables again with the next poll, because what stopped them is fixed."""
        for failure in self._failures.values():
            failure.due = 0.0

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Return True as soon as `poll` has something to give, or False after the timeout. Without one it waits on.

        Asks the database as often as the tables are due, and sleeps in between. Raises UnavailableError while the
        database does not answer.
        """
        assert self._follower is not None
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not self._plan():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            due = min((failure.due - time.monotonic() for failure in self._failures.values()), default=math.inf)
            pause = max(min(self._follower.idle_seconds(self._failures), due), _LEAST_WAIT_SECONDS)
            time.sleep(pause if left is None else min(pause, left))
        return True

    def poll(self) -> Iterator[Changes]:
        """New rows and changes of the tables that are due; rows of a copy have the operation `read`. Empty when none is
        due.

        Until `commit` is called, every call returns the same, except for rows that changed meanwhile, also in the next
        process. Raises TableError for a table that cannot continue: the next calls give the other tables, and the
        failed one is tried again after a second, later after up to a minute, or when `retry` is called. Raises
        UnavailableError while the database does not answer; then call it again.
        """
        self._given = False
        if not self._plan():
            return
        assert self._follower is not None
        assert self._planned is not None
        for split in self._follower.plan(self._offset, self._planned):
            try:
                yield from self._source.read(split)
            except TableError as error:
                self._leave_out(_table_of(split, error), error)
                raise
        self._given = True

    def commit(self) -> None:
        """Confirm that everything `poll` returned is applied: advances the watermark, if there was anything new.

        Raises RuntimeError when `poll` was not read to its end: the rest would be lost.
        """
        if self._planned is None:
            return
        if not self._given:
            raise RuntimeError("poll() was not read to its end; read it again, then commit")
        self._store.save(self._source.context.name, self._planned)
        read = _tables_read(PollOffset.from_json(self._planned))
        self._failures = {each: failure for each, failure in self._failures.items() if each not in read}
        self._offset, self._planned = self._planned, None
        self._store_plan()
        self._source.release(self._offset)

    # -- what the next poll reads -------------------------------------------------------------------------

    def _plan(self) -> bool:
        """Decide what to read, unless that is already decided. False when there is nothing."""
        if self._planned is None:
            assert self._follower is not None
            now = time.monotonic()
            directives = TableDirectives(paused={each for each, one in self._failures.items() if one.due > now})
            end = self._follower.latest(self._offset, self._limit, directives)
            if not _advances(self._offset, end):
                return False
            self._planned = end
            self._store_plan()
        return True

    def _leave_out(self, table: str, error: TableError) -> None:
        """Take a failed table out of what was decided: it stays where it is, and the others are read as decided."""
        attempts = self._failures[table].attempts + 1 if table in self._failures else 1
        self._failures[table] = _Failure(error, attempts, time.monotonic() + _RETRIES.delay(attempts))
        assert self._planned is not None
        before, planned = PollOffset.from_json(self._offset), PollOffset.from_json(self._planned)
        tables = {each: entry for each, entry in planned.tables.items() if each != table}
        if table in before.tables:
            tables[table] = before.tables[table]
        left = replace(planned, tables=tables).to_json()
        self._planned = left if _advances(self._offset, left) else None
        self._store_plan()

    # -- what is stored -----------------------------------------------------------------------------------

    def _load(self) -> Offset:
        start: Offset | None = None
        try:
            start = self._store.load(self._source.context.name)
        except DamagedError as error:
            if self._source.options.on_bad_watermark == "strict":
                raise
            log.warning("every table is copied again: %s", error.message)
        return start if start is not None else PollOffset().to_json()

    def _load_plan(self) -> Offset | None:
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            plan = json.loads((self._source.folder / "planned.json").read_bytes())
            if plan["after"] == self._offset:
                planned: Offset = plan["planned"]
                return planned
        return None

    def _store_plan(self) -> None:
        file = self._source.folder / "planned.json"
        if self._planned is None:
            file.unlink(missing_ok=True)
        else:
            replace_durably(file, json.dumps({"after": self._offset, "planned": self._planned}).encode())


def _table_of(split: Split, error: TableError) -> str:
    """The upstream id of the table that a split could not read."""
    tables = [*split.schemas.values(), *([split.copies] if split.copies is not None else [])]
    return next(table.upstream_id for table in tables if str(table.table) == str(error.table) or len(tables) == 1)


def _tables_read(end: PollOffset) -> set[str]:
    """The tables that the last step reads."""
    return {each for each, entry in end.tables.items() if entry.step == end.step and entry.reading is not None}


def _advances(start: Offset, end: Offset) -> bool:
    """Whether a step reads a table, or leaves one out that no longer exists. Pausing a table is no step."""
    before, after = PollOffset.from_json(start), PollOffset.from_json(end)
    return bool((after.step > before.step and _tables_read(after)) or before.tables.keys() - after.tables.keys())
