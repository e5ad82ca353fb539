"""The name of an upstream's table in the file, and how names are quoted in SQL.

`main.items` is `items`; any other table has its schema in its name, as one name with a dot in it: `shop.items`. Parts
with dots or quotes are quoted, so no two tables share a name. Names that SQLite (`sqlite_`) or tailrace (`_tailrace`)
reserve are never used. SQLite treats names that differ only in the case of ASCII letters as one; `check` refuses two
such tables.
"""

from __future__ import annotations

from collections.abc import Iterable

from tailrace.model.schema import TableName

RESERVED = ("sqlite_", "_tailrace")


def file_name(table: TableName) -> str:
    """The table's name in the file."""
    plain = not set(table.name) & set('."') and not is_reserved(table.name)
    if table.schema == "main" and plain:
        return table.name
    text = str(table)
    return f'"{table.schema}"{text.removeprefix(table.schema)}' if is_reserved(text) else text


def is_reserved(name: str) -> bool:
    return fold(name).startswith(RESERVED)


def fold(name: str) -> str:
    """A name as SQLite compares names: without regard to the case of ASCII letters, and of no others."""
    return name.translate(_LOWER)


_LOWER = {letter: letter + 32 for letter in range(ord("A"), ord("Z") + 1)}


def quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def listed(names: Iterable[str]) -> str:
    """Names for SQL, quoted, with commas between them."""
    return ", ".join(map(quote, names))
