"""Finds the column numbers of a Relation message, which the message itself leaves out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final, NamedTuple

import psycopg
import pyarrow as pa

from tailrace.errors import SchemaChangedError
from tailrace.model.schema import Column, TableSchema
from tailrace.source.postgres.pgoutput.message import Relation, RelationColumn
from tailrace.source.postgres.type_map import agrees, builtin_arrow


class _Path(NamedTuple):
    """One numbering of the first columns of a message: its cost, and whether another one has the same cost."""

    cost: int
    ambiguous: bool
    numbers: tuple[int, ...]


_FRESH: Final = 0  # stands for the number of a column that neither side has


def identify(known: TableSchema, relation: Relation, now: TableSchema | None) -> tuple[Column, ...]:
    """The message's columns with their numbers, which ascend, from the version before it and the catalog after it.

    Exact while the catalog still matches the message. Otherwise a column that is in both was there in between, a name
    counts for more than a place, and SchemaChangedError is raised when two numberings remain.
    """
    before = {column.number: column for column in known.columns}
    after = {column.number: column for column in now.columns} if now else {}
    if len(after) == len(relation.columns) and all(
        sent.name == column.name and agrees(sent, column.type, column.upstream_type)
        for sent, column in zip(relation.columns, after.values(), strict=True)
    ):
        return tuple(after.values())
    numbers = _align(relation.columns, before, after)
    if numbers is None:
        names = ", ".join(_unsettled(relation, before, after)) or "its columns"
        raise SchemaChangedError(
            f"the columns changed upstream, and the catalog changed again since: what became of {names} is unknown",
            fix=f"tailrace resync FILE {known.table}; the event trigger, installed before, makes such changes exact",
            table=str(known.table),
        )
    return tuple(
        _column(sent, number, before.get(number), after.get(number))
        for sent, number in zip(relation.columns, numbers, strict=True)
    )


def _align(
    sent: Sequence[RelationColumn], before: Mapping[int, Column], after: Mapping[int, Column]
) -> list[int] | None:
    """The numbering with the lowest cost, None when there is none or another has the same cost."""
    universe = sorted(before.keys() | after.keys())
    # paths[i]: the best numbering so far of the first i columns with the numbers visited so far.
    paths: list[_Path | None] = [_Path(0, False, ())] + [None] * len(sent)
    _extend_fresh(paths, settled=not before)
    for number in universe:
        was, now = before.get(number), after.get(number)
        # A column on both sides is in the message; any other may have been dropped before it or added after it.
        skipped = paths if was is None or now is None else [None] * len(paths)
        matched: list[_Path | None] = [None]
        for path, column in zip(paths, sent, strict=False):
            matched.append(None if path is None else _follow(path, _cost(column, was, now), number))
        paths = [_better(one, other) for one, other in zip(skipped, matched, strict=True)]
        _extend_fresh(paths, settled=number >= max(before, default=0))
    best = paths[-1]
    if best is None or best.ambiguous:
        return None
    numbers = _settle(best.numbers, before, after)
    return numbers if all(one < other for one, other in pairwise(numbers)) else None


def _extend_fresh(paths: list[_Path | None], *, settled: bool) -> None:
    """Columns that neither side has: added since and dropped again. Their numbers are above all known ones."""
    for at in range(1, len(paths) if settled else 0):
        path = paths[at - 1]
        if path is not None:
            paths[at] = _better(paths[at], _follow(path, 2, _FRESH))


def _follow(path: _Path, cost: int, number: int) -> _Path:
    return _Path(path.cost + cost, path.ambiguous, (*path.numbers, number))


def _better(one: _Path | None, other: _Path | None) -> _Path | None:
    if one is None or other is None:
        return one or other
    if one.cost == other.cost:
        return one._replace(ambiguous=one.ambiguous or other.ambiguous or one.numbers != other.numbers)
    return min(one, other, key=lambda path: path.cost)


def _cost(sent: RelationColumn, was: Column | None, now: Column | None) -> int:
    """The cost of matching a message's column with this one."""
    fits_was = was is not None and agrees(sent, was.type, was.upstream_type)
    fits_now = now is not None and agrees(sent, now.type, now.upstream_type)
    if now is not None and now.name == sent.name:
        return 0 if fits_now else 1
    if was is not None and was.name == sent.name:
        return 1 if fits_was or fits_now else 2
    return 2 if fits_was or fits_now else 3


def _settle(numbers: Sequence[int], before: Mapping[int, Column], after: Mapping[int, Column]) -> list[int]:
    """The numbers with unused ones in place of `_FRESH`, as the numbers of dropped columns are never used again."""
    settled: list[int] = []
    for number in numbers:
        lowest = max([*settled[-1:], *before], default=0) + 1
        while number == _FRESH and lowest in after:
            lowest += 1
        settled.append(number or lowest)
    return settled


def _unsettled(relation: Relation, before: Mapping[int, Column], after: Mapping[int, Column]) -> list[str]:
    sure = {c.name for c in before.values()} & {c.name for c in after.values()} if after else set()
    return [column.name for column in relation.columns if column.name not in sure]


def _column(sent: RelationColumn, number: int, was: Column | None, now: Column | None) -> Column:
    if now is not None and agrees(sent, now.type, now.upstream_type):
        return replace(now, name=sent.name)
    if was is not None and agrees(sent, was.type, was.upstream_type):
        return replace(was, name=sent.name)
    type_ = builtin_arrow(sent.type_oid, sent.typmod)
    return Column(sent.name, pa.string() if type_ is None else type_, True, _declared(sent, type_), number)


def _declared(sent: RelationColumn, type_: pa.DataType | None) -> str:
    """The server's name of the type, of which the message has only the OID."""
    info = psycopg.postgres.types.get(sent.type_oid)
    if info is None:
        return ""
    name = info.regtype + ("[]" if info.oid != sent.type_oid else "")
    return f"{name}({type_.precision},{type_.scale})" if isinstance(type_, pa.Decimal128Type) else name
