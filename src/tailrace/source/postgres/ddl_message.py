"""Reads the messages that the event trigger of `event_trigger` writes to the log.

A message either describes a table as its command left it, or only states that the table was dropped or that its rows
changed without being logged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tailrace.model.schema import TableName
from tailrace.source.postgres.catalog import CatalogColumn, CatalogRelation, Keys, Published, Shown, Storage, build
from tailrace.source.postgres.pgoutput.message import MalformedError
from tailrace.source.postgres.type_map import CatalogType

FORMAT: Final = 2
"""The format version of the messages, their `v`."""


@dataclass(frozen=True)
class DdlEvent:
    """One table after one command. `columns` is None in a message that does not describe it.

    `token` proves that the event trigger wrote the message. `recopy`: the command changed rows without logging them;
    `reason` is why.
    """

    oid: int
    token: str
    table: TableName | None = None
    tag: str = ""
    identity: str = "d"
    partitioned: bool = False
    is_partition: bool = False
    columns: tuple[CatalogColumn, ...] | None = None
    keys: Keys = field(default_factory=Keys)
    publications: Mapping[str, Shown] = field(default_factory=dict)
    storage: Storage = field(default_factory=Storage)
    recopy: bool = False
    reason: str | None = None
    dropped: bool = False

    @property
    def type_oids(self) -> frozenset[int]:
        """The types that `to_published` needs."""
        return frozenset(column.type_oid for column in self.columns or ())


def parse(content: bytes) -> DdlEvent | None:
    """Parse a message of the event trigger; None for a format that this version does not know.

    Raises MalformedError for damaged content. The error's text quotes none of it.
    """
    try:
        raw = json.loads(content)
        return _build(raw) if raw["v"] == FORMAT else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MalformedError(f"a message of the event trigger of {len(content)} bytes is damaged") from error


def _build(raw: dict[str, Any]) -> DdlEvent:
    oid, token, tag = int(raw["oid"]), str(raw["token"]), str(raw["tag"])
    recopy, reason = bool(raw.get("recopy", False)), raw.get("reason")
    table = TableName(raw["schema"], raw["name"]) if "name" in raw else None
    if "columns" not in raw:
        return DdlEvent(oid, token, table, tag, recopy=recopy, reason=reason, dropped=bool(raw.get("dropped", False)))
    return DdlEvent(
        oid,
        token,
        table,
        tag,
        raw["identity"],
        raw["partitioned"],
        raw["is_partition"],
        tuple(CatalogColumn(*column) for column in raw["columns"]),
        Keys(raw["primary"], raw["index"]),
        {
            name: Shown(None if columns is None else frozenset(columns), *rest)
            for name, (columns, *rest) in raw["publications"].items()
        },
        Storage(raw["file"], raw["width"], raw["types"], raw.get("key")),
        recopy,
        reason,
    )


def to_published(described: DdlEvent, publication: str, types: Mapping[int, CatalogType]) -> Published | None:
    """The table as `catalog.describe` would return it right after the command; None when not in the publication.

    `types` are those of `described.type_oids` that still exist; a column of any other is kept as text.
    """
    shown = described.publications.get(publication)
    if shown is None or described.columns is None or described.table is None:
        return None
    relation = CatalogRelation(
        described.oid, described.table, described.identity, True, described.partitioned, described.is_partition
    )
    return build(relation, described.columns, described.keys, shown, types, described.storage)
