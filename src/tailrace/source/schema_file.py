"""Table versions in a file, for readers that have no state store."""

from __future__ import annotations

import json
from bisect import bisect_right
from pathlib import Path

from tailrace.errors import require_all
from tailrace.model.change import Position
from tailrace.model.schema import TableSchema
from tailrace.source.follower import Follower, SchemaHistory
from tailrace.source.source import Source
from tailrace.system.atomic_file import make_folder, replace_durably


def follow_alone(source: Source) -> Follower:
    """Follow a source without a pipeline: prepare it, and keep the versions in a file.

    Raises PreflightError also for an error about a single table: without a state store, none can be stopped alone.
    """
    require_all(source.check())
    source.prepare()
    make_folder(source.schema_file.parent)
    return source.follow(SchemaFile(source.schema_file))


class SchemaFile:
    """Implements `tailrace.source.follower.SchemaVersions` in memory and, with a `file`, on disk before `put_schema`
    returns."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._versions: dict[str, list[tuple[Position, TableSchema]]] = {}
        if file is not None and file.exists():
            for text in json.loads(file.read_text()):
                position, schema = Position.parse(text["position"]), TableSchema.from_json(text["schema"])
                self._versions.setdefault(schema.upstream_id, []).append((position, schema))

    def put_schema(self, schema: TableSchema, position: Position) -> TableSchema:
        known = self._versions.setdefault(schema.upstream_id, [])
        holds = self.schema_at(schema.upstream_id, position)
        if holds is not None and holds.at_version(0) == schema.at_version(0):
            return holds
        numbered = schema.at_version(max((table.version for _, table in known), default=0) + 1)
        known[:] = sorted(
            [*((at, table) for at, table in known if at != position), (position, numbered)], key=lambda pair: pair[0]
        )
        self._store()
        return numbered

    def schema_at(self, upstream_id: str, position: Position | None = None) -> TableSchema | None:
        known = self._versions.get(upstream_id, [])
        index = len(known) if position is None else bisect_right(known, position, key=lambda pair: pair[0])
        return known[index - 1][1] if index else None

    def schemas_between(self, upstream_id: str, after: Position, upto: Position) -> SchemaHistory:
        known = self._versions.get(upstream_id, [])
        begin, end = (bisect_right(known, position, key=lambda pair: pair[0]) for position in (after, upto))
        return known[max(begin - 1, 0) : end]

    def new_versions(self, after: Position, upto: Position) -> list[str]:
        return [name for name, known in self._versions.items() if any(after < at <= upto for at, _ in known)]

    def _store(self) -> None:
        if self._file is None:
            return
        values = [
            {"position": str(position), "schema": schema.to_json()}
            for versions in self._versions.values()
            for position, schema in versions
        ]
        replace_durably(self._file, json.dumps(values).encode())
