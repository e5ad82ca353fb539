"""Which tables a cluster has, checked now and then: through its API, in the schema file, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tailrace.model.schema import TableName
from tailrace.option.table import TableOptions
from tailrace.source.discovery import Discovery
from tailrace.source.rqlite.api import Api
from tailrace.source.rqlite.catalog import Tables, ask_tables, is_followable, read_tables
from tailrace.source.sqlite.catalog import TableDefinition


class RqliteDiscovery(Discovery):
    """The tables of one service, as its catalog describes them: `is_listed` if there is one, `is_live` if by API.

    `edition` grows with every change of the catalog.
    """

    def __init__(self, service: str, wanted: TableOptions, api: Api | None, file: Path | None) -> None:
        super().__init__()
        self._service = service
        self._wanted = wanted
        self._api = api
        self._file = file
        self._listed: Tables | None = None
        self._selected: Mapping[str, TableDefinition] = {}
        self.edition = 0

    @property
    def is_live(self) -> bool:
        return self._api is not None

    @property
    def is_listed(self) -> bool:
        return self._api is not None or self._file is not None

    def refresh(self, *, at_once: bool = False) -> None:
        if self.is_listed:
            super().refresh(at_once=at_once)

    def _look(self, *, at_once: bool) -> None:
        listed = self._list()
        if listed != self._listed:
            self._listed = listed
            self._selected = {
                name: table
                for name, table in listed.items()
                if table is not None and is_followable(table) and self.wants(name)
            }
            self.edition += 1

    def _list(self) -> Tables:
        if self._api is not None:
            return ask_tables(self._api)
        assert self._file is not None
        return read_tables(self._file)

    @property
    def tables(self) -> Mapping[str, TableDefinition]:
        """The tables to follow, of those that are listed."""
        self.refresh()
        return self._selected

    def wants(self, name: str) -> bool:
        """Whether the table is selected, listed or not."""
        return bool(self._wanted.select([TableName(self._service, name)]))
