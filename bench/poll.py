"""Measures what polling costs: a cold table of 5 million rows is copied, polled while idle, changed, and compared.

`python -m bench --only poll`. Without Spark: one thread per core reads the source and discards the rows.
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.report import Report
from bench.server import Server
from tailrace.option.table import TableOptions
from tailrace.source.follower import Limit, Offset, TableDirectives
from tailrace.source.poll.follower import PollFollower
from tailrace.source.poll.key_snapshot import KeySnapshot
from tailrace.source.poll.offset import PollOffset
from tailrace.source.poll.option import PollOptions
from tailrace.source.poll.source import PollSource
from tailrace.source.schema_file import SchemaFile
from tailrace.source.source import SourceContext
from tailrace.source.split import ScanSplit, Split

ROWS = 5_000_000
IDLE_POLLS = 50
LIMIT = Limit(rows=2_000_000, bytes=1 << 30)
TABLE = """
CREATE TABLE orders (id bigint PRIMARY KEY, customer int, total numeric(10,2), state text, note text,
    updated_at timestamptz NOT NULL)
"""
FILL = """
INSERT INTO orders SELECT i, i % 100000, i * 1.25 % 1000000, 'shipped', md5(i::text),
    now() - interval '1 day' + i * interval '1 millisecond' FROM generate_series(1, {rows}) i
"""


def measure(report: Report, folder: Path, scale: float) -> None:
    """Fill a table, then time each thing that a pipeline does with it."""
    rows = int(ROWS * scale)
    with Server(folder) as server:
        with server.create_database("polled") as connection:
            for statement in (
                TABLE,
                FILL.format(rows=rows),
                "CREATE INDEX ON orders (updated_at, id)",
                "ANALYZE orders",
            ):
                connection.execute(statement.encode())
            connection.execute("VACUUM orders")
        server.postgres.stop()
        server.postgres.start()
        tables = TableOptions.model_validate(
            {
                "include": ["public.*"],
                "defaults": {"updated_at": "updated_at", "deletes": {"full_diff": {"every": "1d"}}},
            }
        )
        options = PollOptions.model_validate(
            {"type": "poll", "dsn": server.postgres.dsn("polled"), "interval": 1e-9, "idle_interval": 1e-9}
        )
        source = PollSource(options, SourceContext("bench", tables, folder))
        _PolledTable(source, server, report, rows).measure()


class _PolledTable:
    """One polled table, from its copy on."""

    def __init__(self, source: PollSource, server: Server, report: Report, rows: int) -> None:
        self.source, self.server, self.report, self.rows = source, server, report, rows
        self.versions = SchemaFile()
        self.follower: PollFollower = source.follow(self.versions)
        self.offset: Offset = self.follower.start()

    def measure(self) -> None:
        self._report("copy of a cold table", self._run(changes=self.rows), self.rows)
        started = time.monotonic()
        for _ in range(IDLE_POLLS):
            assert self.follower.latest(self.offset, LIMIT, TableDirectives()) == self.offset
        self.report.add(
            "poll", "poll of an idle table", (time.monotonic() - started) / IDLE_POLLS * 1000, "ms", 20, "most"
        )
        changed = self.rows // 10
        with self.server.postgres.connect("polled") as connection:
            connection.execute(f"UPDATE orders SET state = 'back', updated_at = now() WHERE id <= {changed}".encode())
        self._report("poll of a tenth of the rows", self._run(changes=changed), changed)
        for name in ("full diff, polled rows among it", "full diff of an unchanged table"):
            self._make_diff_due()
            self._report(name, self._run(changes=0), self.rows)
            assert self._known_keys() == self.rows
        self.follower.stop()

    def _make_diff_due(self) -> None:
        """Make the next full diff due, by a schedule that says the last one was long ago."""
        self.follower.stop()
        schedule = self.source.folder / "schedule.json"
        schedule.write_text(json.dumps({each: {"polls": 0, "diffed": 0.0} for each in self.offset["tables"]}))
        self.follower = self.source.follow(self.versions)

    def _known_keys(self) -> int:
        """How many keys the last full diff has stored."""
        [(table, entry)] = PollOffset.from_json(self.offset).tables.items()
        bases = KeySnapshot.of(str(self.source.folder), table).bases(entry.base)
        assert bases is not None
        return sum(base.read().num_rows for base in bases)

    def _run(self, *, changes: int) -> float:
        """Read to the end and return the seconds. Asserts that this gave `changes` changes."""
        started = time.monotonic()
        given = 0
        while (end := self.follower.latest(self.offset, LIMIT, TableDirectives())) != self.offset:
            splits = self.follower.plan(self.offset, end)
            with ThreadPoolExecutor(os.cpu_count() or 2) as pool:
                given += sum(pool.map(self._drain, splits))
            self.offset = end
            self.source.release(end)
        seconds = time.monotonic() - started
        assert given == changes, f"{given} changes instead of {changes}"
        return seconds

    def _drain(self, split: Split) -> int:
        """Do one task: a scan stores its result first, and the changes are read from there."""
        found = split.run(self.source.read) if isinstance(split, ScanSplit) else split
        return sum(len(changes) for changes in self.source.read(found))

    def _report(self, name: str, seconds: float, rows: int) -> None:
        self.report.add("poll", name, seconds, "s")
        self.report.add("poll", f"{name}, speed", rows / seconds, "rows/s")
