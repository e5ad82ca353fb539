"""What a batch reads from the log for one table, and with which of its versions."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.errors import SchemaChangedError
from tailrace.model.change import Position
from tailrace.model.schema import TableSchema
from tailrace.source.follower import SchemaHistory
from tailrace.source.offset import LogRange


@dataclass(frozen=True)
class TableRange(LogRange[Position]):
    """The changes in (after, upto], except `skips`. Sources subclass it; it is pickled with its split.

    `shown` is the version the destination keeps when it does not follow the newest. `stops_at` is the position of a
    schema change that the table's policy does not allow.
    """

    history: SchemaHistory
    shown: TableSchema | None = None
    stops_at: Position | None = None
    skips: tuple[Position, ...] = ()

    @property
    def schema(self) -> TableSchema:
        """The version the destination has after the batch."""
        return self.shown or self.history[-1][1]

    @property
    def has_news(self) -> bool:
        """Whether the destination has a new version to follow, even without rows."""
        return len(self.history) > 1

    def require_allowed(self) -> None:
        """Raise SchemaChangedError when the columns changed and the table's policy does not allow it."""
        if self.stops_at is not None:
            table = self.history[0][1].table
            raise SchemaChangedError(
                "the columns changed upstream, and the table's policy for schema changes is `stop`",
                fix=f"tailrace resync FILE {table}, or set schema_changes to evolve and tailrace retry FILE {table}",
                table=str(self.schema.table),
                position=str(self.stops_at),
            )


def distinct(history: SchemaHistory) -> SchemaHistory:
    """The versions as tasks and destinations see them, without those that look like the one before."""
    seen: list[tuple[Position, TableSchema]] = []
    for at, schema in history:
        shown = schema.without_fingerprint()
        if not seen or shown != seen[-1][1].at_version(shown.version):
            seen.append((at, shown))
    return tuple(seen)


def first_change(reading: LogRange[Position], history: SchemaHistory, recopy: Position | None) -> Position | None:
    """The first position at which the columns change: with a new version, or in a way that needs a new copy."""
    changes = [at for at, _ in history[1:]]
    if recopy is not None and reading.after < recopy <= reading.upto:
        changes.append(recopy)
    return min(changes, default=None)
