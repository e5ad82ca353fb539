"""What a pipeline needs of its state, one small protocol per concern. `StateStore` keeps them all.

The runner writes, fenced: once a later run has begun, each of its writes raises OwnedError. Other processes read at
the same time and leave requests. In the runner's own store (after `claim_run`) table states and schema versions come
from memory; what a joined process wrote is seen from the next write or `require_owner` on. Every other store asks the
database each time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

from tailrace.state.record import (
    BatchRecord,
    DeadLetter,
    DeadLetterStatus,
    OperatorRequest,
    Owner,
    PipelineRecord,
    RequestKind,
    Retry,
    SourceStatus,
    TableRecord,
    TableUpdate,
)
from tailrace.state.state_machine import TableState

if TYPE_CHECKING:
    from tailrace.model.change import Position
    from tailrace.model.schema import TableSchema


class TableStates(Protocol):
    """Where each table stands. Every move is checked against `machine.TRANSITIONS`.

    Methods that change a table raise TransitionError for one that was never added.
    """

    def tables(self) -> list[TableRecord]:
        """All tables, by name."""
        ...

    def table(self, upstream_id: str) -> TableRecord | None: ...

    def move_table(self, upstream_id: str, *steps: TableState) -> None:
        """Take the steps in order, all or none. Raises TransitionError for one that is not allowed.

        SyncWait and Catchup are shown by this store only; stored is FinishedCopy.
        """
        ...

    def overlay(self, upstream_id: str, state: TableState | None) -> None:
        """Show SyncWait or Catchup in this store while the table is stored as FinishedCopy; None ends it."""
        ...

    def fail_table(
        self,
        upstream_id: str,
        reason: str,
        *,
        fix: str | None = None,
        retry: Retry = "manual",
        resume: str | None = None,
        attempts: int | None = None,
        next_try: datetime | None = None,
    ) -> None:
        """Errored, with what people need to know. `resume` is the position where the table goes on after the fix.

        `attempts` is how often it failed since its last success (None: as before), `next_try` when to try again.
        """
        ...

    def recover_table(self, upstream_id: str) -> None:
        """From Errored back to the state it failed in, or to FinishedCopy from one behind it: it has to catch up.

        `attempts` stays until a batch of the table succeeds.

        A table that is not errored stays as it is.
        """
        ...

    def pause_table(self, upstream_id: str) -> None:
        """Set `paused_at`; the state stays. A repeat changes nothing."""
        ...

    def resume_table(self, upstream_id: str) -> None:
        """Clear `paused_at`. A repeat changes nothing."""
        ...


class TableLifecycle(Protocol):
    """From the first sight of a table to its end."""

    def add_table(self, upstream_id: str, name: str) -> TableRecord:
        """Make a table known, in Init. A repeat changes nothing but the name: here, in its dead letters, and in what is
        asked for it."""
        ...

    def reset_table(self, upstream_id: str) -> None:
        """Init, for a new copy: counts, position, error and waiting dead letters go. A pause and the versions stay.

        A repeat changes nothing.
        """
        ...

    def forget_table(self, upstream_id: str) -> None:
        """Drop a table that is gone, with its versions and waiting dead letters. A repeat changes nothing."""
        ...


class SchemaVersionStates(Protocol):
    """Which columns a table had at a position. Versions are ordered by position; their numbers only tell them apart."""

    def put_schema(self, schema: TableSchema, position: Position) -> TableSchema:
        """From `position` on the table has these columns. Gives the schema under the number it is stored by.

        When the version that holds there is the same already, that one is returned and nothing is added. Another
        one that begins at exactly this position is replaced, under a new number. Numbers are never used twice.
        """
        ...

    def schema(self, upstream_id: str, version: int) -> TableSchema | None:
        """The version of a number; None when it was pruned or replaced."""
        ...

    def schema_at(self, upstream_id: str, position: Position | None = None) -> TableSchema | None:
        """The version that holds at a position; without one, the last."""
        ...

    def schemas(self, upstream_id: str) -> list[tuple[Position, TableSchema]]:
        """All versions with where they begin, by position."""
        ...

    def schemas_between(self, upstream_id: str, after: Position, upto: Position) -> list[tuple[Position, TableSchema]]:
        """What reading (after, upto] needs: the version that holds at `after`, then those that begin behind it."""
        ...

    def prune_schemas(self, upto: Position, *, keep: Collection[str] = ()) -> int:
        """Drop versions that no position from `upto` on needs; says how many. The one that holds at `upto` stays.

        The tables in `keep`, by upstream id, are left as they are.
        """
        ...


class Progress(Protocol):
    """What was applied durably, and how the receiving half stands."""

    def apply_batch(self, batch: BatchRecord, updates: Sequence[TableUpdate] = ()) -> bool:
        """Record a batch and what it did to its tables in one transaction; False when it was recorded before.

        Raises LostError for an old batch id with another offset: then checkpoint and state are of different pipelines.
        """
        ...

    def last_batch(self) -> BatchRecord | None: ...

    def recent_batches(self, count: int) -> list[BatchRecord]:
        """The newest batches, newest first."""
        ...

    def pass_over(self, position: str) -> None:
        """The log behind the last batch holds nothing for its tables up to here: its position moves on, never back."""
        ...

    def put_source_status(self, status: SourceStatus) -> None:
        """Replace what the receiving half said before."""
        ...

    def source_status(self) -> SourceStatus | None: ...


class Requests(Protocol):
    """What operators ask of the runner."""

    def ask(self, kind: RequestKind, table: str, argument: str | None = None) -> OperatorRequest:
        """Leave a request, also beside a runner. The same request again, while it is open, is the same one.

        A pause behind a resume is another than the one before it, and so the other way round: the last one counts.
        """
        ...

    def open_requests(self) -> list[OperatorRequest]:
        """What was asked and not done yet, oldest first."""
        ...

    def request(self, request_id: int) -> OperatorRequest | None: ...

    def finish_request(self, request_id: int, outcome: str | None = None) -> None:
        """The runner has done what was asked, and what came of it. A repeat changes nothing."""
        ...


class DeadLetters(Protocol):
    """Changes that could not be applied, as their upstream sent them."""

    def put_dead_letter(
        self,
        upstream_id: str,
        table: str,
        position: str,
        *,
        kind: str,
        reason: str,
        fix: str | None = None,
        raw: bytes | None = None,
        version: int | None = None,
    ) -> DeadLetter:
        """Keep a change. The same one again, by table and position, counts a try and keeps the newest reason.

        A resolved one waits again; a skipped one stays skipped.
        """
        ...

    def dead_letters(self, table: str | None = None, status: DeadLetterStatus | None = None) -> list[DeadLetter]:
        """The oldest first; of one table, by its name, or of one status."""
        ...

    def dead_letter(self, letter_id: int) -> DeadLetter | None: ...

    def skip_dead_letters(self, upstream_id: str, letter_ids: Sequence[int]) -> None:
        """Pass over these changes of a table, and let it go on if it is in error: both or neither."""
        ...

    def settle_dead_letter(self, letter_id: int, status: DeadLetterStatus) -> None:
        """Say what became of it. A repeat changes nothing."""
        ...

    def skips(self) -> dict[str, list[str]]:
        """By the tables' upstream ids, the positions to leave out of what is still to be applied.

        A position that the table's stored one has reached is not given: it will not be read again.
        """
        ...


class Lease(Protocol):
    """Who runs the pipeline. The run number fences; the lease, by the store's own clock, keeps a second runner out."""

    def pipeline(self) -> PipelineRecord: ...

    def claim_run(self, owner: Owner | None = None, *, seconds: float = ..., takes_over: bool = False) -> int:
        """Become the runner for `seconds`: from now on writes through any earlier runner's store raise OwnedError.

        Raises OwnedError, naming the holder and the end of its lease, while somebody else has it; not for a holder
        that is known to be dead (its process is not on this machine, or `takes_over` says so).
        """
        ...

    def renew_lease(self) -> None:
        """Another `seconds` from now. Raises OwnedError when a later run has begun."""
        ...

    def release_lease(self) -> None:
        """Let go, so that the next runner need not wait. Does nothing when a later run has begun."""
        ...

    def require_owner(self) -> None:
        """Raises OwnedError when a later run has begun. Cheap: called before every batch."""
        ...

    def lease_holder(self) -> Owner | None:
        """Whose lease lasts now."""
        ...
