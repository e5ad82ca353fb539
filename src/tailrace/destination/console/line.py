"""A change as a line: one of text for people, or one JSON object for programs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Literal

import pyarrow as pa

from tailrace.model.change import Changes, Op, op_names, position_texts
from tailrace.model.value_text import PLAIN, text_of

_Values = Mapping[str, str]
"""The values of a row as JSON, by column."""

_SIMPLE = re.compile(r"\w+")


def lines_of(changes: Changes, form: Literal["text", "json"], width: int) -> Iterator[str]:
    """One line for each change, in order. Line breaks in values are escaped; other control characters may be left."""
    now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    table, key = str(changes.table.table), changes.table.key
    times = text_of(changes.batch.column("committed_at")).to_pylist()
    positions = position_texts(changes.numpy("commit"), changes.numpy("ordinal")).to_pylist()
    ops = op_names(changes.numpy("op")).to_pylist()
    for time, position, op, values in zip(times, positions, ops, _changed(changes), strict=True):
        keys = {name: values[name] for name in key if name in values}
        rest = {name: value for name, value in values.items() if name not in key}
        if form == "json":
            head = {"table": table, "op": op, "committed_at": time, "position": position}
            start = json.dumps(head, ensure_ascii=False)[:-1]
            yield f'{start}, "key": {_object(keys)}, "columns": {_object(rest)}}}'
        else:
            words = [f"{_name(name)}={_cut(value, width)}" for name, value in (*keys.items(), *rest.items())]
            yield " ".join([time or now, table, op, *words])


def _changed(changes: Changes) -> Iterator[_Values]:
    """What is worth showing of each change: its key, and of the other columns those that it set, as far as is known.

    A delete and every change of a table without a key show what identifies the row.
    """
    names = [column.name for column in changes.table.columns]
    key = set(changes.table.key)
    rows, olds = _rows(changes.row, names), _rows(changes.batch.column("before"), names)
    left_out = changes.unchanged_mask()
    exact = changes.batch.column("exact").to_pylist()
    has_old = changes.batch.column("before").is_valid().to_pylist()
    for at, op in enumerate(changes.numpy("op").tolist()):
        if op == Op.TRUNCATE:
            yield {}
            continue
        row = dict(rows[at])
        row |= {name: json.dumps(text, ensure_ascii=False) for name, text in json.loads(exact[at] or "{}").items()}
        shown = (
            set(row) if left_out is None else {name for name, out in zip(names, left_out[at], strict=True) if not out}
        )
        if key and op == Op.DELETE:
            shown = key
        elif key and op == Op.UPDATE and has_old[at]:
            shown = key | {name for name in shown if row[name] != olds[at][name]}
        yield {name: value for name, value in row.items() if name in shown}


def _rows(column: pa.StructArray, names: list[str]) -> list[_Values]:
    values = [PLAIN.value(each).to_pylist() for each in column.flatten()]
    return [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]


def _object(values: _Values) -> str:
    return "{" + ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in values.items()) + "}"


def _name(name: str) -> str:
    return name if _SIMPLE.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def _cut(value: str, width: int) -> str:
    return value if len(value) <= width else f"{value[:width]}…"
