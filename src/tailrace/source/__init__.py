"""The seam every upstream stands behind.

A source is configuration only: frozen, picklable, without open connections. Spark calls it in two places:
the driver half (`follow`) decides how far to read and how to split it, the executor half (`read`) reads one split.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, Self

import pyarrow as pa

from tailrace.change import Changes, Position
from tailrace.errors import Finding
from tailrace.schema import TableSchema

Offset = dict[str, Any]
"""Where a stream stands: JSON of strings, integers and dicts, opaque outside its source. Spark stores it."""

PIPELINE = "pipeline"
"""The name of the pipeline itself among the readers of its source."""

RESYNC = "tailrace reset FILE, then tailrace run FILE: every table is copied anew"
"""The fix where what is still needed is gone."""


@dataclass(frozen=True)
class Limit:
    """How much one micro-batch may read. A source ends the batch at the first commit boundary past either bound."""

    rows: int
    bytes: int


@dataclass(frozen=True)
class Split:
    """A repeatable piece of a micro-batch, read by one task. Sources subclass it; it is pickled to executors.

    `copies` is set when the split reads rows of one table for its initial copy (every change is `Op.READ`);
    `starts` when it belongs to a batch with the first chunk of that copy, `completes` to one with the last.
    `weights` says how many bytes of log it holds for which table, so that tables can be spread over tasks; `schemas`
    holds those tables at the version they have at the end of the batch, which may be one without changes of its own.
    """

    copies: TableSchema | None = None
    starts: bool = False
    completes: bool = False
    weights: Mapping[str, int] = field(default_factory=dict)
    schemas: Mapping[str, TableSchema] = field(default_factory=dict)

    def only(self, tables: Collection[str]) -> Self:
        """The split for some of its tables, so that several tasks can share it. Who can, overrides it to read less."""
        return replace(self, weights={name: weight for name, weight in self.weights.items() if name in tables})


def weigh(splits: Iterable[Split]) -> Mapping[str, int]:
    """How many bytes of log there are for which table. Pure."""
    weights: Counter[str] = Counter()
    for split in splits:
        weights.update(split.weights)
    return weights


@dataclass(frozen=True)
class ScanSplit(Split, ABC):
    """A split that takes much reading to give few changes, such as the comparison of a stretch of keys.

    A pipeline runs each in a task of its own, and the task that writes the table reads what all of them found. Reading
    an errand itself gives the same changes.
    """

    @abstractmethod
    def run(self, read: Callable[[Split], Iterator[Changes]]) -> Split:
        """The split by which its changes are read from now on; `read` is the source's. Called on executors.

        A repeat reads again, and finds what there is then. An error of the table is raised by who reads what comes
        back; every other one is raised here.
        """


Phase = Literal["init", "copy", "catchup", "ready", "stopped"]
"""`init`: waits for a copy to begin; `stopped`: not read, in error or paused."""


@dataclass(frozen=True)
class TableProgress:
    """Where one table stands at an offset. Up to `position` the destination has its log changes.

    `request` is the last resync that was begun for it, 0 when there was none. `copy` tells one copy of it from the
    next, 0 before the first. `catching_up`: it reads the log behind the others.
    """

    upstream_id: str
    phase: Phase
    position: Position
    chunks_done: int = 0
    chunks_total: int = 0
    request: int = 0
    copy: int = 0
    catching_up: bool = False


@dataclass(frozen=True)
class TableDirectives:
    """What errors and operators ask of a follower, by the tables' upstream ids.

    `stopped` tables are not read; their text position is where they will go on (None: with a new copy), and until then
    nothing behind it is released. `paused` tables are not read either, and go on where they are. `resync` tables are
    copied anew, once for each request id; this comes before both. `skips` are text positions of changes to pass over.
    """

    stopped: Mapping[str, str | None] = field(default_factory=dict)
    paused: Collection[str] = ()
    resync: Mapping[str, int] = field(default_factory=dict)
    skips: Mapping[str, Sequence[str]] = field(default_factory=dict)


SchemaHistory = Sequence[tuple[Position, TableSchema]]
"""A table's versions, each with the position from which it holds, in order. The first holds from the beginning."""


class SchemaVersions(Protocol):
    """Which columns a table had at which position. Whoever runs the follower keeps them, durably if it needs to."""

    def put_schema(self, schema: TableSchema, position: Position) -> TableSchema:
        """From `position` on the table has this schema; it comes back with its version number.

        One that holds there already changes nothing; another one stored for the same position is replaced.
        """
        ...

    def schema_at(self, upstream_id: str, position: Position | None = None) -> TableSchema | None:
        """The version that holds at a position; without one, the newest."""
        ...

    def schemas_between(self, upstream_id: str, after: Position, upto: Position) -> SchemaHistory:
        """The version that holds at `after`, then those that begin in (after, upto], by position."""
        ...


class Follower(Protocol):
    """The driver half of a source: one per query, in a process of its own. Connections live here."""

    def start(self) -> Offset:
        """The offset before anything was read. Called once, on a pipeline's very first batch."""
        ...

    def latest(self, start: Offset, limit: Limit, directives: TableDirectives) -> Offset:
        """How far the next batch goes: a commit boundary, about `limit` past `start`.

        Returns `start` itself when there is nothing to do. Called many times a second; must be cheap when idle.
        """
        ...

    def target(self) -> Offset:
        """The upstream's position now, as the end of a run with `--once`."""
        ...

    def done(self, start: Offset, target: Offset) -> bool:
        """Whether `start` has everything `target` asks for. Until then `latest` may wait for the upstream."""
        ...

    def plan(self, start: Offset, end: Offset) -> list[Split]:
        """The splits of (start, end]. Pure: the same range gives the same rows, however often it is asked."""
        ...

    def stop(self) -> None:
        """Close connections and helper processes. Called once; nothing durable depends on it."""
        ...


class Source(Protocol):
    """An upstream, as configuration."""

    def check(self) -> list[Finding]:
        """Look, without changing anything, whether the upstream is ready; every error carries its fix."""
        ...

    def tables(self) -> list[TableSchema]:
        """The tables this source would follow now, with their keys. Opens and closes its own connection."""
        ...

    def prepare(self, should_stop: Callable[[], bool] = ...) -> None:
        """Make what is missing upstream (publication, slot). Repeating it changes nothing; PreflightError otherwise.

        Who would wait for others upstream gives up, with UnavailableError, once it `should_stop` to end.
        """
        ...

    def reset(self) -> None:
        """Forget how far this source was read, and let the upstream forget it too. Repeating it changes nothing."""
        ...

    def receiving(self) -> AbstractContextManager[object]:
        """Receive what the upstream pushes for as long as the context lasts, where that is apart from following.

        The pipeline enters it before it starts Spark, so that the log comes in meanwhile. A follower must do without.
        """
        ...

    def follow(self, versions: SchemaVersions | None = None) -> Follower:
        """Begin to follow, in the process that will call the follower.

        A new version of a table is put into `versions` before an offset is given away that reaches its rows. Who
        gives them has called `prepare` and is `receiving`; else the source does so by itself, and keeps the versions as
        it keeps its place.
        """
        ...

    def read(self, split: Split) -> Iterator[Changes]:
        """The changes of one split, a few MB at a time, in stream order per table. Called on executors."""
        ...

    def refetch(self, table: TableSchema, keys: pa.Table) -> pa.Table:
        """The rows of these keys as they are upstream now (for values a log left out). Called on executors."""
        ...

    def release(self, upto: Offset) -> None:
        """Everything up to `upto` is durable downstream and may be forgotten. Repeating it is harmless."""
        ...

    def for_reader(self, reader: str, table: str | None = None) -> Source:
        """The same upstream for another reader, with a cursor of its own; with `table`, only that one."""
        ...

    def progress(self, offset: Offset) -> list[TableProgress]:
        """Where each table stands at an offset. Pure."""
        ...

    def status(self) -> dict[str, Any]:
        """What the receiving half last said of itself, for people: gear, positions, sizes, last error. Cheap.

        The words are those of `SourceStatus`; others are left out.

        `passed` are two positions: behind a batch that ended at the first, the follower found nothing up to the second,
        and made no batch for it.
        """
        ...
