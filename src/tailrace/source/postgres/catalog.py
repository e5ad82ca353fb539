"""Reads tables from the catalog: columns, keys, replica identity, and what the publication shows of them.

Everything here reads the catalog's tables by SELECT, so that a session with an imported snapshot sees them as of that
snapshot. Server functions see only the newest catalog; where one is called, it only formats a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pyarrow as pa

from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.source.postgres.connection import PgConnection
from tailrace.source.postgres.fingerprint import ColumnMark, Fingerprint
from tailrace.source.postgres.pgoutput import text
from tailrace.source.postgres.type_map import CatalogType, read_types


@dataclass(frozen=True)
class Published:
    """A table as it is, or would be, published. `identity` is Postgres's letter: default, index, full or nothing.

    `membership` is the OID of what puts the table into the publication: the entry of its schema, its own entry (always,
    if there is a `row_filter`), that of the table it is a partition of, or the publication itself when it is FOR ALL
    TABLES. It changes when the table is removed and added again, and is 0 before there is a publication. `options` is
    the transaction that last changed the options of the publication, such as which kinds of change it publishes.
    `unknown` are the numbers of columns with a default in which older rows hold a value that is not stored.
    `stays_logged`: Postgres refuses to make it UNLOGGED, as long as the publication names the table itself.
    """

    schema: TableSchema
    identity: str = "d"
    row_filter: str | None = None
    can_select: bool = True
    membership: int = 0
    options: int = 0
    unknown: frozenset[int] = frozenset()
    stays_logged: bool = True

    @property
    def oid(self) -> int:
        return int(self.schema.upstream_id)


@dataclass(frozen=True)
class CatalogRelation:
    """A table of the database, whether published or not.

    `changed` is the transaction that last changed its row in pg_class, `key_index` the index that identifies rows.
    """

    oid: int
    table: TableName
    identity: str
    can_select: bool
    partitioned: bool
    is_partition: bool
    changed: int = 0
    key_index: int = 0


class CatalogColumn(NamedTuple):
    """A column as `COLUMN_FIELDS` reads it. `missing` is the text of the value that rows older than the column hold.

    `defaulted`: the column has a default, and no such value is stored. `changed` is the transaction that last changed
    its row in pg_attribute.
    """

    number: int
    name: str
    type_oid: int
    typmod: int
    required: bool
    declared: str
    generated: str
    missing: str | None
    defaulted: bool
    changed: int

    @property
    def mark(self) -> ColumnMark:
        return ColumnMark(self.type_oid, self.typmod, self.changed)


class Keys(NamedTuple):
    """Column numbers of the primary key and of the index that is the replica identity; None where there is none."""

    primary: Sequence[int] | None = None
    identity: Sequence[int] | None = None


class Storage(NamedTuple):
    """What else the catalog has of a table: a hash of the files with its rows, the highest number a column ever had,
    what the user-defined types of its columns are made of, and the OID of the constraint that is its key, or of the
    index where there is no constraint."""

    file: str = ""
    width: int = 0
    types: Mapping[str, str] | None = None
    key: int | None = None


@dataclass(frozen=True)
class Shown:
    """What a publication shows of a table: its columns' numbers (None: all that are not generated) and a row filter.

    `named`: the table has an entry of its own, or is partitioned.
    """

    columns: frozenset[int] | None = None
    row_filter: str | None = None
    membership: int = 0
    generated: bool = False
    options: int = 0
    named: bool = False

    def shows(self, column: CatalogColumn) -> bool:
        if self.columns is not None:
            return column.number in self.columns
        return not column.generated or (self.generated and column.generated == "s")


_TABLES = """
SELECT c.oid::int8, n.nspname::text, c.relname::text, c.relreplident::text,
       coalesce(has_table_privilege(c.oid, 'SELECT') AND has_schema_privilege(n.oid, 'USAGE'), false),
       c.relkind = 'p', c.relispartition, c.xmin::text::int8, coalesce((
           SELECT max(i.indexrelid::int8) FROM pg_catalog.pg_index i
           WHERE i.indrelid = c.oid AND CASE c.relreplident WHEN 'i' THEN i.indisreplident ELSE i.indisprimary END), 0)
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p'
  AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname NOT LIKE 'pg\\_%%'
ORDER BY 2, 3
"""

COLUMN_FIELDS: Final = """
a.attnum::int4, a.attname::text, a.atttypid::int8, a.atttypmod, a.attnotnull,
coalesce(nullif(format_type(a.atttypid, a.atttypmod), '???'), t.typname::text), a.attgenerated::text,
m.missing, m.missing IS NULL AND (a.atthasdef OR a.attidentity <> '' OR t.typdefault IS NOT NULL), a.xmin::text::int8
"""
"""The fields of `CatalogColumn`, from `COLUMN_TABLES`."""

# The value of a type that was dropped since cannot be formatted.
_STORED = "CASE WHEN {0}.atthasmissing AND format_type({0}.atttypid, NULL) <> '???'" + (
    " THEN array_to_string({0}.attmissingval, '') END"
)

COLUMN_TABLES: Final = f"""
pg_catalog.pg_attribute a JOIN pg_catalog.pg_class c ON c.oid = a.attrelid
LEFT JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
CROSS JOIN LATERAL (
    -- Only heaps store the value: that of a partitioned table is the one its leaves agree on.
    SELECT CASE WHEN c.relkind <> 'p' THEN {_STORED.format("a")} ELSE (
        WITH RECURSIVE part AS (
            SELECT c.oid AS relid
          UNION ALL
            SELECT i.inhrelid FROM part JOIN pg_catalog.pg_inherits i ON i.inhparent = part.relid
        )
        SELECT CASE WHEN min(held.value) = max(held.value) THEN min(held.value) END
        FROM part JOIN pg_catalog.pg_attribute own ON own.attrelid = part.relid AND own.attname = a.attname
        CROSS JOIN LATERAL (SELECT {_STORED.format("own")}) AS held (value)
    ) END AS missing
) AS m
"""  # noqa: S608

_COLUMNS = f"""
SELECT a.attrelid::int8, {COLUMN_FIELDS} FROM {COLUMN_TABLES}
WHERE a.attrelid = ANY(%s) AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attrelid, a.attnum
"""  # noqa: S608

KEY_NUMBERS: Final = """
ARRAY(SELECT k.attnum::int4 FROM unnest(i.indkey[0:i.indnkeyatts - 1]) WITH ORDINALITY AS k(attnum, at) ORDER BY k.at)
"""
"""The columns of index `i`, without those it only includes."""

_KEYS = f"""
SELECT i.indrelid::int8, i.indisprimary, i.indisreplident, {KEY_NUMBERS}
FROM pg_catalog.pg_index i
WHERE i.indrelid = ANY(%s) AND (i.indisprimary OR i.indisreplident) AND i.indisvalid
  AND i.indimmediate -- under a deferrable key a row may take another's key before that one has left it
"""  # noqa: S608

STORAGE: Final = """
SELECT root.oid::int8 AS oid, files.file, root.relnatts::int4 AS width, parts.types, (
    -- REINDEX CONCURRENTLY makes another index of the same constraint.
    SELECT max(coalesce(con.oid, i.indexrelid)::int8) FROM pg_catalog.pg_index i
    LEFT JOIN pg_catalog.pg_constraint con ON con.conindid = i.indexrelid AND con.contype IN ('p', 'u')
      AND con.conrelid = root.oid -- there is an index on this one
    WHERE i.indrelid = root.oid AND i.indisvalid
      AND CASE root.relreplident WHEN 'i' THEN i.indisreplident ELSE i.indisprimary END
) AS key
FROM pg_catalog.pg_class root CROSS JOIN LATERAL (
    WITH RECURSIVE part AS (
        SELECT root.oid AS relid
      UNION ALL
        SELECT i.inhrelid FROM part JOIN pg_catalog.pg_inherits i ON i.inhparent = part.relid WHERE root.relkind = 'p'
    )
    SELECT md5(string_agg(heap.relfilenode::text, ' ' ORDER BY heap.oid)) AS file
    FROM part JOIN pg_catalog.pg_class heap ON heap.oid = part.relid AND heap.relkind = 'r'
) AS files CROSS JOIN LATERAL (
    WITH RECURSIVE used AS (
        SELECT a.atttypid AS type FROM pg_catalog.pg_attribute a
        WHERE a.attrelid = root.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.atttypid >= 16384
      UNION
        SELECT next.type FROM used JOIN pg_catalog.pg_type t ON t.oid = used.type CROSS JOIN LATERAL (
            SELECT t.typelem
          UNION ALL
            SELECT t.typbasetype
          UNION ALL
            SELECT r.rngsubtype FROM pg_catalog.pg_range r WHERE t.oid IN (r.rngtypid, r.rngmultitypid)
          UNION ALL
            SELECT f.atttypid FROM pg_catalog.pg_attribute f
            WHERE t.typtype = 'c' AND f.attrelid = t.typrelid AND f.attnum > 0 AND NOT f.attisdropped
        ) AS next (type) WHERE next.type >= 16384
    )
    SELECT jsonb_object_agg(piece.name, piece.value) AS types FROM used CROSS JOIN LATERAL (
        SELECT 'enum ' || e.oid, e.enumlabel::text FROM pg_catalog.pg_enum e WHERE e.enumtypid = used.type
      UNION ALL
        SELECT 'field ' || f.attrelid || ' ' || f.attnum, f.atttypid || ' ' || f.atttypmod
        FROM pg_catalog.pg_type t JOIN pg_catalog.pg_attribute f ON f.attrelid = t.typrelid
        WHERE t.oid = used.type AND t.typtype = 'c' AND f.attnum > 0 AND NOT f.attisdropped
    ) AS piece (name, value)
) AS parts
"""
"""The fields of `Storage`, by table; `root` is the table."""

# The rules of pg_get_publication_tables(), which even under an older snapshot shows the current publication.
_PUBLISHED = """
WITH RECURSIVE pub AS (
    SELECT p.oid, p.puballtables, p.pubviaroot, {generated} AS generated, p.xmin::text::int8 AS options
    FROM pg_publication p WHERE p.pubname = %s
), listed AS (
    SELECT r.prrelid AS relid FROM pg_publication_rel r JOIN pub ON pub.oid = r.prpubid
  UNION
    SELECT c.oid FROM pg_class c CROSS JOIN pub
    WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND c.oid >= 16384 AND (pub.puballtables OR {by_schema})
), tree AS (
    SELECT relid AS top, relid FROM listed
  UNION
    SELECT tree.top, i.inhrelid FROM tree JOIN pg_inherits i ON i.inhparent = tree.relid
    JOIN pg_class c ON c.oid = i.inhrelid WHERE c.relispartition
), placed AS (
    SELECT tree.relid, max(r.oid) AS entry, bool_or(tree.top <> tree.relid) AS is_below
    FROM tree CROSS JOIN pub LEFT JOIN pg_publication_rel r ON r.prpubid = pub.oid AND r.prrelid = tree.top
    GROUP BY tree.relid
)
SELECT n.nspname::text, c.relname::text, {columns}, {row_filter},
    coalesce({schema_entry}, r.oid, placed.entry, pub.oid)::int8, pub.generated, pub.options,
    r.oid IS NOT NULL OR c.relkind = 'p'
FROM placed JOIN pg_class c ON c.oid = placed.relid JOIN pg_namespace n ON n.oid = c.relnamespace CROSS JOIN pub
LEFT JOIN pg_publication_rel r ON r.prpubid = pub.oid AND r.prrelid = c.oid
WHERE CASE WHEN pub.pubviaroot THEN NOT placed.is_below ELSE c.relkind = 'r' END
"""


def list_tables(session: PgConnection) -> list[CatalogRelation]:
    """Every permanent table of the database, without system tables."""
    return [
        CatalogRelation(oid, TableName(schema, name), *rest)
        for oid, schema, name, *rest in session.execute(_TABLES).fetchall()
    ]


def sum_column_marks(session: PgConnection, oids: Sequence[int]) -> int:
    """A number that changes with every change of a column of these tables."""
    row = session.execute(
        "SELECT coalesce(sum(a.xmin::text::int8 * a.attnum), 0)::text FROM pg_catalog.pg_attribute a"
        " WHERE a.attrelid = ANY(%s) AND a.attnum > 0",
        [list(oids)],
    ).fetchone()
    assert row is not None
    return int(row[0])


def list_published(session: PgConnection, publication: str) -> dict[TableName, Shown]:
    """The tables in a publication, partitions under the name they are published by."""
    version = session.info.server_version
    schema_entry = (
        "SELECT s.oid FROM pg_publication_namespace s WHERE s.pnpubid = pub.oid AND s.pnnspid = c.relnamespace"
    )
    lists = version >= 150000
    # If its whole schema is published too, the row filter and column list of a table's own entry do not apply.
    own = f"NOT EXISTS ({schema_entry})"
    query = _PUBLISHED.format(
        generated="p.pubgencols = 's'" if version >= 180000 else "false",
        by_schema=f"EXISTS ({schema_entry})" if lists else "false",
        schema_entry=f"({schema_entry})" if lists else "NULL::oid",
        columns=f"CASE WHEN {own} THEN string_to_array(r.prattrs::text, ' ')::int4[] END" if lists else "NULL::int4[]",
        row_filter=f"CASE WHEN {own} THEN pg_get_expr(r.prqual, r.prrelid) END" if lists else "NULL::text",
    )
    return {
        TableName(schema, name): Shown(frozenset(columns) if columns is not None else None, *rest)
        for schema, name, columns, *rest in session.execute(query, [publication]).fetchall()
    }


def describe(
    session: PgConnection, relations: Iterable[CatalogRelation], shown: Mapping[TableName, Shown]
) -> list[Published]:
    """The tables with their columns as the stream will carry them. The session has the settings of `SESSION`."""
    wanted = {relation.oid: relation for relation in relations}
    oids = list(wanted)
    columns: dict[int, list[CatalogColumn]] = {oid: [] for oid in oids}
    for oid, *fields in session.execute(_COLUMNS, [oids]).fetchall():
        columns[oid].append(CatalogColumn(*fields))
    keys = dict.fromkeys(oids, Keys())
    for oid, primary, identity, numbers in session.execute(_KEYS, [oids]).fetchall():
        if primary:
            keys[oid] = keys[oid]._replace(primary=numbers)
        if identity:
            keys[oid] = keys[oid]._replace(identity=numbers)
    storage = {oid: Storage(*rest) for oid, *rest in session.execute(f"{STORAGE} WHERE root.oid = ANY(%s)", [oids])}
    types = read_types(session, (column.type_oid for listed in columns.values() for column in listed))
    return [
        build(relation, columns[oid], keys[oid], shown.get(relation.table, Shown()), types, storage.get(oid, Storage()))
        for oid, relation in wanted.items()
    ]


def build(
    relation: CatalogRelation,
    columns: Sequence[CatalogColumn],
    keys: Keys,
    shown: Shown,
    types: Mapping[int, CatalogType],
    storage: Storage,
) -> Published:
    """Build a table from its catalog rows. A type that is not in `types` was dropped since and is kept as text."""
    kept = [column for column in columns if shown.shows(column)]
    numbers = (keys.identity if relation.identity == "i" else keys.primary) or []
    names = {column.number: column.name for column in kept}
    # A key that is not published in full identifies nothing.
    key = tuple(names[number] for number in numbers) if all(number in names for number in numbers) else ()
    built = [_build_column(column, types) for column in kept]
    fingerprint = Fingerprint(
        storage.file,
        storage.width,
        {column.number: column.mark for column in kept},
        storage.types or {},
        storage.key or 0,
    )
    return Published(
        TableSchema(relation.table, tuple(built), key, upstream_id=str(relation.oid), fingerprint=str(fingerprint)),
        relation.identity,
        shown.row_filter,
        relation.can_select,
        shown.membership,
        shown.options,
        frozenset(
            raw.number
            for raw, column in zip(kept, built, strict=True)
            if raw.defaulted or (raw.missing is not None and column.initial is None)
        ),
        shown.named,
    )


def _build_column(raw: CatalogColumn, types: Mapping[int, CatalogType]) -> Column:
    type_ = types[raw.type_oid].arrow(raw.typmod) if raw.type_oid in types else pa.string()
    return Column(raw.name, type_, not raw.required, raw.declared, raw.number, _initial(raw.missing, type_))


def _initial(missing: str | None, type_: pa.DataType) -> pa.Scalar[Any] | None:
    """The value parsed from its text; None if the type cannot hold it, such as infinity."""
    if missing is None:
        return None
    value = text.parse(pa.array([missing], pa.string()), type_).array[0]
    return value if value.is_valid else None
