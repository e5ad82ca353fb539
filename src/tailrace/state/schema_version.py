"""Which columns a table had at a position, in SQL. Versions are few: they are pruned as progress passes them."""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby
from typing import TYPE_CHECKING

from tailrace.state.transaction import StateSession, Version, holding

if TYPE_CHECKING:
    from tailrace.model.change import Position
    from tailrace.model.schema import TableSchema


class VersionStore:
    """Which columns a table had at a position. Versions are ordered by position; their numbers only name them."""

    _session: StateSession

    def put_schema(self, schema: TableSchema, position: Position) -> TableSchema:
        """From `position` on the table has these columns. Gives the schema under the number it is stored by.

        When the version that holds there is the same already, that one is returned and nothing is added. Another
        one that begins at exactly this position is replaced, under a new number. Numbers are never used twice.
        """
        upstream_id, begin = schema.upstream_id, str(position)
        with self._session.write() as tx:
            versions = tx.memory.versions(tx.run, upstream_id)
            index = holding(versions, begin)
            if index >= 0:
                held = tx.memory.schema(tx.run, upstream_id, versions[index][1])
                if held is not None and _alike(held, schema):
                    return held
            added = schema.at_version(max((number for _, number in versions), default=0) + 1)
            tx.run(
                "INSERT INTO schema_version (pipeline, upstream_id, position, version, schema)"
                " VALUES (:pipeline, :upstream_id, :position, :version, :schema)"
                " ON CONFLICT (pipeline, upstream_id, position)"
                " DO UPDATE SET version = excluded.version, schema = excluded.schema",
                upstream_id=upstream_id,
                position=begin,
                version=added.version,
                schema=added.to_json(),
            )
            rest = [version for version in versions if version[0] != begin]
            tx.then(lambda: tx.memory.put_schema(added, sorted([*rest, (begin, added.version)])))
        return added

    def schema(self, upstream_id: str, version: int) -> TableSchema | None:
        """The version of a number; None when it was pruned or replaced."""
        with self._session.lock:
            return self._session.cache.schema(self._session.read, upstream_id, version)

    def schema_at(self, upstream_id: str, position: Position | None = None) -> TableSchema | None:
        """The version that holds at a position; without one, the last."""
        with self._session.lock:
            versions = self._versions(upstream_id)
            index = len(versions) - 1 if position is None else holding(versions, str(position))
            return self.schema(upstream_id, versions[index][1]) if index >= 0 else None

    def schemas_between(self, upstream_id: str, after: Position, upto: Position) -> list[tuple[Position, TableSchema]]:
        """What reading (after, upto] needs: the version that holds at `after`, then those that begin after it."""
        with self._session.lock:
            versions = self._versions(upstream_id)
            first, last = holding(versions, str(after)), holding(versions, str(upto))
            return self._load(upstream_id, versions[max(first, 0) : last + 1])

    def new_versions(self, after: Position, upto: Position) -> list[str]:
        """The tables, by upstream id, of which a version begins in (after, upto]."""
        rows = self._session.read(
            "SELECT DISTINCT upstream_id FROM schema_version"
            " WHERE pipeline = :pipeline AND position > :after AND position <= :upto",
            after=str(after),
            upto=str(upto),
        )
        return [row["upstream_id"] for row in rows]

    def prune_schemas(self, upto: Position, *, keep: Collection[str] = ()) -> int:
        """Drop versions that no position from `upto` on needs; says how many. The one that holds at `upto` stays.

        The tables in `keep`, by upstream id, are left as they are.
        """
        with self._session.write() as tx:
            rows = tx.run(
                "SELECT upstream_id, position, version FROM schema_version WHERE pipeline = :pipeline"
                " ORDER BY upstream_id, position"
            )
            dropped: list[dict[str, object]] = []
            for upstream_id, group in groupby(rows, key=lambda row: str(row["upstream_id"])):
                versions = [(str(row["position"]), int(row["version"])) for row in group]
                kept = versions if upstream_id in keep else _keep(versions, str(upto))
                dropped += [{"upstream_id": upstream_id, "version": v[1]} for v in versions if v not in kept]
                if len(kept) < len(versions):
                    tx.then(lambda table=upstream_id, kept=kept: tx.memory.put_versions(table, kept))  # type: ignore[misc]
            tx.run_many(
                "DELETE FROM schema_version WHERE pipeline = :pipeline AND upstream_id = :upstream_id"
                " AND version = :version",
                dropped,
            )
        return len(dropped)

    def _versions(self, upstream_id: str) -> list[Version]:
        return self._session.cache.versions(self._session.read, upstream_id)

    def _load(self, upstream_id: str, versions: list[Version]) -> list[tuple[Position, TableSchema]]:
        from tailrace.model.change import Position  # pyarrow: loaded only where a schema is asked for

        loaded = [(Position.parse(begin), self.schema(upstream_id, number)) for begin, number in versions]
        # A version that was pruned between the two questions is not needed any more.
        return [(begin, schema) for begin, schema in loaded if schema is not None]


def _keep(versions: list[Version], upto: str) -> list[Version]:
    """What a position after `upto` can need, and the highest number: it must not be used twice."""
    boundary, highest = max(holding(versions, upto), 0), max(number for _, number in versions)
    return [version for index, version in enumerate(versions) if index >= boundary or version[1] == highest]


def _alike(one: TableSchema, other: TableSchema) -> bool:
    """Whether they differ in nothing but their version. As text, too: a NaN is not equal to itself."""
    other = other.at_version(one.version)
    return one == other or one.to_json() == other.to_json()
