"""From an offset to the splits of the step that led to it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tailrace.errors import SchemaChangedError, TableError
from tailrace.model.change import end_of
from tailrace.source.follower import SchemaVersions
from tailrace.source.poll.connector import Polled
from tailrace.source.poll.diff import DiffScan, DiffSplit, NewcomerSplit, StretchSplit
from tailrace.source.poll.keyset import START, Stretch
from tailrace.source.poll.offset import PollOffset, PollTableOffset, StepRead
from tailrace.source.poll.split import ChunkSplit, PollSplit, RefusedSplit, Task
from tailrace.source.split import Split

if TYPE_CHECKING:
    from tailrace.source.poll.source import PollSource

ROW_BYTES = 200
"""The assumed size of a row, for spreading tables over tasks."""


@dataclass(frozen=True)
class Planner:
    """`tables` are the current ones, by upstream id; a table that is gone has nothing to read."""

    source: PollSource
    tables: Mapping[str, Polled]
    versions: SchemaVersions

    def plan(self, end: PollOffset) -> list[Split]:
        """The splits of the step. The same offset always gives the same stretches."""
        splits: list[Split] = []
        for each, entry in end.tables.items():
            if entry.step == end.step and entry.reading is not None and each in self.tables:
                splits += self._split(each, entry)
        return splits

    def _split(self, each: str, entry: PollTableOffset) -> Iterator[Split]:
        reading = entry.reading
        assert reading is not None
        table = self.tables[each]
        schema = self.versions.schema_at(each, end_of(entry.step)) or table.schema
        task = Task(
            replace(table, schema=schema),
            entry.step,
            str(self.source.folder),
            self.source.options.page_rows,
            self.source.options.chunk_rows,
            entry.base > 0,
        )
        log: dict[str, Any] = {"weights": {table.name: reading.rows * ROW_BYTES}, "schemas": {table.name: schema}}
        policy = self.source.context.tables.settings_of(table.name).schema_changes
        if reading.kind == "refuse":
            refused = TableError(reading.reason, fix=reading.fix or None, table=table.name)
            yield RefusedSplit(**log, error=refused)
        elif policy == "stop" and schema.at_version(0) != table.schema.at_version(0):
            fix = f"tailrace resync FILE {table.name}, or set schema_changes to evolve and retry it"
            reason = "the columns changed, and its policy for schema changes is `stop`"
            yield RefusedSplit(**log, error=SchemaChangedError(reason, fix=fix, table=table.name))
        elif reading.kind == "copy":
            places = [START, *entry.bounds, None]
            for number in range(reading.first, reading.end):
                yield ChunkSplit(
                    copies=schema,
                    starts=reading.first == 0,
                    completes=reading.end == len(entry.bounds) + 1,
                    task=task,
                    stretch=Stretch(places[number] or START, places[number + 1]),
                    base=entry.base,
                    size=reading.rows if not entry.bounds else None,
                )
        elif reading.kind == "poll":
            yield PollSplit(**log, task=task, reading=reading)
        else:
            yield from self._diff(task, reading)

    def _diff(self, task: Task, reading: StepRead) -> Iterator[Split]:
        table, known = task.table, task.known
        schemas = {table.name: table.schema}
        bases = known.bases(reading.since)
        if bases is None:
            error = TableError(
                "files of its keys are missing from the state folder",
                fix=f"tailrace resync FILE {table.name}",
                table=table.name,
            )
            yield RefusedSplit(weights={table.name: 0}, schemas=schemas, error=error)
            return
        shares = max(1, math.ceil(known.count_polled(reading.since, task.step - 1) / task.chunk_rows))
        pieces = shares + len(bases)
        shared: dict[str, Any] = {
            "weights": {table.name: reading.rows * ROW_BYTES // pieces},
            "schemas": schemas,
            "task": task,
            "since": reading.since,
            "window": reading.window,
        }
        files = tuple(sorted({file for base in bases for file in base.files}))
        found: list[DiffSplit] = [
            NewcomerSplit(**shared, number=share, files=files, share=share, shares=shares) for share in range(shares)
        ]
        found += [StretchSplit(**shared, number=number, base=base) for number, base in enumerate(bases, shares)]
        # The task that writes a small table also compares it, together with others: a thousand tables do not need a
        # thousand tasks.
        alone = len(found) > 2
        yield from [DiffScan(weights=one.weights, schemas=schemas, piece=one) for one in found] if alone else found
