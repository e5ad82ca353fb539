"""Matches the columns of two versions of a table, and decides whether the log alone leads from one to the other.

SQLite gives columns no identity, but it never moves them: RENAME leaves a column in its place, ADD puts one at the
end, DROP takes one out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tailrace.model.change import Position
from tailrace.model.schema import TableSchema
from tailrace.source.sqlite.catalog import TableDefinition, initial_of, make_schema, stored_columns

_COMMIT_BITS = 20
_ORDINAL_BITS = 12


@dataclass(frozen=True)
class SqliteDerivedSchema:
    """The next version, and why only a new copy can follow it (None: the log can)."""

    schema: TableSchema
    recopy: str | None


def same(known: TableSchema, table: TableDefinition) -> bool:
    """Whether a version has these very columns and this key."""
    columns = [(column.name, column.upstream_type) for column in stored_columns(known)]
    key = table.key or (table.shown_rowid,)
    return columns == [(field.name, table.declared(field)) for field in table.fields] and known.key == key


def begin(known: TableSchema | None, table: TableDefinition, at: Position) -> TableSchema:
    """The version a copy begins with: columns that still exist keep their numbers."""
    if known is None:
        return make_schema(table, {field.name: number for number, field in enumerate(table.fields, 1)})
    return derive(known, table, at).schema


def derive(known: TableSchema, table: TableDefinition, at: Position) -> SqliteDerivedSchema:
    """`table` as the next version of `known`, from position `at` on. Deterministic: a second call gives the same."""
    old = stored_columns(known)
    names = [field.name for field in table.fields]
    origins = align([column.name for column in old], names)
    reasons: list[str] = []
    if origins is None:
        reasons.append("its old and new columns cannot be matched")
        places = {column.name: place for place, column in enumerate(old)}
        origins = [places.get(name) for name in names]
    numbers, initial = {}, {}
    for index, (field, origin) in enumerate(zip(table.fields, origins, strict=True)):
        if origin is not None:
            was = old[origin]
            numbers[field.name] = was.number
            if was.initial is not None:
                initial[field.name] = was.initial
            if was.upstream_type != table.declared(field):
                reasons.append(f"the type of column {field.name} changed")
                numbers[field.name] = _new_number(at, index)
                initial.pop(field.name, None)
            continue
        numbers[field.name] = _new_number(at, index)
        value, is_known = initial_of(field)
        if value is not None:
            initial[field.name] = value
        if not is_known:
            reasons.append(f"older rows hold a value in the new column {field.name} that the log does not contain")
    schema = make_schema(table, numbers, initial)
    if [known.column(name).number for name in known.key] != [schema.column(name).number for name in schema.key]:
        reasons.append(f"the key ({', '.join(known.key)}) is now ({', '.join(schema.key)})")
    return SqliteDerivedSchema(schema, "; ".join(reasons) or None)


def align(old: Sequence[str], new: Sequence[str]) -> list[int | None] | None:
    """For each new column its old place, None for an added one; None for all if the columns cannot be matched."""
    if len(new) < len(old):
        places = [old.index(name) for name in new if name in old]
        return [*places] if len(places) == len(new) and places == sorted(places) else None
    if any(name in new and new.index(name) != place for place, name in enumerate(old)):
        return None
    added = len(new) - len(old)
    if added and list(new[: len(old)]) != list(old):
        return None
    return [*range(len(old)), *[None] * added]


def _new_number(at: Position, index: int) -> int:
    """A number no column of the table ever had: no two schema changes have the same position."""
    place = at.commit + 1 << _COMMIT_BITS
    return place + (at.ordinal % (1 << _COMMIT_BITS - _ORDINAL_BITS) << _ORDINAL_BITS) + index
