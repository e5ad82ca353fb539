"""Applications that write a file: through Turso, through apsw with a captured connection, or with triggers."""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import apsw
import turso

from tailrace.capture import capture, enable
from tailrace.option.table import TableOptions
from tailrace.source.sqlite.source import SqliteSource
from tailrace.testing.replay import MemoryTable
from tests.support.source_making import make_sqlite

Kind = Literal["turso", "hook", "trigger"]
KINDS: tuple[Kind, ...] = ("turso", "hook", "trigger")

Contents = dict[str, tuple[list[str], Counter[tuple[Any, ...]]]]


class Application:
    """One connection that writes a file whose changes are captured; in autocommit mode until `BEGIN`."""

    def __init__(self, path: Path, kind: Kind, mode: str = "full") -> None:
        self.path = path
        self.kind = kind
        self.mode = mode
        self.connection: Any
        match kind:
            case "turso":
                self.connection = turso.connect(
                    str(path), experimental_features="multiprocess_wal", isolation_level=None
                )
            case "hook":
                self.connection = apsw.Connection(str(path))
            case "trigger":
                self.connection = sqlite3.connect(path, isolation_level=None)
        self.run("PRAGMA journal_mode = WAL")

    def capture(self) -> None:
        """Begin to capture; for triggers also: bring them up to date with the schema."""
        match self.kind:
            case "turso":
                self.run(f"PRAGMA capture_data_changes_conn('{self.mode}')")
            case "hook":
                capture(self.connection, self.mode)
            case "trigger":
                enable(self.connection, self.mode)

    def run(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        return list(self.connection.execute(sql, values).fetchall())

    def value(self, sql: str, *values: Any) -> Any:
        return self.run(sql, *values)[0][0]

    def columns(self, table: str) -> list[str]:
        return [row[1] for row in self.run(f'PRAGMA table_info("{table}")')]

    def tables(self) -> list[str]:
        own = ("turso_cdc", "sqlite_", "tailrace_", "__turso")
        rows = self.run("SELECT name FROM sqlite_schema WHERE type = 'table'")
        return [name for (name,) in rows if not name.startswith(own)]

    def contents(self) -> Contents:
        """What a destination should hold of every table: its columns and its rows."""
        found: Contents = {}
        for table in self.tables():
            names = self.columns(table)
            keyed = any(row[5] for row in self.run(f'PRAGMA table_info("{table}")'))
            shown = [*([] if keyed else ["_rowid"]), *names]
            chosen = ", ".join([*([] if keyed else ["rowid"]), *(f'"{name}"' for name in names)])
            rows = self.run(f'SELECT {chosen} FROM "{table}"')
            found[f"main.{table}"] = (shown, Counter(tuple(row) for row in rows))
        return found

    def close(self) -> None:
        self.connection.close()


def make_source(application: Application, folder: Path, **options: Any) -> SqliteSource:
    tables = options.pop("tables", TableOptions(include=["main.*"]))
    given = {"type": "turso" if application.kind == "turso" else "sqlite", "chunk_rows": 50}
    return make_sqlite(application.path, folder, tables, **{**given, **options})


def held(tables: dict[str, MemoryTable]) -> Contents:
    """The same of what a replay's destination holds."""
    return {
        name: ([column.name for column in table.schema.columns], table.contents()) for name, table in tables.items()
    }


def differences(lake: Contents, source: Contents) -> dict[str, Any]:
    """What differs of the tables the source has; a table that was dropped stays in the lake as it was."""
    found: dict[str, Any] = {}
    for name, (columns, rows) in source.items():
        if name not in lake:
            found[name] = "missing"
            continue
        shown, kept = lake[name]
        if shown != columns:
            found[name] = (shown, columns)
        elif kept != rows:
            found[name] = (list((kept - rows).items())[:3], list((rows - kept).items())[:3])
    return found


TABLES = (
    "CREATE TABLE plain (id INTEGER PRIMARY KEY, a TEXT, n INTEGER)",
    "CREATE TABLE word (w TEXT NOT NULL PRIMARY KEY, a TEXT, n INTEGER)",
    "CREATE TABLE pair (p TEXT NOT NULL, q INTEGER NOT NULL, a REAL, b BLOB, PRIMARY KEY (p, q))",
    "CREATE TABLE bag (a TEXT, n INTEGER)",
)


class Traffic:
    """Random transactions on the tables above, and random DDL."""

    def __init__(self, application: Application, chance: random.Random, *, ddl: bool = True) -> None:
        self.application = application
        self.chance = chance
        self.ddl = ddl
        self.made = 0
        self.run = application.run

    def load(self, rows: int) -> None:
        for sql in TABLES:
            self.run(sql)
        for i in range(rows):
            self.run("INSERT INTO plain VALUES (?, ?, ?)", i, f"v{i}", i)
            self.run("INSERT INTO word VALUES (?, ?, ?)", f"w{i}", "v", i)
            self.run("INSERT INTO pair VALUES (?, ?, ?, ?)", f"p{i % 7}", i, i * 1.5, b"\x00\xff")
            self.run("INSERT INTO bag VALUES (?, ?)", f"b{i % 10}", i)

    def transaction(self) -> None:
        self.run("BEGIN")
        for _ in range(self.chance.randint(1, 5)):
            self.statement()
        self.run("ROLLBACK" if self.chance.random() < 0.15 else "COMMIT")
        if self.ddl and self.chance.random() < 0.25:
            self.alter()

    def statement(self) -> None:
        chance, k = self.chance, self.chance.randint(0, 150)
        actions: Sequence[Callable[[], object]] = [
            lambda: self.insert("plain", id=k),
            lambda: self.insert("word", w=f"w{k}"),
            lambda: self.insert("pair", p=f"p{k % 7}", q=k),
            lambda: self.insert("bag"),
            lambda: self.run("DELETE FROM plain WHERE id BETWEEN ? AND ?", k, k + 5),
            lambda: self.run("DELETE FROM word WHERE w = ?", f"w{k}"),
            lambda: self.run("DELETE FROM bag WHERE rowid % 11 = ?", k % 11),
            lambda: self.update("plain", "id BETWEEN ? AND ?", k, k + 9),
            lambda: self.update("word", "w > ?", f"w{k}"),
            lambda: self.update("pair", "q > ?", k),
            lambda: self.update("bag", "rowid = ?", k),
            lambda: self.run("UPDATE plain SET id = ? WHERE id = ?", 10_000 + chance.randint(0, 10**9), k),
            lambda: self.run("UPDATE word SET w = w || '+' WHERE w = ?", f"w{k}"),
            lambda: self.run("UPDATE pair SET q = q + 1000000 WHERE q = ?", k),
        ]
        chance.choice(actions)()

    def value(self, column: str) -> Any:
        kind = column[0]
        text = self.chance.choice([None, "", "é☃", "x" * self.chance.randint(1, 300)])
        return {"n": self.chance.randint(-(2**40), 2**40), "b": b"\x00\xfe"}.get(kind, text)

    def insert(self, table: str, **key: Any) -> None:
        values = {name: self.value(name) for name in self.application.columns(table) if name not in key}
        if table == "pair":
            values["a"] = self.chance.random()
        values |= key
        names, marks = ", ".join(f'"{name}"' for name in values), ", ".join("?" * len(values))
        self.run(f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({marks})", *values.values())

    def update(self, table: str, where: str, *values: Any) -> None:
        free = [name for name in self.application.columns(table) if name not in ("id", "w", "p", "q")]
        if table == "pair":
            free = [name for name in free if name != "a"]
        if not free:
            return
        name = self.chance.choice(free)
        self.run(f'UPDATE {table} SET "{name}" = ? WHERE {where}', self.value(name), *values)

    def alter(self) -> None:
        table = self.chance.choice(["plain", "word", "bag"])
        columns = [name for name in self.application.columns(table) if name not in ("id", "w")]
        self.made += 1
        match self.chance.choice(["add", "default", "rename", "drop", "create", "recreate", "swap"]):
            case "add":
                self.run(f"ALTER TABLE {table} ADD COLUMN a{self.made} TEXT")
            case "default":
                self.run(f"ALTER TABLE {table} ADD COLUMN n{self.made} INTEGER DEFAULT {self.made}")
            case "rename" if columns:
                name = self.chance.choice(columns)
                self.run(f"ALTER TABLE {table} RENAME COLUMN {name} TO {name[0]}{self.made}x")
            case "drop" if len(columns) > 1 and self.application.kind != "trigger":
                self.run(f"ALTER TABLE {table} DROP COLUMN {self.chance.choice(columns)}")
            case "create":
                self.run(f"CREATE TABLE later{self.made} (id INTEGER PRIMARY KEY, a TEXT)")
                self.run(f"INSERT INTO later{self.made} VALUES (1, 'x'), (2, NULL)")
            case "recreate":
                self.run("DROP TABLE bag")
                self.run("CREATE TABLE bag (a TEXT, n INTEGER)")
                self.run("INSERT INTO bag VALUES ('again', 1)")
            case "swap" if len(columns) > 1:
                one, two = self.chance.sample(columns, 2)
                if one[0] == two[0]:
                    self.run(f"ALTER TABLE {table} RENAME COLUMN {one} TO swapped")
                    self.run(f"ALTER TABLE {table} RENAME COLUMN {two} TO {one}")
                    self.run(f"ALTER TABLE {table} RENAME COLUMN swapped TO {two}")
        if self.application.kind == "trigger":
            self.application.capture()
