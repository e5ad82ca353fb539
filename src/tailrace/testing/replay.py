"""A pipeline without Spark: the source's two halves, a destination in memory, crashes wherever a test wants one.

It keeps what Spark, a state store and a destination keep (offsets, versions, batches, rows), so that a test can drop
everything else at any moment and go on. Rows are applied one by one, the simplest interpretation of changes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Self

import pyarrow as pa

from tailrace.errors import StaleCopyError
from tailrace.model.change import Changes, Op
from tailrace.model.schema import TableSchema
from tailrace.source.follower import Follower, Limit, Offset, TableDirectives
from tailrace.source.schema_file import SchemaFile
from tailrace.source.source import Source
from tailrace.source.split import Split
from tailrace.testing.wait import PATIENCE_SECONDS

Key = tuple[Any, ...]
RowDict = dict[str, Any]


class MemoryTable:
    """Current rows by key; for a table without key, how often each row is there."""

    def __init__(self, schema: TableSchema) -> None:
        self.schema = schema
        self.rows: dict[Key, RowDict] = {}
        self.bag: Counter[tuple[Any, ...]] = Counter()

    def contents(self) -> Counter[tuple[Any, ...]]:
        return self.bag if not self.schema.key else Counter(_frozen(row) for row in self.rows.values())

    def clear(self) -> None:
        self.rows.clear()
        self.bag.clear()

    def evolve(self, schema: TableSchema) -> None:
        """Give every row the columns of another version: found by number, new ones with what they hold initially."""
        if schema.columns == self.schema.columns and schema.key == self.schema.key:
            return
        old = {column.number: column.name for column in self.schema.columns}

        def fitted(row: RowDict) -> RowDict:
            return {
                column.name: row[old[column.number]]
                if column.number in old
                else (column.initial.as_py() if column.initial is not None else None)
                for column in schema.columns
            }

        names = [column.name for column in self.schema.columns]
        bag: Counter[tuple[Any, ...]] = Counter()
        for values, count in self.bag.items():
            bag[_frozen(fitted(dict(zip(names, values, strict=True))))] += count
        rows = [fitted(row) for row in self.rows.values()]
        self.schema, self.bag = schema, bag
        self.rows = {self._key(row): row for row in rows}

    def apply(self, changes: Changes, source: Source) -> None:
        self.evolve(changes.table)
        mask = changes.unchanged_mask()
        moved: RowDict = {}
        names = [column.name for column in self.schema.columns]
        for index, change in enumerate(changes.batch.to_pylist()):
            op, row = Op(change["op"]), change["row"]
            kept = [] if mask is None else [name for name, bit in zip(names, mask[index], strict=True) if bit]
            if op is Op.TRUNCATE:
                self.clear()
            elif not self.schema.key:
                self.bag[_frozen(row)] += -1 if op is Op.DELETE else 1
            elif op is Op.DELETE:
                moved = self.rows.pop(self._key(row), {})
            else:
                old = self.rows.get(self._key(row)) or (moved if op is Op.INSERT else {})
                if kept and not old:
                    old = self._refetch(row, source)
                    if not old:
                        continue  # gone upstream since; its delete follows
                self.rows[self._key(row)] = {**row, **{name: old[name] for name in kept}}

    def _key(self, row: RowDict) -> Key:
        return tuple(_hashable(row[name]) for name in self.schema.key)

    def _refetch(self, row: RowDict, source: Source) -> RowDict:
        keys = pa.Table.from_pylist(
            [{name: row[name] for name in self.schema.key}],
            pa.schema([(name, self.schema.column(name).type) for name in self.schema.key]),
        )
        found: list[RowDict] = source.refetch(self.schema, keys).to_pylist()
        return found[0] if found else {}


def _frozen(row: RowDict) -> tuple[Any, ...]:
    return tuple(_hashable(value) for value in row.values())


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class SourceReplay:
    """Runs batches. `offset` and `planned` are what Spark's logs hold, `tables` what the destination holds."""

    def __init__(self, source: Source, limit: Limit) -> None:
        self.source = source
        self.limit = limit
        self.offset: Offset | None = None
        self.planned: Offset | None = None
        self.tables: dict[str, MemoryTable] = {}
        self.copies: dict[str, MemoryTable] = {}
        self.versions = SchemaFile()
        self.applied: set[tuple[int, str]] = set()
        self.batch = 0
        self.directives = TableDirectives()
        self.stale: dict[str, bool] = {}
        self._follower: Follower | None = None
        self._receiving = ExitStack()

    @property
    def follower(self) -> Follower:
        if self._follower is None:
            self.source.prepare()
            self._receiving.enter_context(self.source.receive())
            self._follower = self.source.follow(self.versions, is_receiving=True)
        return self._follower

    def crash(self) -> None:
        """Drop everything that is not durable."""
        if self._follower is not None:
            self._follower.stop()
            self._follower = None
        self._receiving.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.crash()

    def plan(self) -> bool:
        """Log the next batch's end, unless one is logged already. False when there is nothing to do."""
        if self.offset is None:
            self.offset = self.follower.start()
        if self.planned is None:
            # A copy that failed because its table changed is stopped by one batch and begins again with the next.
            stopped = {**self.directives.stopped, **dict.fromkeys(self.stale)}
            end = self.follower.latest(self.offset, self.limit, replace(self.directives, stopped=stopped))
            self.stale = dict.fromkeys(self.stale, True) if end != self.offset else self.stale
            if end == self.offset:
                return False
            self.planned = end
        return True

    def write(self, fraction: float = 1.0) -> None:
        """Apply the logged batch to the tables: only some of them when a crash is to follow."""
        assert self.offset is not None
        assert self.planned is not None
        pieces: dict[str, list[Changes]] = {}
        copies: dict[str, Split] = {}
        schemas: dict[str, TableSchema] = {}
        stale: set[str] = set()
        for split in self.follower.plan(self.offset, self.planned):
            schemas |= split.schemas
            if split.copies is not None:
                name = str(split.copies.table)
                copies[name] = split
                pieces.setdefault(name, [])
            try:
                for changes in self.source.read(split):
                    pieces.setdefault(str(changes.table.table), []).append(changes)
            except StaleCopyError:
                assert split.copies is not None
                self.stale[split.copies.upstream_id] = False
                stale.add(str(split.copies.table))
        names = sorted(pieces.keys() | schemas.keys())
        for name in names[: round(len(names) * fraction)]:
            if (self.batch, name) not in self.applied:
                if name in stale:
                    continue
                if name in copies:
                    self._copy(name, pieces[name], copies[name])
                else:
                    self._apply(name, pieces.get(name, []), schemas[name])
                self.applied.add((self.batch, name))

    def _copy(self, name: str, pieces: list[Changes], split: Split) -> None:
        """Rows of a copy stay out of sight until it is complete."""
        assert split.copies is not None
        if split.starts:
            self.copies[name] = MemoryTable(split.copies)
        for changes in pieces:
            self.copies[name].apply(changes, self.source)
        if split.completes:
            self.tables[name] = self.copies.pop(name)

    def _apply(self, name: str, pieces: list[Changes], schema: TableSchema) -> None:
        for changes in sorted(pieces, key=lambda changes: changes.first):
            self.tables[name].apply(changes, self.source)
        self.tables[name].evolve(schema)

    def commit(self) -> None:
        assert self.planned is not None
        self.offset, self.planned = self.planned, None
        self.stale = {upstream_id: False for upstream_id, applied in self.stale.items() if not applied}
        self.batch += 1
        self.source.release(self.offset)

    def fail(self) -> None:
        """Count the logged batch as done without writing anything of it, as when every table in it fails."""
        assert self.planned is not None
        self.offset, self.planned = self.planned, None
        self.batch += 1

    def step(self) -> bool:
        """One whole batch. False when there was nothing to do."""
        if not self.plan():
            return False
        self.write()
        self.commit()
        return True

    def live(self, crash_at: str) -> None:
        """One batch, with a crash after one of its steps (`plan`, `half` the writing, `write`, `commit`) or none."""
        if self.plan():
            if crash_at == "plan":
                return self.crash()
            self.write(0.5 if crash_at == "half" else 1.0)
            if crash_at in ("half", "write"):
                return self.crash()
            self.commit()
        if crash_at == "commit":
            self.crash()
        return None

    def catch_up(self, seconds: float = PATIENCE_SECONDS) -> None:
        """Run batches until everything that is committed upstream now has arrived."""
        target, deadline = self.follower.target(), time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not self.step():
                assert self.offset is not None
                if self.follower.done(self.offset, target):
                    return
                time.sleep(0.01)
        raise AssertionError(f"did not catch up within {seconds:g} s: {self.offset}")

    def contents(self) -> Mapping[str, Counter[tuple[Any, ...]]]:
        return {name: table.contents() for name, table in self.tables.items()}
