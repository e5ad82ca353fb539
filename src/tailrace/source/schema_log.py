"""Follows the versions of tables along a log: the part that is the same for every source.

Reading the same range of the log again finds the same versions, so nothing here needs to survive the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from tailrace.model.change import START, Position
from tailrace.model.schema import TableSchema
from tailrace.source.follower import SchemaVersions

Id = TypeVar("Id", int, str)


class SchemaLog(Generic[Id]):
    """One per follower. `recopies`: by table, the position of the last change that the log alone cannot reproduce."""

    def __init__(self, versions: SchemaVersions) -> None:
        self._versions = versions
        self._scanned: Position | None = None
        self.recopies: dict[Id, Position] = {}

    def put(self, schema: TableSchema, position: Position) -> TableSchema:
        """Record that the table has this schema from `position` on. The log after that is scanned again."""
        self._rewind(position)
        return self._versions.put_schema(schema, position)

    def _rewind(self, position: Position) -> None:
        if self._scanned is not None:
            self._scanned = min(self._scanned, position)

    def _scan(self, after: Position, upto: Position, read: Callable[[Position, Position], None]) -> None:
        """Scan up to `upto`, from where the last scan ended; the first one begins at `after`."""
        begin = after if self._scanned is None else self._scanned
        if upto > begin:
            read(begin, upto)
        self._scanned = max(begin, upto)

    def _mark(self, table: Id, at: Position) -> None:
        """Record that the table needs a new copy after this position."""
        self.recopies[table] = max(self.recopies.get(table, START), at)
