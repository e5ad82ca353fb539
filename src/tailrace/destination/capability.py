"""What some destinations can do beyond writing. A command asks for the capability, never for a type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from tailrace.model.last_batch import LastBatch
from tailrace.model.schema import TableName

if TYPE_CHECKING:
    from tailrace.destination import Destination


@dataclass(frozen=True)
class QueueStatus:
    """The status of a queue. None: not known.

    queue       where it is
    running     a sender runs on this node
    leader      this node is the leader, the only node that sends
    node        the name of the node
    pending     events that are not delivered
    oldest      when the oldest of them was committed
    bytes       the size of the queue on disk
    delivered   events, since the sender started
    dropped     events that were given up, since the queue was created
    failures    failed requests in a row
    error, fix  the last error, and how to fix it
    """

    queue: str
    running: bool
    leader: bool
    node: str | None
    pending: int | None
    oldest: str | None
    bytes: int
    delivered: int | None
    dropped: int | None
    failures: int | None
    error: str | None
    fix: str | None


class QueueView(Protocol):
    """A destination's queue, as an operator sees it."""

    @property
    def place(self) -> str:
        """Where the queue is."""
        ...

    def status(self) -> QueueStatus:
        """The status, read from the queue's files: nothing is connected. Damage is part of the status."""
        ...

    def drain(self, should_stop: Callable[[], bool]) -> int:
        """Send until the queue is empty or `should_stop`, and return how many events still wait.

        If the pipeline runs, its sender does the work. Raises DamagedError when events cannot be read.
        """
        ...

    def purge(self) -> None:
        """Give up everything that waits. Raises OwnedError while a pipeline runs."""
        ...


@runtime_checkable
class Queued(Protocol):
    """A destination that sends from a queue: `tailrace queue` and `tailrace metrics` work with it."""

    def open_queue(self, pipeline: str) -> QueueView:
        """The queue of a pipeline. Nothing is opened yet, and no secret is needed to read its status."""
        ...


@runtime_checkable
class Inspectable(Protocol):
    """A destination that says what its tables hold: then they are compared with the state at each start, also those
    that are never written again."""

    def last_batch(self, table: TableName, pipeline: str) -> LastBatch | None:
        """The last batch of the pipeline that the table holds; None when there is none, or no table. Changes nothing.

        Raises UnavailableError when the destination does not answer, TableError when the table cannot be read.
        """
        ...


@runtime_checkable
class Maintainable(Protocol):
    """A destination with housekeeping to do: `tailrace maintain` works with it."""

    def maintain_now(self, table: TableName) -> str | None:
        """Do all housekeeping of a table, however little is due. Returns what it did, None if there was nothing.

        Called by hand, in a process of its own, also while a pipeline writes the table. No row changes. Raises
        UnavailableError when the destination does not answer, TableError when the table cannot be read.
        """
        ...


@runtime_checkable
class Printing(Protocol):
    """A destination that prints what it gets to standard output: `tailrace run` says everything else on stderr."""

    def as_json(self) -> Destination:
        """The same, printing lines of JSON."""
        ...
