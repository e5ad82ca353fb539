"""Follows the versions of tables along a log: the part that is the same for every source.

Reading the same stretch of the log again finds the same versions, so nothing here needs to survive the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from tailrace.model.change import START, Position
from tailrace.model.schema import TableSchema
from tailrace.source.follower import SchemaVersions

Id = TypeVar("Id", int, str)


class SchemaLog(Generic[Id]):
    """One per follower. `recopies` holds, by table, the last position whose change the log alone cannot follow."""

    def __init__(self, versions: SchemaVersions) -> None:
        self._versions = versions
        self._scanned: Position | None = None
        self.recopies: dict[Id, Position] = {}

    def put(self, schema: TableSchema, position: Position) -> TableSchema:
        """The table has this schema from `position` on; what the log says of it after that is read again."""
        self._rewind(position)
        return self._versions.put_schema(schema, position)

    def _rewind(self, position: Position) -> None:
        if self._scanned is not None:
            self._scanned = min(self._scanned, position)

    def _scan(self, after: Position, upto: Position, read: Callable[[Position, Position], None]) -> None:
        """Read on to `upto`, from where the last scan ended; `after` is where the first one begins."""
        begin = after if self._scanned is None else self._scanned
        if upto > begin:
            read(begin, upto)
        self._scanned = max(begin, upto)

    def _mark(self, table: Id, at: Position) -> None:
        """Only a new copy can follow what changed at this position."""
        self.recopies[table] = max(self.recopies.get(table, START), at)
