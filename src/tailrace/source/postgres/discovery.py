"""Which tables there are to follow, checked every few seconds while the pipeline runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tailrace.errors import PreflightError
from tailrace.model.schema import TableName
from tailrace.source.discovery import Discovery
from tailrace.source.postgres import preflight
from tailrace.source.postgres.catalog import (
    CatalogRelation,
    Published,
    Shown,
    list_published,
    list_tables,
)
from tailrace.source.postgres.connection import PgConnection, session
from tailrace.source.postgres.slot import extend_publication, publication_exists, publication_sql, read_mark

if TYPE_CHECKING:
    from tailrace.source.postgres.source import PostgresSource

SeenRelations = frozenset[tuple[int, str, int]]


class PostgresDiscovery(Discovery):
    """The tables to follow, by OID, as the publication shows them. `refresh` reads them again when they are too old."""

    def __init__(self, source: PostgresSource) -> None:
        super().__init__()
        self._source = source
        self._roll: SeenRelations = frozenset()
        self.tables: Mapping[int, Published] = {}
        self.refresh(at_once=True)

    def _look(self, *, at_once: bool) -> None:
        """Two cheap queries when nothing changed. Raises PreflightError when the publication is gone."""
        with session(self._source.dsn, "checking for new and dropped tables") as connection:
            roll = self._select_tables(connection)
            if at_once or roll != self._roll:
                self.tables = {one.oid: one for one in preflight.select_published(connection, self._source)}
                self._roll = roll

    def _select_tables(self, connection: PgConnection) -> SeenRelations:
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
        return frozenset(
            (one.oid, str(one.table), shown[one.table].membership) for one in relations if one.table in chosen
        )

    def _extend(
        self, connection: PgConnection, relations: Sequence[CatalogRelation], shown: Mapping[TableName, Shown]
    ) -> bool:
        """Add new tables to a publication that tailrace created. True if there were any."""
        source = self._source
        mark = read_mark(connection, source.options.publication) if source.extends_publication else None
        after = preflight.mark_of(source, relations)
        if mark is None or mark == after:
            return False
        new = [
            one.table for one in preflight.unpublished(source, relations, shown) if preflight.new_to(mark, source, one)
        ]
        extend_publication(connection, source.options.publication, new, after)
        return bool(new)
