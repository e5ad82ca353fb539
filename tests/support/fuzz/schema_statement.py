"""Random statements that change tables, their keys, their names, their partitions and what is published of them."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.support.fuzz.row_statement import literal
from tests.support.fuzz.upstream_state import UpstreamColumn, UpstreamTable

Statements = list[str] | None

ALL_ACTIONS = "insert,update,delete,truncate"

ADDED = (
    *("int", "bigint", "text", "varchar(20)", "numeric(8,2)", "numeric", "timestamp", "timestamptz", "date", "real"),
    *("double precision", "boolean", "jsonb"),
)
VOLATILE = {
    "int": "(random() * 1000)::int",
    "bigint": "(random() * 1000)::bigint",
    "double precision": "random()",
    "timestamptz": "clock_timestamp()",
    "text": "gen_random_uuid()::text",
}
TYPES = {
    "smallint": ("integer", "bigint", "text", "real"),
    "integer": ("bigint", "smallint", "real", "double precision", "numeric", "numeric(10,2)", "text", "varchar(20)"),
    "bigint": ("integer", "double precision", "numeric", "text", "smallint"),
    "real": ("integer", "double precision", "numeric", "text"),
    "double precision": ("real", "integer", "numeric(10,2)", "text", "bigint"),
    "numeric": ("numeric(5,1)", "numeric", "numeric(12,4)", "integer", "double precision", "text", "numeric(10,2)"),
    "text": ("varchar(20)", "varchar(200)", "char(5)"),
    "character varying": ("text", "varchar(5)", "varchar(50)"),
    "character": ("text", "char(9)"),
    "timestamp without time zone": ("date", "timestamptz", "text", "timestamp(0)", "timestamp"),
    "timestamp with time zone": ("timestamp", "date", "timestamptz(0)", "text"),
    "date": ("timestamp", "timestamptz", "text"),
    "boolean": ("text",),
    "json": ("jsonb",),
    "jsonb": ("json",),
}
DETOURS = {
    "integer": (("real", "integer"), ("text", "integer"), ("bigint", "integer"), ("smallint", "integer")),
    "bigint": (("double precision", "bigint"),),
    "numeric": (("numeric(5,1)", "numeric"), ("integer", "numeric")),
    "timestamp without time zone": (("date", "timestamp"), ("timestamptz", "timestamp"), ("timestamp(0)", "timestamp")),
    "timestamp with time zone": (("timestamp", "timestamptz"), ("date", "timestamptz")),
    "text": (("varchar(5)", "text"), ("char(9)", "text")),
    "jsonb": (("json", "jsonb"),),
}
SAME = {"integer": "{} + 1", "bigint": "{} + 1", "text": "upper({})", "date": "{} + 1", "numeric": "{} + 0.5"}


class SchemaStatements:
    """DDL for the tables that there are. `made` counts names, so that each is new."""

    def __init__(self, chance: random.Random, publication: str) -> None:
        self.chance = chance
        self.publication = f"ALTER PUBLICATION {publication}"
        self.made = 0

    def make(self, tables: list[UpstreamTable]) -> Statements:
        """Statements that belong together; None when none of this kind fits."""
        kind = self.chance.choice(self.kinds())
        table = self.chance.choice(tables)
        return kind(table, tables)

    def new_name(self, prefix: str = "c") -> str:
        self.made += 1
        return f"{prefix}{self.made}"

    def kinds(self) -> list[Callable[[UpstreamTable, list[UpstreamTable]], Statements]]:
        frequent = [self._add, self._add_default, self._add_default, self._alter_type, self._alter_type, self._detour]
        return [
            *frequent * 2,
            *[self._drop_column, self._rename_column, self._default, self._using, self._swap_columns, self._readd] * 2,
            *[self._nullability, self._view_rename, self._generated, self._drop_expression, self._key, self._identity],
            *[self._drop_identity_index, self._rename_table, self._swap_tables, self._set_schema, self._create],
            *[self._drop_table, self._partition, self._membership, self._actions, self._column_list, self._recreate],
            *[self._key_again, self._unlogged],
        ]

    def _column(self, table: UpstreamTable, *, plain: bool = True) -> UpstreamColumn | None:
        found = [column for column in (table.plain if plain else table.columns) if not column.generated]
        return self.chance.choice(found) if found else None

    # -- columns ------------------------------------------------------------------------------------------

    def _add(self, table: UpstreamTable, tables: list[UpstreamTable]) -> Statements:
        kinds = [self.chance.choice(ADDED) for _ in range(self.chance.choice([1, 1, 2]))]
        added = ", ".join(f"ADD COLUMN {self.new_name()} {kind}" for kind in kinds)
        return [f"ALTER TABLE {table.place} {added}"]

    def _add_default(self, table: UpstreamTable, tables: list[UpstreamTable]) -> Statements:
        statements: list[str] = []
        for _ in range(self.chance.choice([1, 1, 2])):
            kind, name = self.chance.choice(ADDED), self.new_name()
            value = literal(kind.replace("int", "integer") if kind == "int" else kind, self.chance)
            if self.chance.random() < 0.2 and kind in VOLATILE:
                value = VOLATILE[kind]
            required = self.chance.choice(["", "", " NOT NULL"])
            statements.append(f"ALTER TABLE {table.place} ADD COLUMN {name} {kind}{required} DEFAULT {value}")
            if self.chance.random() < 0.4:
                statements.append(f"ALTER TABLE {table.place} ALTER COLUMN {name} DROP DEFAULT")
        if self.chance.random() < 0.1:
            statements.append(f"ALTER TABLE {table.place} ADD COLUMN {self.new_name()} serial")
        return statements

    def _default(self, table: UpstreamTable, tables: list[UpstreamTable]) -> Statements:
        column = self._column(table)
        if column is None:
            return None
        how = "DROP DEFAULT" if column.defaulted else f"SET DEFAULT {literal(column.kind, self.chance)}"
        return [f"ALTER TABLE {table.place} ALTER COLUMN {column.name} {how}"]

    def _drop_column(self, table: UpstreamTable, tables: list[UpstreamTable]) -> Statements:
        column = self._column(table, plain=self.chance.random() < 0.9)
        if column is None or len(table.columns) < 3:
            return None
        return [f"ALTER TABLE {table.place} DROP COLUMN {column.name} CASCADE"]

    def _readd(self, table: UpstreamTable, tables: list[UpstreamTable]) -> Statements:
        column = self._column(table)
        if column is None:
            return None
        value = f" DEFAULT {literal(column.kind, self.chance)}" if self.chance.random() < 0.5 else ""
        return [
            f"ALTER TABLE {table.place} DROP COLUMN {column.name} CASCADE",
            f"ALTER TABLE {table.place} ADD COLUMN {column.name} {column.kind}{value}",
        ]

    def _rename_column(self, table: UpstreamTable, tables: list[UpstreamTable]) -> Statements:
        column = self._column(table, plain=self.chance.random() < 0.7)
        return [f"ALTER TABLE {table.place} RENAME COLUMN {column.name} TO {self.new_name()}"] if column else None

    def _view_rename(self, table: UpstreamTable, tables: list[UpstreamTable]) -> Statements:
        column = self._column(table)
        return [f"ALTER VIEW {table.place} RENAME COLUMN {column.name} TO {self.new_name()}"] if column else None

    def _swap_columns(self, table: UpstreamTable, tables: list[UpstreamTable]) -> Statements:
        if len(table.plain) < 2:
            return None
        one, other = self.chance.sample(table.plain, 2)
        spare = self.new_name("w")
        return [
            f"ALTER TABLE {table.place} RENAME COLUMN {one.name} TO {spare}",
            f"ALTER TABLE {table.place} RENAME COLUMN {other.name} TO {one.name}",
            f"ALTER TABLE {table.place} RENAME COLUMN {spare} TO {other.name}",
        ]

    def _nullability(self, table: UpstreamTable, tables: list[UpstreamTable]) -> Statements:
        column = self._column(table)
        if column is None:
            return None
        how = "DROP NOT NULL" if column.required else "SET NOT NULL"
        return [f"ALTER TABLE {table.place} ALTER COLUMN {column.name} {how}"]

    def _alter_type(self, table: UpstreamTable, tables: list[UpstreamTable]) -> Statements:
        column = self._column(table, plain=self.chance.random() < 0.85)
        if column is None or (kinds := TYPES.get(_base(column.kind))) is None:
            return None
        drop = [f"ALTER TABLE {table.place} ALTER COLUMN {column.name} DROP DEFAULT"] if column.defaulted else []
        return [*drop, f"ALTER TABLE {table.place} ALTER COLUMN {column.name} TYPE {self.chance.choice(kinds)}"]

    def _detour(self, table: UpstreamTable, tables: list[UpstreamTable]) -> Statements:
        column = self._column(table, plain=self.chance.random() < 0.9)
        if column is None or (ways := DETOURS.get(_base(column.kind))) is None:
            return None
        statements = [f"ALTER TABLE {table.place} ALTER COLUMN {column.name} DROP DEFAULT"] if column.defaulted else []
        for kind in self.chance.choice(ways):
            using = f" USING {column.name}::{kind}" if kind == "integer" else ""
            statements.append(f"ALTER TABLE {table.place} ALTER COLUMN {column.name} TYPE {kind}{using}")
        return statements

    def _using(self, table: UpstreamTable, tables: list[UpstreamTable]) -> Statements:
        column = self._column(table)
        if column is None or column.defaulted or _base(column.kind) not in SAME:
            return None
        value = SAME[_base(column.kind)].format(column.name)
        return [f"ALTER TABLE {table.place} ALTER COLUMN {column.name} TYPE {column.kind} USING {value}"]

    def _generated(self, table: UpstreamTable, tables: list[UpstreamTable]) -> Statements:
        column = next((one for one in table.columns if one.kind == "integer" and not one.generated), None)
        if column is None:
            return None
        clause = f"int GENERATED ALWAYS AS ({column.name} * 2) STORED"
        return [f"ALTER TABLE {table.place} ADD COLUMN {self.new_name('g')} {clause}"]

    def _drop_expression(self, table: UpstreamTable, tables: list[UpstreamTable]) -> Statements:
        column = next((one for one in table.columns if one.generated), None)
        return [f"ALTER TABLE {table.place} ALTER COLUMN {column.name} DROP EXPRESSION"] if column else None

    # -- keys ---------------------------------------------------------------------------------------------

    def _key(self, table: UpstreamTable, tables: list[UpstreamTable]) -> Statements:
        if table.constraint and self.chance.random() < 0.6:
            drop = f"ALTER TABLE {table.place} DROP CONSTRAINT {table.constraint}"
            if self.chance.random() < 0.5:
                return [drop, f"ALTER TABLE {table.place} REPLICA IDENTITY {self.chance.choice(['FULL', 'DEFAULT'])}"]
            columns = self.chance.sample(table.written, min(len(table.written), self.chance.choice([1, 2])))
            return [f"{drop}, ADD PRIMARY KEY ({', '.join(column.name for column in columns)})"]
        column = self._column(table, plain=False)
        return [f"ALTER TABLE {table.place} ADD PRIMARY KEY ({column.name})"] if column and not table.key else None

    def _key_again(self, table: UpstreamTable, tables: list[UpstreamTable]) -> Statements:
        """A time without a key, in which two rows share it."""
        if table.kind != "table" or not table.constraint or len(table.key) != 1:
            return None
        key = table.key[0]
        others = ", ".join(column.name for column in table.written if column.name != key)
        place, shared = table.place, f"(SELECT min({key}) FROM {table.place})"
        copied = f"INSERT INTO {place} ({key}, {others}) SELECT {key}, {others} FROM {place} WHERE {key} = {shared}"
        return [
            f"ALTER TABLE {place} REPLICA IDENTITY FULL",
            f"ALTER TABLE {place} DROP CONSTRAINT {table.constraint}",
            *([copied] if others else []),
            f"DELETE FROM {place} WHERE {key} = {shared}",
            f"ALTER TABLE {place} ADD PRIMARY KEY ({key})",
            *([f"ALTER TABLE {place} REPLICA IDENTITY DEFAULT"] if self.chance.random() < 0.5 else []),
        ]

    def _unlogged(self, table: UpstreamTable, tables: list[UpstreamTable]) -> Statements:
        """Postgres refuses it for tables that the publication names, so it is done to partitions."""
        if table.kind != "leaf":
            return None
        return [
            f"ALTER TABLE {table.place} SET UNLOGGED",
            f"DELETE FROM {table.place} WHERE true",
            f"ALTER TABLE {table.place} SET LOGGED",
        ]

    def _identity(self, table: UpstreamTable, tables: list[UpstreamTable]) -> Statements:
        if table.kind != "table":
            # Old rows are sent by the identity of the leaf: one that lacks the root's key stops the root, and says so.
            return [f"ALTER TABLE {table.place} REPLICA IDENTITY {self.chance.choice(['FULL', 'DEFAULT'])}"]
        if table.unique and self.chance.random() < 0.6:
            return [f"ALTER TABLE {table.place} REPLICA IDENTITY USING INDEX {self.chance.choice(table.unique)}"]
        if self.chance.random() < 0.5:
            column = self.chance.choice(table.columns)
            index = self.new_name("x")
            return [
                f"ALTER TABLE {table.place} ALTER COLUMN {column.name} SET NOT NULL",
                f"CREATE UNIQUE INDEX {index} ON {table.place} ({column.name})",
                f"ALTER TABLE {table.place} REPLICA IDENTITY USING INDEX {index}",
            ]
        return [f"ALTER TABLE {table.place} REPLICA IDENTITY {self.chance.choice(['FULL', 'DEFAULT', 'NOTHING'])}"]

    def _drop_identity_index(self, table: UpstreamTable, tables: list[UpstreamTable]) -> Statements:
        found = next((one for one in tables if one.identity_index), None)
        if found is None or found.kind != "table":
            return None
        return [f"DROP INDEX {found.schema}.{found.identity_index}"]

    # -- tables -------------------------------------------------------------------------------------------

    def _rename_table(self, table: UpstreamTable, tables: list[UpstreamTable]) -> Statements:
        prefix = "leaf" if table.kind == "leaf" else "t"
        return [f"ALTER TABLE {table.place} RENAME TO {self.new_name(prefix)}"]

    def _swap_tables(self, table: UpstreamTable, tables: list[UpstreamTable]) -> Statements:
        alike = [one for one in tables if one.schema == "app" and one.kind == "table"]
        if len(alike) < 2:
            return None
        one, other = self.chance.sample(alike, 2)
        spare = self.new_name("w")
        return [
            f"ALTER TABLE {one.place} RENAME TO {spare}",
            f"ALTER TABLE {other.place} RENAME TO {one.name}",
            f"ALTER TABLE {spare} RENAME TO {other.name}",
        ]

    def _set_schema(self, table: UpstreamTable, tables: list[UpstreamTable]) -> Statements:
        to = "other" if table.schema == "app" else "app"
        return [f"ALTER TABLE {table.place} SET SCHEMA {to}"] if table.kind == "table" else None

    def _create(self, table: UpstreamTable, tables: list[UpstreamTable]) -> Statements:
        name = self.new_name("t")
        if self.chance.random() < 0.3:
            return [f"CREATE TABLE {name} AS SELECT * FROM {table.place}"]
        return [
            f"CREATE TABLE {name} (id int PRIMARY KEY, a text, n int)",
            f"INSERT INTO {name} SELECT i, 'v' || i, i FROM generate_series(1, 3) i",
        ]

    def _drop_table(self, table: UpstreamTable, tables: list[UpstreamTable]) -> Statements:
        return [f"DROP TABLE {table.place}"] if self.chance.random() < 0.5 else None

    def _recreate(self, table: UpstreamTable, tables: list[UpstreamTable]) -> Statements:
        if table.kind != "table" or self.chance.random() < 0.5:
            return None
        return [
            f"DROP TABLE {table.place}",
            f"CREATE TABLE {table.place} (id int PRIMARY KEY, n bigint)",
            f"INSERT INTO {table.place} VALUES (1, 1)",
        ]

    def _partition(self, table: UpstreamTable, tables: list[UpstreamTable]) -> Statements:
        leaves = [one for one in tables if one.kind == "leaf"]
        roots = [one for one in tables if one.kind == "root"]
        if not roots:
            return None
        root = self.chance.choice(roots)
        low = self.chance.choice([200, 300, 400, 500])
        bounds = f"FOR VALUES FROM ({low}) TO ({low + 100})"
        name = self.new_name("leaf")
        made = [f"CREATE TABLE {name} PARTITION OF {root.place} {bounds}"]
        if not leaves or self.chance.random() < 0.2:
            return made
        leaf = self.chance.choice(leaves)
        match self.chance.randint(0, 4):
            case 0:
                return [f"ALTER TABLE {leaf.parent} DETACH PARTITION {leaf.place}"]
            case 1:
                return [f"TRUNCATE {leaf.place}"]
            case 2:
                return [f"DROP TABLE {leaf.place}"]
            case 3:
                key = root.key[0] if root.key else root.columns[0].name
                return [
                    f"CREATE TABLE {name} (LIKE {root.place} INCLUDING ALL)",
                    f"INSERT INTO {name} ({key}) VALUES ({low + 1})",
                    f"ALTER TABLE {root.place} ATTACH PARTITION {name} {bounds}",
                ]
            case _:
                return [
                    f"ALTER TABLE {leaf.parent} DETACH PARTITION {leaf.place}",
                    f"ALTER TABLE {leaf.parent} ATTACH PARTITION {leaf.place} FOR VALUES FROM (600) TO (700)",
                ]

    # -- the publication ----------------------------------------------------------------------------------

    def _membership(self, table: UpstreamTable, tables: list[UpstreamTable]) -> Statements:
        if table.kind == "leaf" or table.schema != "app":
            return None
        if not table.is_published:
            return [f"{self.publication} ADD TABLE {table.place}"]
        remove = f"{self.publication} DROP TABLE {table.place}"
        return [remove] if self.chance.random() < 0.5 else [remove, f"{self.publication} ADD TABLE {table.place}"]

    def _actions(self, table: UpstreamTable, tables: list[UpstreamTable]) -> Statements:
        every = f"{self.publication} SET (publish = '{ALL_ACTIONS}')"
        if self.chance.random() < 0.3:
            return [every]
        less = self.chance.choice(["insert,update", "insert", "update,delete", "insert,update,delete"])
        statements = [f"{self.publication} SET (publish = '{less}')"]
        if table.columns and self.chance.random() < 0.7:
            statements.append(f"DELETE FROM {table.place} WHERE true")
        if self.chance.random() < 0.5:
            statements.append(every)
        return statements

    def _column_list(self, table: UpstreamTable, tables: list[UpstreamTable]) -> Statements:
        if not table.is_published or table.kind == "leaf":
            return None
        names = [c.name for c in table.written if c.name in table.key or self.chance.random() < 0.6]
        if not names:
            return None
        return [
            f"{self.publication} DROP TABLE {table.place}",
            f"{self.publication} ADD TABLE {table.place} ({', '.join(names)})",
        ]


def _base(kind: str) -> str:
    return kind.split("(")[0] if not kind.startswith("timestamp(") else kind.replace(kind[9 : kind.index(")") + 1], "")
