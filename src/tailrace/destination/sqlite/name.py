"""The name of an upstream's table in the file.

`main.items` is `items`; any other table has its schema in its name, as one name with a dot in it: `shop.items`. Parts
with dots or quotes are quoted, so no two tables share a name. Names that SQLite (`sqlite_`) or tailrace (`_tailrace`)
reserve are never used. SQLite treats names that differ only in the case of ASCII letters as one; `check` refuses two
such tables.
"""

from __future__ import annotations

from tailrace.destination.replica.sql_name import fold_ascii
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
    return fold_ascii(name).startswith(RESERVED)
