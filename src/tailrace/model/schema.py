"""Table schemas: names, columns and keys of a table at one version.

A `TableSchema` is an immutable value: it is hashed, compared, sent to Spark tasks and stored as JSON. Arrow types
are the only type system; each source maps its own types to Arrow once, at discovery.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pyarrow as pa


@dataclass(frozen=True, order=True)
class TableName:
    """The schema and name of an upstream table. As text: `public.orders`, with quotes where a part needs them."""

    schema: str
    name: str

    def __str__(self) -> str:
        return f"{_quoted(self.schema)}.{_quoted(self.name)}"

    @classmethod
    def parse(cls, text: str) -> TableName:
        """The inverse of `str`. Raises ValueError for text that is not two dotted, optionally quoted parts."""
        parts: list[str] = []
        rest = text
        while rest:
            if rest.startswith('"'):
                end = 1
                while (end := rest.find('"', end)) != -1 and rest[end : end + 2] == '""':
                    end += 2
                if end == -1:
                    raise ValueError(f"unbalanced quotes in table name {text!r}")
                part, rest = rest[1:end].replace('""', '"'), rest[end + 1 :]
            else:
                part, dot, tail = rest.partition(".")
                rest = dot + tail
            parts.append(part)
            if rest and (not rest.startswith(".") or rest == "."):
                raise ValueError(f"cannot read table name {text!r}")
            rest = rest[1:]
        if len(parts) != 2 or not all(parts):
            raise ValueError(f"a table name is schema.table, not {text!r}")
        return cls(*parts)


def _quoted(part: str) -> str:
    return '"' + part.replace('"', '""') + '"' if not part or set(part) & set('."') else part


@dataclass(frozen=True)
class Column:
    """One column: its Arrow type and, to show to people, the type that the upstream declares (`numeric(10,2)`).

    `number` is the upstream's own id of the column (Postgres: attnum). It survives a rename.
    `initial` is the value of this column in rows that are older than the column; None means null.
    """

    name: str
    type: pa.DataType
    nullable: bool = True
    upstream_type: str = ""
    number: int = 0
    initial: pa.Scalar[Any] | None = None

    @property
    def field(self) -> pa.Field[Any]:
        return pa.field(self.name, self.type, self.nullable)


@dataclass(frozen=True)
class TableSchema:
    """A table at one version. `key` names the columns that identify a row; empty means append-only.

    `version` grows by one with each schema change of the table. `upstream_id` is the upstream's own id of the table
    (Postgres: the relation's OID). It survives a rename and differs after drop and create. `fingerprint` is for the
    source alone: what else it knows of the table at this version, to notice changes that the columns do not show.
    """

    table: TableName
    columns: tuple[Column, ...]
    key: tuple[str, ...] = ()
    version: int = 1
    upstream_id: str = ""
    fingerprint: str = ""

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if len(set(names)) != len(names):
            raise ValueError(f"{self.table} has two columns with the same name")
        if missing := set(self.key) - set(names):
            raise ValueError(f"{self.table} has no key column {sorted(missing)}")

    @cached_property
    def arrow(self) -> pa.Schema:
        """The row as Arrow fields. Only key fields are not nullable, because a delete may carry nothing but its key."""
        return pa.schema([pa.field(c.name, c.type, c.name not in self.key) for c in self.columns])

    @cached_property
    def row_type(self) -> pa.StructType:
        """The type of `Changes.row` and `Changes.before`. All fields are nullable, because images may be partial."""
        return pa.struct([pa.field(c.name, c.type) for c in self.columns])

    def rows(self, columns: Sequence[pa.Array[Any]], count: int) -> pa.StructArray:
        """`count` rows made of these columns; `count` is needed because a table may have no columns."""
        mask = None if columns else pa.repeat(False, count)
        return pa.StructArray.from_arrays(list(columns), fields=list(self.row_type), mask=mask)

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    def at_version(self, version: int) -> TableSchema:
        return replace(self, version=version)

    def without_fingerprint(self) -> TableSchema:
        """The table as tasks and destinations see it."""
        return replace(self, fingerprint="") if self.fingerprint else self

    def to_json(self) -> str:
        return json.dumps(
            {
                "table": [self.table.schema, self.table.name],
                "version": self.version,
                "upstream_id": self.upstream_id,
                "key": list(self.key),
                "columns": [[c.name, c.nullable, c.upstream_type, c.number] for c in self.columns],
                # Arrow's own serialisation of types: it covers nested types and, unlike pickle, is safe to load.
                "arrow": base64.b64encode(
                    pa.schema([pa.field(str(i), c.type) for i, c in enumerate(self.columns)]).serialize()
                ).decode(),
                "initial": _initial_json({i: c.initial for i, c in enumerate(self.columns) if c.initial is not None}),
                **({"fingerprint": self.fingerprint} if self.fingerprint else {}),
            },
            ensure_ascii=False,
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> TableSchema:
        raw = json.loads(text)
        types = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(raw["arrow"])))
        initial = _initial_of(raw.get("initial"))
        return cls(
            TableName(*raw["table"]),
            tuple(
                Column(name, field.type, nullable, upstream_type, number, initial.get(field.name))
                for (name, nullable, upstream_type, number), field in zip(raw["columns"], types, strict=True)
            ),
            tuple(raw["key"]),
            raw["version"],
            raw["upstream_id"],
            raw.get("fingerprint", ""),
        )


def _initial_json(values: Mapping[int, pa.Scalar[Any]]) -> str | None:
    """Initial values as text: one row in Arrow IPC, which preserves every type exactly."""
    if not values:
        return None
    row = pa.record_batch([pa.array([value]) for value in values.values()], names=[str(index) for index in values])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, row.schema) as writer:
        writer.write_batch(row)
    return base64.b64encode(sink.getvalue()).decode()


def _initial_of(text: str | None) -> dict[str, pa.Scalar[Any]]:
    if text is None:
        return {}
    with pa.ipc.open_stream(pa.py_buffer(base64.b64decode(text))) as reader:
        row = reader.read_next_batch()
    return {name: row.column(name)[0] for name in row.schema.names}
