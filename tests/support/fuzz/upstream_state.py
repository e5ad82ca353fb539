"""What the database holds at this point of a sequence, so that the next statement fits it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import psycopg


@dataclass(frozen=True)
class UpstreamColumn:
    """A column: `kind` is its type as Postgres prints it; `generated` and `defaulted` whether it has such a clause."""

    name: str
    kind: str
    generated: bool
    defaulted: bool
    required: bool


@dataclass(frozen=True)
class UpstreamTable:
    """A table, by its qualified name. `kind` is `table`, `root` or `leaf`; `unique` are indexes that may identify."""

    schema: str
    name: str
    kind: str
    parent: str | None
    identity: str
    key: tuple[str, ...]
    constraint: str | None
    unique: tuple[str, ...]
    identity_index: str | None
    is_published: bool
    columns: tuple[UpstreamColumn, ...]

    @property
    def place(self) -> str:
        return self.name if self.schema == "app" else f"{self.schema}.{self.name}"

    @property
    def plain(self) -> tuple[UpstreamColumn, ...]:
        """The columns that a command may change without the key noticing."""
        return tuple(column for column in self.columns if column.name not in self.key)

    @property
    def written(self) -> tuple[UpstreamColumn, ...]:
        return tuple(column for column in self.columns if not column.generated)


_STATE = """
SELECT coalesce(json_agg(json_build_object(
    'schema', n.nspname, 'name', c.relname,
    'kind', CASE WHEN c.relkind = 'p' THEN 'root' WHEN c.relispartition THEN 'leaf' ELSE 'table' END,
    'parent', (SELECT p.relname FROM pg_inherits i JOIN pg_class p ON p.oid = i.inhparent WHERE i.inhrelid = c.oid),
    'identity', c.relreplident,
    'key', (SELECT array_agg(a.attname ORDER BY a.attnum) FROM pg_index i
            JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = ANY(i.indkey)
            WHERE i.indrelid = c.oid AND i.indisprimary),
    'constraint', (SELECT conname FROM pg_constraint WHERE conrelid = c.oid AND contype = 'p'),
    'unique', (SELECT array_agg(x.relname ORDER BY x.relname) FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid
               WHERE i.indrelid = c.oid AND i.indisunique AND NOT i.indisprimary AND i.indpred IS NULL
               AND (SELECT bool_and(a.attnotnull) FROM pg_attribute a
                    WHERE a.attrelid = c.oid AND a.attnum = ANY(i.indkey))),
    'identity_index', (SELECT x.relname FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid
                       WHERE i.indrelid = c.oid AND i.indisreplident AND NOT i.indisprimary),
    'is_published', EXISTS (SELECT FROM pg_publication_rel r WHERE r.prrelid = c.oid),
    'columns', (SELECT json_agg(json_build_array(a.attname, format_type(a.atttypid, a.atttypmod),
                    a.attgenerated <> '', a.atthasdef AND a.attgenerated = '', a.attnotnull) ORDER BY a.attnum)
                FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped)
    ) ORDER BY n.nspname, c.relname), '[]')
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname IN ('app', 'other') AND c.relkind IN ('r', 'p')
"""


def read_state(session: psycopg.Connection[Any]) -> list[UpstreamTable]:
    row = session.execute(_STATE).fetchone()
    assert row is not None
    raw = row[0] if isinstance(row[0], list) else json.loads(row[0])
    return [
        UpstreamTable(
            table["schema"],
            table["name"],
            table["kind"],
            table["parent"],
            table["identity"],
            tuple(table["key"] or ()),
            table["constraint"],
            tuple(table["unique"] or ()),
            table["identity_index"],
            table["is_published"],
            tuple(UpstreamColumn(*column) for column in table["columns"] or ()),
        )
        for table in raw
    ]
