"""What was read from the store and is still true.

The runner's session keeps one for as long as nobody else writes; every other session begins an empty one with each
question, and so always asks the database.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from tailrace.state.engine import Row
from tailrace.state.record import TableRecord
from tailrace.state.row import read_table

if TYPE_CHECKING:
    from tailrace.schema import TableSchema

Version = tuple[str, int]
"""A position's text and the number of the version that begins there."""

_SELECT_TABLES = (
    "SELECT t.*, (SELECT v.version FROM schema_version AS v WHERE v.pipeline = t.pipeline"
    " AND v.upstream_id = t.upstream_id ORDER BY v.position DESC LIMIT 1) AS version"
    " FROM table_state AS t WHERE t.pipeline = :pipeline"
)


class RunStatement(Protocol):
    """Runs a statement for the pipeline, inside a transaction or outside of any."""

    def __call__(self, statement: str, **values: object) -> list[Row]: ...


class StateCache:
    """Table records, which versions each table has, and the versions themselves; each loaded when first needed."""

    def __init__(self) -> None:
        self._tables: dict[str, TableRecord] | None = None
        self._versions: dict[str, list[Version]] = {}
        self._schemas: dict[tuple[str, int], TableSchema] = {}

    def tables(self, run: RunStatement) -> dict[str, TableRecord]:
        """All tables by their upstream's id. Not to be changed by the caller."""
        if self._tables is None:
            self._tables = {row["upstream_id"]: read_table(row) for row in run(_SELECT_TABLES)}
        return self._tables

    def table(self, run: RunStatement, upstream_id: str) -> TableRecord | None:
        if self._tables is not None:
            return self._tables.get(upstream_id)
        rows = run(_SELECT_TABLES + " AND t.upstream_id = :upstream_id", upstream_id=upstream_id)
        return read_table(rows[0]) if rows else None

    def versions(self, run: RunStatement, upstream_id: str) -> list[Version]:
        """The versions of a table by position. Not to be changed by the caller."""
        if upstream_id not in self._versions:
            rows = run(
                "SELECT position, version FROM schema_version WHERE pipeline = :pipeline"
                " AND upstream_id = :upstream_id ORDER BY position",
                upstream_id=upstream_id,
            )
            self._versions[upstream_id] = [(row["position"], row["version"]) for row in rows]
        return self._versions[upstream_id]

    def schema(self, run: RunStatement, upstream_id: str, version: int) -> TableSchema | None:
        """One version; asked of the store when it is not remembered, as another process may have added it."""
        from tailrace.schema import TableSchema  # pyarrow: only who asks for a schema pays for it

        found = self._schemas.get((upstream_id, version))
        if found is None:
            rows = run(
                "SELECT schema FROM schema_version WHERE pipeline = :pipeline AND upstream_id = :upstream_id"
                " AND version = :version",
                upstream_id=upstream_id,
                version=version,
            )
            if rows:
                found = self._schemas[upstream_id, version] = TableSchema.from_json(rows[0]["schema"])
        return found

    def put_table(self, table: TableRecord) -> None:
        if self._tables is not None:
            self._tables[table.upstream_id] = table

    def put_schema(self, schema: TableSchema, versions: list[Version]) -> None:
        """A version was added; `versions` are all the table has now."""
        self._schemas[schema.upstream_id, schema.version] = schema
        self.put_versions(schema.upstream_id, versions)

    def put_versions(self, upstream_id: str, versions: list[Version]) -> None:
        self._versions[upstream_id] = versions
        numbers = {number for _, number in versions}
        self._schemas = {key: s for key, s in self._schemas.items() if key[0] != upstream_id or key[1] in numbers}
        if self._tables is not None and (table := self._tables.get(upstream_id)):
            self._tables[upstream_id] = replace(table, version=versions[-1][1] if versions else None)

    def drop_table(self, upstream_id: str) -> None:
        if self._tables is not None:
            self._tables.pop(upstream_id, None)
        self.put_versions(upstream_id, [])


def holding(versions: list[Version], position: str) -> int:
    """The index of the version that holds at a position; -1 when the first one begins later."""
    return bisect_right(versions, position, key=lambda version: version[0]) - 1
