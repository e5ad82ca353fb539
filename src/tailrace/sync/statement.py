# ruff: noqa: S608 - every name in the SQL here is quoted
"""Own changes as SQL that any replica or server can run: rows by key, columns by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tailrace.capture.change import CapturedChange, Delete, Insert, Operation, RecordRow
from tailrace.capture.layout import TableShape, quoted
from tailrace.errors import DamagedError
from tailrace.sync.hrana import SqlValue, Step


@dataclass(frozen=True)
class OwnChange:
    """A change of this replica that the remote may lack: what it wrote, and the row before and after it."""

    change_id: int
    table: str
    operation: Operation
    before: RecordRow | None
    after: RecordRow | None

    @classmethod
    def of(cls, change: CapturedChange) -> OwnChange:
        assert change.table is not None
        return cls(change.change_id, change.table, change.into_apply(), change.row("before"), change.row("after"))

    @property
    def kind(self) -> str:
        if isinstance(self.operation, Insert):
            return "insert"
        return "delete" if isinstance(self.operation, Delete) else "update"

    def key(self, shape: TableShape) -> tuple[SqlValue, ...]:
        """The key of the row that this change is about, as it was before."""
        row = self.after if self.before is None else self.before
        if row is None:
            raise DamagedError("a change has no image of its row", table=self.table, position=str(self.change_id))
        return tuple(row[place] for place in key_places(shape))

    def changed(self) -> list[int]:
        """The columns that it writes."""
        width = len(self.after or ())
        flags = getattr(self.operation, "changed", None)
        return [place for place in range(width) if flags is None or flags[place]]

    def has_null_key(self, shape: TableShape) -> bool:
        """SQLite allows any number of rows whose key is NULL, so the key does not say which of them is meant."""
        return None in self.key(shape)

    def _identify(self, shape: TableShape) -> tuple[str, list[SqlValue]]:
        if not self.has_null_key(shape):
            return match_key(shape, self.key(shape))
        holders, values = bind(self.before or ())
        same = " AND ".join(
            f"{quoted(field.name)} IS {holder}" for field, holder in zip(shape.fields, holders, strict=False)
        )
        return f"{shape.rowid} = (SELECT {shape.rowid} FROM {quoted(self.table)} WHERE {same} LIMIT 1)", values

    def step(self, shape: TableShape) -> Step | None:
        """The statement that makes this change; None if it changes nothing."""
        table, names = quoted(self.table), [quoted(field.name) for field in shape.fields]
        if self.kind == "insert":
            assert self.after is not None
            holders, values = bind(self.after)
            return insert(shape, len(self.after), f"({', '.join(holders)})"), values
        where, identity = self._identify(shape)
        if self.kind == "delete":
            return f"DELETE FROM {table} WHERE {where}", identity
        assert self.after is not None
        chosen = self.changed()
        if not chosen:
            return None
        holders, values = bind([self.after[place] for place in chosen])
        sets = ", ".join(f"{names[place]} = {holder}" for place, holder in zip(chosen, holders, strict=True))
        return f"UPDATE {table} SET {sets} WHERE {where}", [*values, *identity]


def insert(shape: TableShape, width: int, rows: str) -> str:
    """INSERT of rows that others may have inserted too: then all columns are overwritten."""
    names = [quoted(field.name) for field in shape.fields[:width]]
    target = ", ".join(quoted(shape.fields[place].name) for place in key_places(shape))
    sets = ", ".join(f"{name} = excluded.{name}" for name in names)
    into = f"{quoted(shape.table)} ({', '.join(names)})"
    return f"INSERT INTO {into} VALUES {rows} ON CONFLICT ({target}) DO UPDATE SET {sets}"


def key_places(shape: TableShape) -> list[int]:
    return [place for _, place in sorted((field.key, place) for place, field in enumerate(shape.fields) if field.key)]


def match_key(shape: TableShape, key: Sequence[SqlValue]) -> tuple[str, list[SqlValue]]:
    holders, values = bind(key)
    names = [quoted(shape.fields[place].name) for place in key_places(shape)]
    return " AND ".join(f"{name} IS {holder}" for name, holder in zip(names, holders, strict=True)), values


def bind(values: Sequence[SqlValue]) -> tuple[list[str], list[SqlValue]]:
    """Placeholders and what to bind: JSON has no infinity, and text that is not UTF-8 can only be cast."""
    holders, bound = list[str](), list[SqlValue]()
    for value in values:
        if isinstance(value, float) and math.isinf(value):
            holders.append("9e999" if value > 0 else "-9e999")
        elif isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
            holders.append("CAST(? AS TEXT)")
            bound.append(value.encode("utf-8", "surrogateescape"))
        else:
            holders.append("?")
            bound.append(value)
    return holders, bound
