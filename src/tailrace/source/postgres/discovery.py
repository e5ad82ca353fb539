"""Which tables there are to follow, looked up now and then while the pipeline runs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tailrace.errors import PreflightError, UnavailableError
from tailrace.model.schema import TableName
from tailrace.source.postgres import preflight
from tailrace.source.postgres.catalog import (
    CatalogRelation,
    PgConnection,
    Published,
    Shown,
    list_published,
    list_tables,
)
from tailrace.source.postgres.connection import session
from tailrace.source.postgres.slot import extend_publication, publication_exists, publication_sql, read_mark

if TYPE_CHECKING:
    from tailrace.source.postgres.source import PostgresSource

DISCOVERY_SECONDS = 2.0

SeenRelations = frozenset[tuple[int, str, int]]


class PostgresDiscovery:
    """The wanted tables by OID, as the publication shows them. `refresh` looks again when it is time."""

    def __init__(self, source: PostgresSource) -> None:
        self._source = source
        self._looked = 0.0
        self._roll: SeenRelations = frozenset()
        self.tables: Mapping[int, Published] = {}
        self.refresh(at_once=True)

    def refresh(self, *, at_once: bool = False) -> None:
        """Look again, at most every few seconds; two cheap questions when nothing changed.

        A server that does not answer leaves things as they are. Raises PreflightError when the publication is gone.
        """
        if not at_once and time.monotonic() - self._looked < DISCOVERY_SECONDS:
            return
        self._looked = time.monotonic()
        try:
            with session(self._source.dsn, "looking for new and dropped tables") as connection:
                roll = self._select_tables(connection)
                if at_once or roll != self._roll:
                    self.tables = {one.oid: one for one in preflight.select_published(connection, self._source)}
                    self._roll = roll
        except UnavailableError:
            if at_once:
                raise

    def _select_tables(self, connection: PgConnection) -> SeenRelations:
        source = self._source
        if not publication_exists(connection, source.publication):
            known = [one.schema.table for one in self.tables.values()]
            create = publication_sql(source.publication, known, via_root=source.via_root).as_string(connection)
            raise PreflightError(
                f"the publication {source.publication!r} is gone; changes made since then are not sent by the server",
                fix=f"{create};  -- then tailrace reset FILE, and run again: every table is copied anew",
            )
        relations = list_tables(connection)
        shown = list_published(connection, source.publication)
        if self._extend(connection, relations, shown):
            shown = list_published(connection, source.publication)
        chosen = set(source.tables_wanted.select([one.table for one in relations if one.table in shown]))
        return frozenset(
            (one.oid, str(one.table), shown[one.table].membership) for one in relations if one.table in chosen
        )

    def _extend(
        self, connection: PgConnection, relations: Sequence[CatalogRelation], shown: Mapping[TableName, Shown]
    ) -> bool:
        """Put tables that are new into a publication that tailrace made; whether there were any."""
        source = self._source
        mark = read_mark(connection, source.publication) if source.extends_publication else None
        after = preflight.mark_of(source, relations)
        if mark is None or mark == after:
            return False
        new = [
            one.table for one in preflight.unpublished(source, relations, shown) if preflight.new_to(mark, source, one)
        ]
        extend_publication(connection, source.publication, new, after)
        return bool(new)
