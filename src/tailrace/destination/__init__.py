"""The seam every destination stands behind.

A destination is configuration only: frozen and picklable; handles open inside methods. Two promises make
effects happen once: a write is durable when it returns, and the same batch written again changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from tailrace.errors import Finding
from tailrace.model.change import Changes, Position
from tailrace.model.schema import TableName, TableSchema

Refetch = Callable[[TableSchema, pa.Table], pa.Table]
"""Rows as they are upstream now, for the given keys; rows that are gone are left out."""


@dataclass(frozen=True)
class Batch:
    """A micro-batch. (`pipeline`, `id`) is stored in the same commit as the data and makes a repeat a no-op.

    `written` has the upstream ids of tables that batches before this one put rows into: where one of them is gone from
    the destination, its rows are, and a batch that made it anew would pass over that.
    """

    pipeline: str
    id: int
    written: frozenset[str] = field(default=frozenset(), compare=False)


@dataclass(frozen=True)
class Staged:
    """Copied rows that are durable at the destination but not yet visible. `receipt` is the destination's own."""

    receipt: str
    rows: int
    bytes: int


@dataclass(frozen=True)
class Written:
    """What one write did. `repeated` says that the batch was there already and nothing was done."""

    changes: int = 0
    upserts: int = 0
    deletes: int = 0
    repeated: bool = False


class Committer(Protocol):
    """What a destination does on the driver beside the writing of tables, while the pipeline runs."""

    def batch(self, batch: Batch) -> AbstractContextManager[None]:
        """Surrounds the writing of a batch's tables; what they wrote counts when it has ended well.

        Entered again for the same batch after a crash. Raises UnavailableError when nothing more can be taken now.
        """
        ...

    def poll(self) -> None:
        """Look after what runs beside the pipeline. Called a few times a second; raises what nobody here can mend."""
        ...

    def settled(self, position: Position | None) -> None:
        """Spark has logged a batch: all tables are level with the log, and taken up to here. None: some are not.

        Called from another thread than `taking`.
        """
        ...

    def drain(self, should_stop: Callable[[], bool] = ...) -> None:
        """Wait, at the end of a run with `--once`, until all that was taken has gone on, or the run `should_stop` to
        end.

        Raises UnavailableError when it does not; nothing is lost then.
        """
        ...


class DirectCommitter:
    """The delivery of a destination where a table that is written is all there is to it."""

    @contextmanager
    def batch(self, batch: Batch) -> Iterator[None]:
        yield

    def poll(self) -> None:
        pass

    def settled(self, position: Position | None) -> None:
        pass

    def drain(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        pass


class Destination(Protocol):
    """Where the tables go, as configuration."""

    @property
    def name(self) -> str:
        """What people call it in logs and status, e.g. `delta ./lake`."""
        ...

    def check(self, tables: Sequence[TableSchema] | None) -> list[Finding]:
        """Look, without changing anything, whether these tables can be kept there.

        None: which tables there are is not known, since the source is not ready. The place alone is looked at.
        """
        ...

    def write_rows(self, table: TableSchema, rows: Iterable[Changes]) -> Staged:
        """Store copied rows without showing them. Called in the task that reads them, in parallel."""
        ...

    def write_changes(
        self,
        table: TableSchema,
        changes: Iterable[Changes],
        batch: Batch,
        *,
        staged: Sequence[Staged] = (),
        starts: bool = False,
        completes: bool = False,
        refetch: Refetch | None = None,
        weight: int = 0,
    ) -> Written:
        """Make the batch visible in one commit: the staged rows, then the changes in order.

        `table` is the version the table has afterwards, also when no change came with it: the destination evolves to
        it in the same commit, and changes of older versions are fitted to it. `starts` begins a copy, `completes` ends
        it. A copy into a table that holds rows replaces them: they stay as they are until the batch that completes
        it, and go in its commit. `weight` is how many bytes of log the changes are, as far as that is known. Called
        once per table and batch, possibly again for the same batch after a crash.
        """
        ...

    def drop_table_for_copy(self, table: TableSchema) -> None:
        """Forget a table and its replay state, before it is copied from nothing."""
        ...

    def maintain(self, table: TableName) -> str | None:
        """Housekeeping between batches (compaction, vacuum). Says what it did, None if nothing was due."""
        ...

    def committer(self) -> AbstractContextManager[Committer]:
        """Deliver what is written for as long as the context lasts, where that is apart from writing (else
        `DirectCommitter`).

        The pipeline enters it once, on the driver, before the first batch.
        """
        ...

    def shutdown(self) -> None:
        """Called once when the pipeline stops."""
        ...
