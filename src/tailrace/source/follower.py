"""The driver half of a source: how far the next batch goes, and how it is split."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tailrace.model.change import Position
from tailrace.model.schema import TableSchema
from tailrace.source.split import Split

if TYPE_CHECKING:
    pass


Offset = dict[str, Any]
"""How far a stream has read: JSON of strings, integers and dicts, opaque outside its source. Spark stores it."""


CORES_PER_LIMIT = 4


@dataclass(frozen=True)
class Limit:
    """How much one micro-batch may read. A source ends the batch at the first commit boundary past either bound.

    `cores`: those of the cluster now. Copied rows do not pass through the memory of one task, so a batch copies `bytes`
    (or `rows`) for every four cores.
    """

    rows: int
    bytes: int
    cores: int = 0

    @property
    def copied_rows(self) -> int:
        return self.rows * max(1, self.cores // CORES_PER_LIMIT)

    @property
    def copied_bytes(self) -> int:
        return self.bytes * max(1, self.cores // CORES_PER_LIMIT)


Phase = Literal["init", "copy", "catchup", "ready", "stopped"]
"""`init`: waits for its copy to begin. `stopped`: not read, because it is in error or paused."""


@dataclass(frozen=True)
class TableProgress:
    """The state of one table at an offset. The destination has its log changes up to `position`.

    `request` is the last resync request whose copy has begun, 0 when there was none. `copy` identifies its last copy,
    0 before the first. `catching_up`: it reads the log at an earlier position than the other tables.
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

    `stopped` tables are not read; their text position is where they will resume (None: with a new copy), and until then
    nothing after it is released. `paused` tables are not read either, and resume where they are. `resync` tables are
    copied again, once for each request id; a resync comes before both. `skips` are text positions of changes to skip.
    """

    stopped: Mapping[str, str | None] = field(default_factory=dict)
    paused: Collection[str] = ()
    resync: Mapping[str, int] = field(default_factory=dict)
    skips: Mapping[str, Sequence[str]] = field(default_factory=dict)


SchemaHistory = Sequence[tuple[Position, TableSchema]]
"""A table's versions in order, each with the position from which it is valid. The first is valid from the beginning."""


class SchemaVersions(Protocol):
    """Which columns a table had at which position. Stored where the follower runs, durably if need be."""

    def put_schema(self, schema: TableSchema, position: Position) -> TableSchema:
        """Record that the table has this schema from `position` on. Returns it with its version number.

        A schema that is already valid there changes nothing. Another one stored for the same position is replaced.
        """
        ...

    def schema_at(self, upstream_id: str, position: Position | None = None) -> TableSchema | None:
        """The version that is valid at a position; without a position, the newest."""
        ...

    def schemas_between(self, upstream_id: str, after: Position, upto: Position) -> SchemaHistory:
        """The version that is valid at `after`, then those that begin in (after, upto], by position."""
        ...

    def new_versions(self, after: Position, upto: Position) -> Collection[str]:
        """The upstream ids of the tables of which a version begins in (after, upto]. One question, whatever their
        number."""
        ...


class Follower(ABC):
    """The driver half of a source: one per query, in a process of its own. Connections live here."""

    @abstractmethod
    def start(self) -> Offset:
        """The offset before anything was read. Called once, on a pipeline's very first batch.

        Spark calls it again when it repeats that batch, which must begin at the same offset.
        """

    @abstractmethod
    def latest(self, start: Offset, limit: Limit, directives: TableDirectives) -> Offset:
        """How far the next batch goes: a commit boundary, about `limit` past `start`.

        Returns `start` itself when there is nothing to do. Called many times a second; must be cheap when idle.
        """

    @abstractmethod
    def plan(self, start: Offset, end: Offset) -> list[Split]:
        """The splits of (start, end]. Pure: the same range gives the same rows on every call."""

    def target(self) -> Offset:
        """The upstream's position now, as the end of a run with `--once`."""
        return {}

    def done(self, start: Offset, target: Offset) -> bool:
        """Whether `start` has reached `target`. Until then `latest` may wait for the upstream.

        By default a run with `--once` ends as soon as `latest` finds nothing to do.
        """
        return True

    def stop(self) -> None:  # noqa: B027 - nothing to close is common
        """Close connections and helper processes. Called once; nothing durable depends on it."""
