"""Random DDL and rows, for tables that change while they are followed."""

from __future__ import annotations

import random
from typing import Any

import psycopg

TABLES = ("one", "two", "bag")


class Changer:
    """Random rows and random DDL, together in one transaction now and then.

    Without the event trigger the log shows a change only with the next row, and not at all what a rewrite did to rows.
    """

    def __init__(self, connection: psycopg.Connection[Any], chance: random.Random, *, trigger: bool) -> None:
        self.connection = connection
        self.chance = chance
        self.trigger = trigger
        self.count = 0
        self.made = 0
        for table in TABLES:
            key = "" if table == "bag" else " PRIMARY KEY"
            connection.execute(f"CREATE TABLE {table} (id int{key}, a text, n int)")
            connection.execute(f"ALTER TABLE {table} REPLICA IDENTITY {'FULL' if not key else 'DEFAULT'}")
            connection.execute(f"INSERT INTO {table} SELECT i, 'v' || i, i FROM generate_series(1, 400) i")

    def names(self) -> list[str]:
        return list(TABLES) + [f"later{number}" for number in range(self.made)]

    def columns(self, table: str) -> dict[str, str]:
        rows = self.connection.execute(
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute"
            " WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped AND attname <> 'id' ORDER BY attnum",
            [table],
        )
        return dict(rows.fetchall())

    def transaction(self) -> None:
        with self.connection.transaction(force_rollback=self.chance.random() < 0.1):
            for _ in range(self.chance.randint(1, 5)):
                table = self.chance.choice(list(TABLES))
                if self.chance.random() < 0.2:
                    self.alter(table)
                else:
                    self.write(table)

    def write(self, table: str) -> None:
        columns = self.columns(table)
        key = self.chance.randint(1, 500)
        values = {name: self.value(kind) for name, kind in columns.items() if self.chance.random() < 0.7}
        if self.chance.random() < 0.4:
            names = ", ".join(["id", *values])
            marks = ", ".join(["%s"] * (len(values) + 1))
            conflict = "" if table == "bag" else " ON CONFLICT DO NOTHING"
            self.connection.execute(
                f"INSERT INTO {table} ({names}) VALUES ({marks}){conflict}", [key, *values.values()]
            )
        elif values and self.chance.random() < 0.7:
            sets = ", ".join(f"{name} = %s" for name in values)
            self.connection.execute(f"UPDATE {table} SET {sets} WHERE id %% 50 = %s", [*values.values(), key % 50])
        elif self.chance.random() < 0.3:
            self.connection.execute(f"UPDATE {table} SET id = id + 1000 WHERE id = %s", [key])
        else:
            self.connection.execute(f"DELETE FROM {table} WHERE id %% 80 = %s", [key % 80])

    def value(self, kind: str) -> object:
        if kind == "text":
            return None if self.chance.random() < 0.2 else f"t{self.chance.randint(0, 99)}"
        return self.chance.randint(0, 9999)

    def alter(self, table: str) -> None:
        columns = self.columns(table)
        self.count += 1
        new, run = f"c{self.count}", self.connection.execute
        old = self.chance.choice(list(columns)) if columns else None
        match self.chance.randint(0, 9):
            case 0 | 1:
                run(f"ALTER TABLE {table} ADD COLUMN {new} {self.chance.choice(['text', 'int', 'numeric(8,2)'])}")
            case 2:
                run(f"ALTER TABLE {table} ADD COLUMN {new} int NOT NULL DEFAULT {self.count}")
            case 3 if old and len(columns) > 1:
                run(f"ALTER TABLE {table} DROP COLUMN {old}")
            case 4 if old:
                run(f"ALTER TABLE {table} RENAME COLUMN {old} TO {new}")
            case 5 if old and columns[old] == "integer":
                run(f"ALTER TABLE {table} ALTER COLUMN {old} TYPE bigint")
            case 6 if old and self.trigger and columns[old] == "integer":
                run(f"ALTER TABLE {table} ALTER COLUMN {old} TYPE int USING {old} + 1")
            case 7 if old and self.trigger:
                run(f"ALTER TABLE {table} DROP COLUMN {old}")
                run(f"ALTER TABLE {table} ADD COLUMN {old} {columns[old]}")
            case 8 if self.trigger:
                run(f"ALTER TABLE {table} ADD COLUMN {new} float8 DEFAULT random()")
            case 9 if self.made < 2 and self.trigger:
                run(f"CREATE TABLE later{self.made} (id int PRIMARY KEY, v text)")
                run(f"INSERT INTO later{self.made} SELECT i, 'x' FROM generate_series(1, 50) i")
                self.made += 1
            case _ if old and columns[old] != "bigint":
                run(f"ALTER TABLE {table} ALTER COLUMN {old} DROP NOT NULL")

    def touch_all(self) -> None:
        """A row of every table, so that its last shape is seen."""
        for table in TABLES:
            self.connection.execute(f"INSERT INTO {table} (id) VALUES (-1)")
