"""Follows the tables' versions through the journal: messages in its frames become versions, stored by position.

Two kinds of message bring a version: the event trigger's, which is complete and comes where the change was made, and
the Relation message before the first row with other columns, which the catalog completes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tailrace.errors import SchemaChangedError
from tailrace.journal import JournalReader
from tailrace.model.change import Position, just_before
from tailrace.model.schema import TableSchema
from tailrace.source.follower import SchemaVersions
from tailrace.source.postgres import ddl_message
from tailrace.source.postgres.catalog import Published
from tailrace.source.postgres.connection import session
from tailrace.source.postgres.frame_builder import FrameMeta, SchemaEvent
from tailrace.source.postgres.pgoutput.message import LogicalMessage, MalformedError, Relation, parse
from tailrace.source.postgres.schema_diff import compare, derive, differences, with_initial
from tailrace.source.postgres.type_map import CatalogType, read_types
from tailrace.source.schema_log import SchemaLog


class PostgresSchemaLog(SchemaLog[int]):
    """The versions of the published tables, by OID."""

    def __init__(
        self, dsn: str, publication: str, versions: SchemaVersions, now: Callable[[int], Published | None]
    ) -> None:
        super().__init__(versions)
        self._dsn = dsn
        self._publication = publication
        self._now = now
        self._types: dict[int, CatalogType] = {}
        self._described: set[tuple[int, Position]] = set()

    def scan(self, journal: JournalReader, after: Position, upto: Position) -> None:
        """Store the versions that the log up to `upto` holds; the first call begins to scan at `after`."""

        def read(begin: Position, end: Position) -> None:
            for ref in journal.frames(begin, end):
                for shape in FrameMeta.from_bytes(ref.meta).shapes:
                    if shape.at <= end:
                        self._take(shape)

        self._scan(after, upto, read)

    def _take(self, shape: SchemaEvent) -> None:
        message = parse(shape.raw)
        if isinstance(message, Relation):
            self._take_relation(message, shape.at)
        elif isinstance(message, LogicalMessage):
            self._take_ddl(message.content, shape.at)

    def _take_relation(self, relation: Relation, at: Position) -> None:
        known = self._versions.schema_at(str(relation.oid), at)
        if known is None:
            return
        if (relation.oid, at) not in self._described:
            # The version at this very position was derived from this message, by a process that may have crashed since.
            known = self._versions.schema_at(str(relation.oid), just_before(at)) or known
        if not (differences(known, relation) or _is_another(known, relation) or self._has_lost_key(known, relation)):
            return
        try:
            derived = derive(known, relation, self._now(relation.oid))
        except SchemaChangedError:
            self._mark(relation.oid, at)
            return
        self._put(derived.schema, at, derived.recopy)

    def _has_lost_key(self, known: TableSchema, relation: Relation) -> bool:
        """Whether the table no longer has a key. The catalog decides, as a deferrable key marks no columns either."""
        if not known.key or relation.replica_identity != "d" or any(column.identifies for column in relation.columns):
            return False
        now = self._now(relation.oid)
        return now is not None and not now.schema.key

    def _take_ddl(self, content: bytes, at: Position) -> None:
        try:
            described = ddl_message.parse(content)
        except MalformedError:
            return  # not the trigger's: anyone may write such a message, and Relation messages are read as well
        if described is None or described.dropped or self._versions.schema_at(str(described.oid), at) is None:
            return
        self._described.add((described.oid, at))
        if described.columns is None:
            self._mark(described.oid, at)
            return
        published = ddl_message.to_published(described, self._publication, self._read_types(described.type_oids))
        if published is None:
            return
        recopy, schema = described.reason if described.recopy else None, published.schema
        earlier = self._versions.schema_at(str(described.oid), just_before(at))
        if recopy is None and earlier is not None:
            compared = compare(earlier, schema, unknown=published.unknown, rewritten=described.rewritten)
            recopy, schema = compared.recopy, with_initial(earlier, schema)
        self._put(schema, at, recopy)

    def _put(self, schema: TableSchema, at: Position, recopy: str | None) -> None:
        self._versions.put_schema(schema, at)
        if recopy:
            self._mark(int(schema.upstream_id), at)

    def _read_types(self, oids: frozenset[int]) -> Mapping[int, CatalogType]:
        if missing := oids - self._types.keys():
            with session(self._dsn, "reading the types of a changed table") as connection:
                self._types |= read_types(connection, missing)
        return self._types


def _is_another(known: TableSchema, relation: Relation) -> bool:
    """Whether the table has another name or another key, which a comparison of columns does not show."""
    if (relation.schema, relation.name) != (known.table.schema, known.table.name):
        return True
    identity = {column.name for column in relation.columns if column.identifies}
    return relation.replica_identity in ("d", "i") and bool(identity) and identity != set(known.key)
