"""The name of an upstream's table in the file.

A table lies in the schema it has upstream, under its own name. Names of schemas that are DuckDB's own, and names that
tailrace uses, are put in quotes inside the name, so that no two tables share one. DuckDB takes names that differ only
in the case of ASCII letters for one; `check` refuses two such tables.
"""

from __future__ import annotations

from tailrace.destination.replica.sql_name import fold_ascii
from tailrace.model.schema import TableName

BOOK_SCHEMA = "_tailrace"
SHADOW = "_tailrace copy of "
"""The prefix of a table that will replace another one."""

_OWN_SCHEMAS = frozenset({"information_schema", "pg_catalog"})


def file_name(table: TableName) -> TableName:
    """The schema and name of the table in the file."""
    schema = table.schema
    if fold_ascii(schema).strip('"') in _OWN_SCHEMAS or is_reserved(schema.strip('"')):
        schema = f'"{schema}"'
    return TableName(schema, f'"{table.name}"' if is_reserved(table.name.strip('"')) else table.name)


def folded(table: TableName) -> str:
    """The table as DuckDB compares names: the same text for two that it takes for one."""
    return fold_ascii(str(file_name(table)))


def is_reserved(name: str) -> bool:
    return fold_ascii(name).startswith("_tailrace")
