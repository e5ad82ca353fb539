"""Which tables there are to follow, checked every few seconds while the pipeline runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailrace.errors import PreflightError
from tailrace.model.change import START, Position
from tailrace.model.schema import TableName
from tailrace.source.discovery import Discovery
from tailrace.source.postgres import event_trigger, preflight
from tailrace.source.postgres.catalog import (
    CatalogRelation,
    Published,
    Shown,
    describe,
    list_published,
    list_tables,
    sum_column_marks,
)
from tailrace.source.postgres.connection import PgConnection, session
from tailrace.source.postgres.offset import before
from tailrace.source.postgres.slot import (
    PublicationMark,
    extend_publication,
    publication_exists,
    publication_sql,
    read_mark,
    server_position,
)

if TYPE_CHECKING:
    from tailrace.source.postgres.source import PostgresSource

SeenRelations = frozenset[tuple[int, str, int, int, int, int]]


@dataclass(frozen=True, eq=False)
class CatalogLook:
    """The tables as the catalog had them at some time between two positions of the log.

    `has_trigger`: the event trigger reports what the catalog alone does not show.
    """

    tables: Mapping[int, Published]
    began: Position
    ended: Position
    has_trigger: bool = False


class PostgresDiscovery(Discovery):
    """The tables to follow, by OID, as the publication shows them. `refresh` reads them again when they are too old."""

    def __init__(self, source: PostgresSource, followed: frozenset[int] | None = None) -> None:
        super().__init__()
        self._source = source
        self._roll: tuple[SeenRelations, int] = (frozenset(), 0)
        self.look = CatalogLook({}, START, START)
        self.followed = followed
        """The tables in the pipeline's offset: one that is no longer published was removed. None: not known yet."""
        self.refresh(at_once=True)

    @property
    def tables(self) -> Mapping[int, Published]:
        return self.look.tables

    def _look(self, *, at_once: bool) -> None:
        """Two cheap queries when nothing changed. Raises PreflightError when the publication is gone."""
        with session(self._source.dsn, "checking for new and dropped tables") as connection:
            roll = self._select_tables(connection)
            if at_once or roll != self._roll:
                began = before(server_position(connection))
                tables = {one.oid: one for one in preflight.select_followed(connection, self._source)}
                has_trigger = event_trigger.installed_version(connection) == event_trigger.VERSION
                self.look = CatalogLook(tables, began, before(server_position(connection)), has_trigger)
                self._roll = roll

    def _select_tables(self, connection: PgConnection) -> tuple[SeenRelations, int]:
        source = self._source
        if not publication_exists(connection, source.options.publication):
            known = [one.schema.table for one in self.tables.values()]
            create = publication_sql(
                source.options.publication, known, via_root=source.options.publish_via_partition_root
            ).as_string(connection)
            raise PreflightError(
                f"the publication {source.options.publication!r} is gone; changes made since then are not sent by the"
                " server",
                fix=f"{create};  -- then tailrace reset FILE, and run again: every table is copied again",
            )
        relations = list_tables(connection)
        shown = list_published(connection, source.options.publication)
        if self._extend(connection, relations, shown):
            shown = list_published(connection, source.options.publication)
        chosen = set(source.context.tables.select([one.table for one in relations if one.table in shown]))
        seen = frozenset(
            (
                *(one.oid, str(one.table), shown[one.table].membership, shown[one.table].options),
                *(one.changed, one.key_index),
            )
            for one in relations
            if one.table in chosen
        )
        has_trigger = event_trigger.installed_version(connection) == event_trigger.VERSION
        return seen, 0 if has_trigger else sum_column_marks(connection, [one[0] for one in seen])

    def _extend(
        self, connection: PgConnection, relations: Sequence[CatalogRelation], shown: Mapping[TableName, Shown]
    ) -> bool:
        """Add new tables to a publication that tailrace created. True if there were any."""
        source = self._source
        mark = read_mark(connection, source.options.publication) if source.extends_publication else None
        if mark is None or self.followed is None:
            return False
        missing = preflight.unpublished(source, relations, shown)
        declined = preflight.declined(mark, source, missing, self.followed)
        found = [one for one in missing if one.oid not in declined]
        described = describe(connection, found, {}) if found else []
        new = [one.schema.table for one in preflight.addable(connection, source, described)] if described else []
        after = PublicationMark(preflight.selection_hash(source), declined)
        if new or mark != after:
            extend_publication(connection, source.options.publication, new, after)
        return bool(new)
