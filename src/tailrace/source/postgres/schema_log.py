"""Follows the tables' versions through the journal: messages in its frames become versions, stored by position.

Two kinds of message bring a version: the event trigger's, which is complete and comes where the change was made, and
the Relation message before the first row with other columns, which the catalog completes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tailrace.errors import SchemaChangedError
from tailrace.journal import JournalReader
from tailrace.model.change import Position, just_before
from tailrace.model.schema import TableSchema
from tailrace.source.follower import SchemaVersions
from tailrace.source.postgres import ddl_message, event_trigger
from tailrace.source.postgres.catalog import Published
from tailrace.source.postgres.connection import session
from tailrace.source.postgres.ddl_message import DdlEvent
from tailrace.source.postgres.fingerprint import Fingerprint
from tailrace.source.postgres.frame_builder import FrameMeta, SchemaEvent
from tailrace.source.postgres.pgoutput.message import LogicalMessage, MalformedError, Relation, parse
from tailrace.source.postgres.schema_diff import compare, derive, differences, with_initial
from tailrace.source.postgres.type_map import CatalogType, read_types
from tailrace.source.schema_log import SchemaLog


@dataclass(frozen=True)
class _Fold:
    """A table's version at a position, from the messages there so far, and why it needs a new copy."""

    at: Position
    schema: TableSchema
    recopy: str | None = None


class PostgresSchemaLog(SchemaLog[int]):
    """The versions of the published tables, by OID.

    Several messages may stand before the same row. Each is compared with the one before it, the first of them with the
    version before that position; what the last one leaves is stored. A version is derived once: what is stored at a
    position stays, because the catalog, which completes a Relation message, may have changed since. `typed` gives a
    table the types that the pipeline's file chooses.
    """

    def __init__(
        self,
        dsn: str,
        publication: str,
        versions: SchemaVersions,
        now: Callable[[int], Published | None],
        typed: Callable[[TableSchema], TableSchema] = lambda table: table,
    ) -> None:
        super().__init__(versions)
        self._typed = typed
        self._dsn = dsn
        self._publication = publication
        self._now = now
        self._types: dict[int, CatalogType] = {}
        self._tokens: dict[str, bool] = {}

    def scan(self, journal: JournalReader, after: Position, upto: Position) -> None:
        """Store the versions that the log up to `upto` holds; the first call begins to scan at `after`."""

        def read(begin: Position, end: Position) -> None:
            folds: dict[int, _Fold] = {}
            for ref in journal.frames(begin, end):
                for event in FrameMeta.from_bytes(ref.meta).shapes:
                    if event.at <= end:
                        self._take(event, folds)
            for fold in folds.values():
                self._store(fold)

        self._scan(after, upto, read)

    def mark(self, oid: int, at: Position) -> None:
        """Record that the table needs a new copy after this position, which the log does not show."""
        self._mark(oid, at)

    def _take(self, event: SchemaEvent, folds: dict[int, _Fold]) -> None:
        message = parse(event.raw)
        if isinstance(message, Relation):
            known = self._known(message.oid, event.at, folds)
            if known is not None and self._differs(known.schema, message):
                folds[message.oid] = self._derive(known, message)
        elif isinstance(message, LogicalMessage):
            described = self._read_ddl(message.content)
            known = self._known(described.oid, event.at, folds) if described else None
            if described is not None and known is not None:
                folds[described.oid] = self._describe(known, described)

    def _known(self, oid: int, at: Position, folds: dict[int, _Fold]) -> _Fold | None:
        """The table as the messages up to here leave it. None if it is not followed there."""
        fold = folds.get(oid)
        if fold is not None and fold.at == at:
            return fold
        if fold is not None:
            self._store(folds.pop(oid))
        schema = self._versions.schema_at(str(oid), just_before(at))
        return None if schema is None else _Fold(at, schema)

    def _store(self, fold: _Fold) -> None:
        oid = int(fold.schema.upstream_id)
        history = self._versions.schemas_between(str(oid), just_before(fold.at), fold.at)
        stored = history[-1][1] if history and history[-1][0] == fold.at else None
        if stored is None:
            print_ = Fingerprint.of(fold.schema)
            if print_ is not None and fold.recopy != print_.recopy:
                fold = replace(fold, schema=replace(fold.schema, fingerprint=str(replace(print_, recopy=fold.recopy))))
            stored = self._versions.put_schema(fold.schema, fold.at)
        kept = Fingerprint.of(stored)
        if fold.recopy or (kept is not None and kept.recopy):
            self._mark(oid, fold.at)

    # -- Relation messages --------------------------------------------------------------------------------

    def _differs(self, known: TableSchema, relation: Relation) -> bool:
        return (
            bool(differences(known, relation))
            or _is_another(known, relation)
            or _is_retyped(known, relation)
            or self._has_lost_key(known, relation)
        )

    def _derive(self, known: _Fold, relation: Relation) -> _Fold:
        try:
            derived = derive(known.schema, relation, self._now(relation.oid))
        except SchemaChangedError as error:
            return replace(known, recopy=known.recopy or error.message)
        return replace(known, schema=self._typed(derived.schema), recopy=known.recopy or derived.recopy)

    def _has_lost_key(self, known: TableSchema, relation: Relation) -> bool:
        """Whether the table no longer has a key. The catalog decides, as a deferrable key marks no columns either."""
        if not known.key or relation.replica_identity not in "di" or any(c.identifies for c in relation.columns):
            return False
        now = self._now(relation.oid)
        return now is not None and not now.schema.key

    # -- messages of the event trigger --------------------------------------------------------------------

    def _read_ddl(self, content: bytes) -> DdlEvent | None:
        """The message; None unless the trigger wrote it, as any role may write one that looks the same.

        What it would have shown is then found from the Relation messages and the catalog, as without the trigger.
        """
        try:
            described = ddl_message.parse(content)
        except MalformedError:
            return None
        if described is None or described.dropped or not self._is_genuine(described.token):
            return None
        return described

    def _describe(self, known: _Fold, described: DdlEvent) -> _Fold:
        reason = described.reason if described.recopy else None
        if described.columns is None:
            return replace(known, recopy=known.recopy or reason)
        published = ddl_message.to_published(described, self._publication, self._read_types(described.type_oids))
        if published is None:
            return known
        schema = self._typed(published.schema)
        compared = compare(known.schema, schema, unknown=published.unknown)
        return _Fold(known.at, with_initial(known.schema, schema), known.recopy or reason or compared.recopy)

    def _is_genuine(self, token: str) -> bool:
        if token not in self._tokens:
            with session(self._dsn, "checking a message of the event trigger") as connection:
                self._tokens[token] = event_trigger.is_genuine(connection, token)
        return self._tokens[token]

    def _read_types(self, oids: frozenset[int]) -> Mapping[int, CatalogType]:
        if missing := oids - self._types.keys():
            with session(self._dsn, "reading the types of a changed table") as connection:
                self._types |= read_types(connection, missing)
        return self._types


def _is_another(known: TableSchema, relation: Relation) -> bool:
    """Whether it has another name or key, or its columns another order, which comparing them by name does not show."""
    if (relation.schema, relation.name) != (known.table.schema, known.table.name):
        return True
    if [column.name for column in relation.columns] != [column.name for column in known.columns]:
        return True
    identity = {column.name for column in relation.columns if column.identifies}
    return relation.replica_identity in ("d", "i") and bool(identity) and identity != set(known.key)


def _is_retyped(known: TableSchema, relation: Relation) -> bool:
    """Whether a column has another type, even one that is kept as the same Arrow type."""
    print_ = Fingerprint.of(known)
    marks = print_.columns if print_ else {}
    numbers = {column.name: column.number for column in known.columns}
    return any(
        mark[:2] != (sent.type_oid, sent.typmod)
        for sent in relation.columns
        if (mark := marks.get(numbers.get(sent.name, 0))) is not None
    )
