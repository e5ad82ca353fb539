"""A pipeline without Spark: the source's two halves, a destination in memory, crashes wherever a test wants one.

It keeps what Spark and a destination keep (offsets, batches, rows), so that a test can drop everything else at any
moment and go on. Rows are replayed one by one, the plainest reading of what changes mean.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Self

import pyarrow as pa

from tailrace.change import Changes, Op
from tailrace.schema import TableSchema
from tailrace.source import Follower, Limit, Offset, Orders, Source

Key = tuple[Any, ...]
Row = dict[str, Any]


class MemoryTable:
    """Current rows by key; for a table without key, how often each row is there."""

    def __init__(self, schema: TableSchema) -> None:
        self.schema = schema
        self.rows: dict[Key, Row] = {}
        self.bag: Counter[tuple[Any, ...]] = Counter()

    def contents(self) -> Counter[tuple[Any, ...]]:
        return self.bag if not self.schema.key else Counter(_frozen(row) for row in self.rows.values())

    def clear(self) -> None:
        self.rows.clear()
        self.bag.clear()

    def apply(self, changes: Changes, source: Source) -> None:
        mask = changes.unchanged_mask()
        moved: Row = {}
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

    def _key(self, row: Row) -> Key:
        return tuple(row[name] for name in self.schema.key)

    def _refetch(self, row: Row, source: Source) -> Row:
        keys = pa.Table.from_pylist(
            [{name: row[name] for name in self.schema.key}],
            pa.schema([(name, self.schema.column(name).type) for name in self.schema.key]),
        )
        found: list[Row] = source.refetch(self.schema, keys).to_pylist()
        return found[0] if found else {}


def _frozen(row: Row) -> tuple[Any, ...]:
    return tuple(tuple(value) if isinstance(value, list) else value for value in row.values())


class Replay:
    """Runs batches. `offset` and `planned` are what Spark's logs hold, `tables` what the destination holds."""

    def __init__(self, source: Source, limit: Limit) -> None:
        self.source = source
        self.limit = limit
        self.offset: Offset | None = None
        self.planned: Offset | None = None
        self.tables: dict[str, MemoryTable] = {}
        self.applied: set[tuple[int, str]] = set()
        self.batch = 0
        self.orders = Orders()
        self._follower: Follower | None = None

    @property
    def follower(self) -> Follower:
        if self._follower is None:
            self._follower = self.source.follow()
        return self._follower

    def crash(self) -> None:
        """Everything that is not durable is gone."""
        if self._follower is not None:
            self._follower.stop()
            self._follower = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.crash()

    def plan(self) -> bool:
        """Log the next batch's end, unless one is logged already. False when there is nothing to do."""
        if self.offset is None:
            self.offset = self.follower.start()
        if self.planned is None:
            end = self.follower.latest(self.offset, self.limit, self.orders)
            if end == self.offset:
                return False
            self.planned = end
        return True

    def write(self, fraction: float = 1.0) -> None:
        """Apply the logged batch to the tables: only some of them when a crash is to follow."""
        assert self.offset is not None
        assert self.planned is not None
        pieces: dict[str, list[Changes]] = {}
        starts: dict[str, TableSchema] = {}
        for split in self.follower.plan(self.offset, self.planned):
            if split.copies is not None:
                pieces.setdefault(str(split.copies.table), [])
                if split.starts:
                    starts[str(split.copies.table)] = split.copies
            for changes in self.source.read(split):
                pieces.setdefault(str(changes.table.table), []).append(changes)
        for name in sorted(pieces)[: round(len(pieces) * fraction)]:
            if (self.batch, name) not in self.applied:
                self._apply(name, pieces[name], starts.get(name))
                self.applied.add((self.batch, name))

    def _apply(self, name: str, pieces: list[Changes], starts: TableSchema | None) -> None:
        if starts is not None:
            self.tables[name] = MemoryTable(starts)
        for changes in sorted(pieces, key=lambda changes: changes.first):
            self.tables[name].apply(changes, self.source)

    def commit(self) -> None:
        assert self.planned is not None
        self.offset, self.planned = self.planned, None
        self.batch += 1
        self.source.release(self.offset)

    def step(self) -> bool:
        """One whole batch. False when there was nothing to do."""
        if not self.plan():
            return False
        self.write()
        self.commit()
        return True

    def catch_up(self, seconds: float = 30.0) -> None:
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
