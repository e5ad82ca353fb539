"""Which version of a table a Relation message describes, and whether a new version needs a new copy."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa

from tailrace.errors import SchemaChangedError
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.source.postgres.catalog import Published
from tailrace.source.postgres.column_match import identify
from tailrace.source.postgres.fingerprint import Fingerprint
from tailrace.source.postgres.pgoutput.message import Relation
from tailrace.source.postgres.type_map import agrees


def differences(table: TableSchema, relation: Relation) -> list[str]:
    """The differences that prevent reading rows of `relation` as `table`, in words; empty when there are none.

    Columns are matched by name. A type change that keeps the Arrow type is no difference.
    """
    known = {column.name: column for column in table.columns}
    sent = {column.name: column for column in relation.columns}
    found = [f"column {name} is new" for name in sent if name not in known]
    found += [f"column {name} is gone" for name in known if name not in sent]
    found += [
        f"column {name} is no longer {column.upstream_type or column.type}"
        for name, column in known.items()
        if name in sent and not agrees(sent[name], column.type, column.upstream_type)
    ]
    return found


def require_fit(table: TableSchema, relation: Relation) -> None:
    """Raise SchemaChangedError unless rows of `relation` can be read as `table`."""
    if found := differences(table, relation):
        raise SchemaChangedError(
            f"the columns changed upstream: {'; '.join(found)}",
            fix=f"tailrace resync FILE {table.table} copies the table again with its current columns",
            table=str(table.table),
        )


def check_identity(table: TableSchema, relation: Relation, *, images_lack_key: bool = False) -> None:
    """Raise SchemaChangedError unless old images of `relation` identify a row of `table`.

    `images_lack_key`: they do not, whatever the message states. It describes a partitioned table, but old images follow
    the identity of the partition.
    """
    identity = {column.name for column in relation.columns if column.identifies}
    if table.key and set(table.key) <= identity and not images_lack_key:
        return
    if not table.key and relation.replica_identity == "f":
        return
    wanted = f"the key ({', '.join(table.key)})" if table.key else "the whole row"
    remedy = f"ALTER TABLE {table.table} REPLICA IDENTITY {'DEFAULT' if table.key else 'FULL'}"
    if images_lack_key:
        remedy = "ALTER TABLE … REPLICA IDENTITY FULL for the partition that tailrace check FILE names"
    raise SchemaChangedError(
        f"the replica identity does not cover {wanted}, so an update or delete does not identify its row",
        fix=f"{remedy}, then tailrace resync FILE {table.table}",
        table=str(table.table),
    )


@dataclass(frozen=True)
class Compared:
    """What a new version changes, in words, and why it needs a new copy (None: the log is enough)."""

    changes: tuple[str, ...]
    recopy: str | None


@dataclass(frozen=True)
class PostgresDerivedSchema:
    """The version that a Relation message describes; the known version itself when nothing changed."""

    schema: TableSchema
    changes: tuple[str, ...]
    recopy: str | None


def compare(
    old: TableSchema,
    new: TableSchema,
    *,
    unknown: Collection[int] = (),
    may_be_unlogged: bool = False,
    may_lack_key: bool = False,
) -> Compared:
    """What changed from `old` to `new`. Columns are the same when their numbers are.

    `unknown` are numbers of columns in which older rows hold a value that is not stored (`Published.unknown`).
    `may_be_unlogged`: nothing shows whether rows that are in a new file were changed while the table was UNLOGGED.
    `may_lack_key`: nothing shows whether there was a time without a key between one constraint and the next.

    A table is copied again unless its older rows certainly hold the same values as before. Postgres does not show
    whether a command that rewrote the rows computed new values (`USING`), so every rewrite is a reason to copy.
    """
    before = {column.number: column for column in old.columns}
    after = {column.number: column for column in new.columns}
    was_print, now_print = Fingerprint.of(old), Fingerprint.of(new)
    width = was_print.width if was_print else max(before, default=0)
    rewritten = was_print is not None and now_print is not None and was_print.file != now_print.file
    overall: list[str] = []
    changes: list[str] = []
    reasons: list[str] = []
    if old.upstream_id != new.upstream_id:
        overall.append("the table was dropped and created again")
    if old.table != new.table:
        overall.append(f"the table {old.table} is now {new.table}")
    for number in sorted(before.keys() | after.keys()):
        was, now = before.get(number), after.get(number)
        if now is None:
            assert was is not None
            changes.append(f"column {was.name} was dropped")
        elif was is None:
            changes.append(f"column {now.name} was added")
            # Numbers only grow, so one that existed is a column that was not published.
            if number <= width:
                reasons.append(f"column {now.name} was not published before")
            elif rewritten:
                reasons.append(f"the new column {now.name} was filled with a value for each row")
            elif number in unknown:
                reasons.append(f"older rows hold a value in the new column {now.name} that the log does not contain")
        else:
            changes += _altered(was, now)
            if rewritten and _is_touched(number, was_print, now_print):
                reasons.append(f"column {now.name} was changed and the rows of the table were rewritten")
            elif not _keeps_values(was, now):
                reasons.append(f"the type of column {now.name} changed, and its values with it")
    if set(_key_numbers(old)) != set(_key_numbers(new)):
        overall.append(f"the key ({', '.join(old.key)}) is now ({', '.join(new.key)})")
    if was_print and now_print and not was_print.prints_as(now_print):
        reasons.append("a type of its columns changed the text of stored values")
    if may_lack_key and was_print and now_print and was_print.key and was_print.key != now_print.key:
        reasons.append("its key was dropped and added again, and rows may have shared it in between")
    if rewritten and may_be_unlogged and not reasons:
        reasons.append("its rows are in a new file, and may have changed while the table was unlogged")
    return Compared((*overall, *changes), "; ".join([*overall, *reasons]) or None)


def _is_touched(number: int, was: Fingerprint | None, now: Fingerprint | None) -> bool:
    return was is None or now is None or was.columns.get(number) != now.columns.get(number)


def with_initial(old: TableSchema, new: TableSchema) -> TableSchema:
    """`new` with the initial values of the columns of `old`, which Postgres drops when it rewrites the rows.

    A destination may not have seen `old`. An initial value that cannot be converted to the new type is left out.
    """
    known = {column.number: column.initial for column in old.columns if column.initial is not None}
    return replace(
        new,
        columns=tuple(
            replace(column, initial=_as(known[column.number], column.type))
            if column.initial is None and column.number in known
            else column
            for column in new.columns
        ),
    )


def _as(value: pa.Scalar[Any], kind: pa.DataType) -> pa.Scalar[Any] | None:
    numbers = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    if value.type != kind and not all(any(fits(one) for fits in numbers) for one in (value.type, kind)):
        return None
    try:
        return value.cast(kind)
    except pa.ArrowInvalid:
        return None


def _altered(was: Column, now: Column) -> list[str]:
    found = []
    if was.name != now.name:
        found.append(f"column {was.name} was renamed to {now.name}")
    if was.type != now.type or was.upstream_type != now.upstream_type:
        types = (was.upstream_type or str(was.type), now.upstream_type or str(now.type))
        found.append(f"column {now.name} changed from {types[0]} to {types[1]}")
    if was.nullable != now.nullable:
        found.append(f"column {now.name} may {'now' if now.nullable else 'no longer'} be null")
    return found


_UNBOUNDED: Final = {"character varying", "text", "timestamp without time zone", "timestamp with time zone"} | {
    "time without time zone",
    "time with time zone",
    "interval",
}


def _keeps_values(was: Column, now: Column) -> bool:
    """Whether the new declared type certainly has every value of the old one, unchanged."""
    (old, old_bound), (new, new_bound) = _bound(was.upstream_type), _bound(now.upstream_type)
    if old == new and old_bound == new_bound:
        return bool(was.type == now.type)
    if old == new == "numeric" and old_bound and new_bound:
        # More digits before the point; another scale changes the text.
        return new_bound[0] >= old_bound[0] and old_bound[1:] == new_bound[1:]
    if new not in _UNBOUNDED or not (old == new or {old, new} <= {"character varying", "text"}):
        return False
    return new_bound is None or (old_bound is not None and new_bound >= old_bound)


def _bound(declared: str) -> tuple[str, tuple[int, ...] | None]:
    """`character varying(20)` is `character varying` with the bound 20."""
    found = re.search(r"\(([0-9,-]+)\)", declared)
    if found is None:
        return declared, None
    return declared.replace(found[0], ""), tuple(int(number) for number in found[1].split(","))


def _key_numbers(table: TableSchema) -> list[int]:
    return [table.column(name).number for name in table.key]


def derive(known: TableSchema, relation: Relation, now: Published | None) -> PostgresDerivedSchema:
    """The version that a Relation message describes, for databases without the event trigger.

    `known` is the table's last version before the message, `now` the catalog at any time after it (None: the table is
    gone). Raises SchemaChangedError when these do not settle which column is which.
    """
    columns = identify(known, relation, now.schema if now else None)
    schema = TableSchema(
        TableName(relation.schema, relation.name),
        columns,
        _key(known, relation, columns, now.schema if now else None),
        known.version + 1,
        known.upstream_id,
        _fingerprint(known, columns, now.schema) if now else "",
    )
    compared = compare(
        known,
        schema,
        unknown=_unknown(known, schema, now),
        may_be_unlogged=now is not None and not now.stays_logged,
        may_lack_key=True,
    )
    # The message does not show whether that was before it or after it.
    reasons = [
        compared.recopy or "",
        *(f"column {name} was dropped and added again" for name in replaced(known, schema)),
    ]
    if now is not None and _is_in_doubt(known, columns, now.schema):
        reasons.append("columns were added, and the table's columns changed again before the catalog was read")
    if not compared.changes:
        schema = known
    return PostgresDerivedSchema(schema, compared.changes, "; ".join(filter(None, reasons)) or None)


def replaced(old: TableSchema, new: TableSchema) -> list[str]:
    """The columns that were dropped and added again under their name. Relation messages do not distinguish the two."""
    numbers = {column.number for column in new.columns}
    shared = {column.name for column in old.columns} & {column.name for column in new.columns}
    return sorted(name for name in shared if old.column(name).number not in numbers)


def _is_in_doubt(known: TableSchema, columns: Sequence[Column], now: TableSchema) -> bool:
    """Whether a new column of the message may be another one than the catalog's of that name.

    It is certain only if the catalog has given no more numbers than the message has new columns.
    """
    was, catalog = Fingerprint.of(known), Fingerprint.of(now)
    numbers = {column.number for column in known.columns}
    added = sum(column.number not in numbers for column in columns)
    return bool(added and was and catalog and catalog.width != was.width + added)


def _fingerprint(known: TableSchema, columns: Sequence[Column], now: TableSchema) -> str:
    """The catalog's fingerprint, without columns that the message does not have yet."""
    was, catalog = Fingerprint.of(known), Fingerprint.of(now)
    if catalog is None:
        return ""
    numbers = {column.number for column in columns}
    width = max([*numbers, was.width if was else 0])
    marks = {number: mark for number, mark in catalog.columns.items() if number in numbers}
    return str(replace(catalog, width=min(width, catalog.width), columns=marks))


def _unknown(known: TableSchema, schema: TableSchema, now: Published | None) -> set[int]:
    """Added columns whose value in older rows is not known: the column is gone, or the value was never stored."""
    before = {column.number for column in known.columns}
    after = {column.number: column for column in now.schema.columns} if now else {}
    return {
        column.number
        for column in schema.columns
        if column.number not in before
        # The current initial value has the current type, which may not be the message's.
        and (column.number not in after or (column.initial is None and after[column.number].initial is not None))
    } | (now.unknown - before if now else set())


def _key(known: TableSchema, relation: Relation, columns: Sequence[Column], now: TableSchema | None) -> tuple[str, ...]:
    """The key's columns, in the order of the index if the catalog or the known version still has it."""
    names = {column.number: column.name for column in columns}
    marked = {c.number for c, sent in zip(columns, relation.columns, strict=True) if sent.identifies}
    for table in (now, known):
        numbers = _key_numbers(table) if table is not None else []
        # Under FULL every column is marked and under NOTHING none, so the message does not show the key.
        if numbers and (set(numbers) == marked or (relation.replica_identity in "fn" and names.keys() >= set(numbers))):
            return tuple(names[number] for number in numbers)
    return () if relation.replica_identity in "fn" else tuple(names[number] for number in sorted(marked))
