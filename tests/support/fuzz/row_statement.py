"""Random statements that write rows."""

from __future__ import annotations

import random

from tests.support.fuzz.upstream_state import UpstreamColumn, UpstreamTable

BIG = "repeat(md5('{0}'), 90)"
"""A value that is stored out of line, so that an update that leaves it alone does not send it."""


class RowStatements:
    """Inserts, updates and deletes of the tables that there are."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def make(self, tables: list[UpstreamTable]) -> str | None:
        table = self.chance.choice(tables)
        if not table.written:
            return None
        kinds = [self._insert] * 4 + [self._update] * 5 + [self._delete] * 2 + [self._move_key] * 2
        if self.chance.random() < 0.03:
            return f"TRUNCATE {table.place}"
        return self.chance.choice(kinds)(table)

    def _insert(self, table: UpstreamTable) -> str:
        columns = [
            column
            for column in table.written
            if column.name in table.key or (column.required and not column.defaulted) or self.chance.random() < 0.6
        ]
        if not columns:
            return f"INSERT INTO {table.place} DEFAULT VALUES"
        rows = ", ".join(
            f"({', '.join(self.value(column, table) for column in columns)})"
            for _ in range(self.chance.choice([1, 1, 2]))
        )
        names = ", ".join(column.name for column in columns)
        conflict = " ON CONFLICT DO NOTHING" if table.key or table.unique else ""
        return f"INSERT INTO {table.place} ({names}) VALUES {rows}{conflict}"

    def _update(self, table: UpstreamTable) -> str | None:
        columns = [column for column in table.plain if not column.generated]
        if not columns:
            return None
        chosen = self.chance.sample(columns, min(len(columns), self.chance.choice([1, 1, 2])))
        sets = ", ".join(f"{column.name} = {self.value(column, table)}" for column in chosen)
        return f"UPDATE {table.place} SET {sets}{self._some(table)}"

    def _delete(self, table: UpstreamTable) -> str:
        return f"DELETE FROM {table.place}{self._some(table)}"

    def _move_key(self, table: UpstreamTable) -> str | None:
        first = next((column for column in table.columns if column.name in table.key), None)
        if first is None or first.kind not in ("integer", "bigint", "smallint", "numeric"):
            return None
        by = self.chance.choice(["+ 1", "+ 10", "- 1"]) if table.kind == "table" else "+ 1"
        # Moved row by row, from the far end, so that keys do not meet on their way.
        return f"UPDATE {table.place} SET {first.name} = {first.name} {by}{self._some(table)}"

    def _some(self, table: UpstreamTable) -> str:
        """Rows that are there or not: by what identifies them, or all."""
        name = table.key[0] if table.key else table.columns[0].name
        column = next(one for one in table.columns if one.name == name)
        if self.chance.random() < 0.1:
            return ""
        return f" WHERE {name} = {self.value(column, table)}"

    def value(self, column: UpstreamColumn, table: UpstreamTable) -> str:
        """A literal that fits the column; few different ones for keys, so that statements meet."""
        if not column.required and column.name not in table.key and self.chance.random() < 0.1:
            return "NULL"
        few = column.name in table.key or column.name == table.columns[0].name
        return literal(column.kind, self.chance, few=few)


def literal(kind: str, chance: random.Random, *, few: bool = False) -> str:
    """A value of the type."""
    base = kind.split("(")[0]
    number = chance.randint(1, 12) if few else chance.choice([chance.randint(0, 99), 30_000, 70_000])
    if base == "smallint":
        return str(min(number, 30_000))
    if base in ("integer", "bigint"):
        wide = base == "bigint" and not few and chance.random() < 0.2
        return str(9007199254740993 if wide else number if few or chance.random() < 0.9 else 16777217)
    if base in ("real", "double precision"):
        return str(number) if few else chance.choice([str(number), f"{number}.5", "0.1"])
    if base == "numeric":
        return str(number) if few else chance.choice([str(number % 100), f"{number % 100}.25", "1.234"])
    if base == "boolean":
        return chance.choice(["true", "false"])
    if base == "date":
        return f"'2024-03-{number % 28 + 1:02}'"
    if base.startswith("timestamp"):
        return f"'2024-03-{number % 28 + 1:02} 12:34:56.789{'+02' if 'with time zone' in kind else ''}'"
    if base in ("json", "jsonb"):
        return f'\'{{"b": {number},  "a": 1}}\''
    if base == "uuid":
        return f"'00000000-0000-0000-0000-{number:012}'"
    if base == "text" and not few and chance.random() < 0.15:
        return BIG.format(number)
    return f"'{number % 100}'" if few else f"'v{number % 100}'"
