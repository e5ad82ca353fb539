"""What a pipeline remembers between runs: table states, schema versions, progress.

Each concern is a small protocol; `StateStore` (one SQLite file) keeps them all. The runner writes, any number of
other processes read at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from tailrace.state.lock import RunnerLock
from tailrace.state.machine import TableState
from tailrace.state.record import BatchRecord, PipelineRecord, Request, Retry, SourceStatus, TableRecord, TableUpdate
from tailrace.state.store import StateStore

if TYPE_CHECKING:
    from tailrace.change import Position
    from tailrace.schema import TableSchema


class TableStates(Protocol):
    """Where each table stands. Every move is checked against `machine.TRANSITIONS`."""

    def tables(self) -> list[TableRecord]:
        """All tables, by name."""
        ...

    def table(self, upstream_id: str) -> TableRecord | None: ...

    def add_table(self, upstream_id: str, name: str) -> TableRecord:
        """Make a table known, in Init. A repeat changes nothing but the name, which follows a rename."""
        ...

    def move_table(self, upstream_id: str, *steps: TableState) -> None:
        """Take the steps in order, all or none. Raises TransitionError for one that is not allowed."""
        ...

    def fail_table(
        self,
        upstream_id: str,
        reason: str,
        *,
        fix: str | None = None,
        retry: Retry = "manual",
        resume: str | None = None,
    ) -> None:
        """Errored, with what people need to know. `resume` is the position where the table goes on after the fix."""
        ...

    def forget_table(self, upstream_id: str) -> None:
        """Drop everything about a table that is gone. A repeat changes nothing."""
        ...


class SchemaVersions(Protocol):
    """Which columns a table had at a position."""

    def put_schema(self, schema: TableSchema, position: Position) -> None:
        """From `position` on the table has this schema. The same version again changes nothing."""
        ...

    def schema_at(self, upstream_id: str, position: Position | None = None) -> TableSchema | None:
        """The version that holds at a position; without one, the newest."""
        ...

    def prune_schemas(self, upto: Position) -> int:
        """Drop the versions that ended at or before a position; says how many. The newest of a table stays."""
        ...


class Progress(Protocol):
    """What was applied durably."""

    def apply_batch(self, batch: BatchRecord, updates: Sequence[TableUpdate] = ()) -> bool:
        """Record a batch and what it did to its tables in one transaction; False when it was recorded before.

        Raises LostError for an old batch id with another offset: then checkpoint and state are of different pipelines.
        """
        ...

    def last_batch(self) -> BatchRecord | None: ...


__all__ = [
    "BatchRecord",
    "PipelineRecord",
    "Progress",
    "Request",
    "Retry",
    "RunnerLock",
    "SchemaVersions",
    "SourceStatus",
    "StateStore",
    "TableRecord",
    "TableState",
    "TableStates",
    "TableUpdate",
]
