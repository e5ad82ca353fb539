"""Whatever a row holds, its receiver reads back from the body of a request, in every format and nothing altered."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tailrace.destination.webhook.format.event import format_of
from tailrace.model.change import Changes, Op
from tailrace.model.schema import Column, TableName, TableSchema

FORMATS = ("rqlite", "cloudevents", "debezium")
INT64 = st.integers(-(2**63), 2**63 - 1)
ODD = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

Read = Callable[[Any], Any]
Kind = tuple[pa.DataType, st.SearchStrategy[Any], Read]


def whole(kind: pa.DataType) -> Kind:
    info = np.iinfo(kind.to_pandas_dtype())
    return kind, st.integers(int(info.min), int(info.max)), lambda value: value if type(value) is int else None


def real(kind: pa.DataType) -> Kind:
    def read(value: Any) -> float:
        return ODD[value] if isinstance(value, str) else float(kind.to_pandas_dtype()(str(value)))

    return kind, st.floats(width=kind.bit_width), read


def decimal(kind: pa.DataType) -> Kind:
    digits = st.integers(-(10**kind.precision) + 1, 10**kind.precision - 1)
    # Not by `scaleb`, which rounds to the context.
    return kind, digits.map(lambda number: Decimal(f"{number}e-{kind.scale}")), Decimal


def moment(kind: pa.DataType, low: int, high: int) -> Kind:
    """Dates and timestamps as counts of their unit; far years have a sign."""
    unit: Any = "D" if pa.types.is_date32(kind) else "ms" if pa.types.is_date64(kind) else kind.unit

    def read(text: str) -> int:
        assert text.endswith("Z") == bool(pa.types.is_timestamp(kind) and kind.tz)
        return int(np.datetime64(text.removesuffix("Z").removeprefix("+"), unit).astype(np.int64))

    step = 86_400_000 if pa.types.is_date64(kind) else 1
    return kind, st.integers(low // step, high // step).map(lambda count: count * step), read


def time(kind: pa.DataType, per_second: int) -> Kind:
    def read(text: str) -> int:
        hours, minutes, seconds = text.split(":")
        return int((int(hours) * 3600 + int(minutes) * 60 + Decimal(seconds)) * per_second)

    return kind, st.integers(0, 86_400 * per_second - 1), read


def octets(kind: pa.DataType, size: int | None = None) -> Kind:
    return kind, st.binary(min_size=size or 0, max_size=size), base64.b64decode


def same(value: Any) -> Any:
    return value


TEXT = st.text(st.characters(codec="utf-8"))
NAMES = TEXT.filter(lambda name: name not in ("", "rowid"))
KINDS: list[Kind] = [
    (pa.bool_(), st.booleans(), same),
    *(whole(kind) for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64())),
    *(whole(kind) for kind in (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())),
    *(real(kind) for kind in (pa.float32(), pa.float64())),
    *(decimal(kind) for kind in (pa.decimal128(12, 2), pa.decimal128(38, 38), pa.decimal256(76, 10))),
    *((kind, TEXT, same) for kind in (pa.string(), pa.large_string(), pa.string_view())),
    *(octets(kind) for kind in (pa.binary(), pa.large_binary(), pa.binary_view())),
    octets(pa.binary(3), 3),
    moment(pa.date32(), -(2**31), 2**31 - 1),
    moment(pa.date64(), -(10**14), 10**15),
    moment(pa.timestamp("s"), -(10**11), 10**12),
    moment(pa.timestamp("ms", "UTC"), -(10**14), 10**15),
    moment(pa.timestamp("us"), -(2**62), 2**62),
    moment(pa.timestamp("us", "UTC"), -(2**62), 2**62),
    moment(pa.timestamp("ns", "UTC"), -(2**62), 2**62),
    time(pa.time32("s"), 1),
    time(pa.time64("us"), 10**6),
    (pa.duration("us"), INT64, same),
    (pa.dictionary(pa.int32(), pa.string()), TEXT, same),
    (pa.list_(pa.int64()), st.lists(st.none() | INT64, max_size=3), same),
    (pa.large_list(pa.string()), st.lists(st.none() | TEXT, max_size=3), same),
    (pa.list_(pa.list_(pa.string())), st.lists(st.lists(TEXT, max_size=2), max_size=2), same),
    (pa.list_(pa.decimal128(8, 2)), st.just([Decimal("1.10"), None]), same),
    (
        pa.struct([pa.field("a", pa.int64()), pa.field('b"', pa.string())]),
        st.fixed_dictionaries({"a": st.none() | INT64, 'b"': st.none() | TEXT}),
        same,
    ),
    (
        pa.map_(pa.string(), pa.int64()),
        st.dictionaries(TEXT, st.none() | INT64, max_size=3).map(lambda pairs: list(pairs.items())),
        lambda pairs: [tuple(pair) for pair in pairs],
    ),
    (pa.null(), st.none(), same),
]


def parse(body: bytes) -> Any:
    """As an exact receiver reads it: numbers with a fraction as decimals, and nothing that is no JSON."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    def count(text: str) -> int | Decimal:
        return Decimal(text) if text == "-0" else int(text)

    return json.loads(body, parse_float=Decimal, parse_int=count, parse_constant=refuse)


def afters(name: str, body: bytes) -> list[dict[str, Any]]:
    said = parse(body)
    if name == "rqlite":
        return [event["after"] for entry in said["payload"] for event in entry["events"]]
    return [event["data"]["after"] if name == "cloudevents" else event["after"] for event in said]


def encoded(name: str, table: TableSchema, row: pa.StructArray, **given: Any) -> bytes:
    changes = Changes.build(table, row, op=Op.INSERT, commit=1, ordinal=2 * np.arange(len(row)), **given)
    batch = format_of(name).encode(changes, source='sh"op')
    batch.validate(full=True)
    return format_of(name).body(pa.Table.from_batches([batch]), service_id="", node_id="n")


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return (math.isnan(left) and math.isnan(right)) or (
            left == right and math.copysign(1, left) == math.copysign(1, right)
        )
    return type(left) is type(right) and bool(left == right)


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[str], list[Kind], list[list[Any]]]:
    """Names, kinds and values of some columns."""
    count = draw(st.integers(1, 4))
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=6))
    names = draw(st.lists(NAMES, min_size=len(kinds), max_size=len(kinds), unique=True))
    return names, kinds, [draw(st.lists(st.none() | each, min_size=count, max_size=count)) for _, each, _ in kinds]


@given(rows())
def test_a_value_of_any_type_is_read_back_as_it_was(drawn: tuple[list[str], list[Kind], list[list[Any]]]) -> None:
    names, kinds, values = drawn
    table = TableSchema(
        TableName("s", 'ta"ble'), tuple(Column(*each) for each in zip(names, types(kinds), strict=True))
    )
    arrays = [array_of(column, kind) for column, kind in zip(values, types(kinds), strict=True)]
    row = pa.StructArray.from_arrays(arrays, fields=list(table.row_type))
    for name in FORMATS:
        for index, found in enumerate(afters(name, encoded(name, table, row))):
            assert set(found) == set(names)
            for each, column, (_, _, read) in zip(names, values, kinds, strict=True):
                expected = column[index]
                assert found[each] is None if expected is None else equal(read(found[each]), expected)


def types(kinds: list[Kind]) -> list[pa.DataType]:
    return [kind for kind, _, _ in kinds]


def array_of(values: list[Any], kind: pa.DataType) -> pa.Array[Any]:
    """Also of counts, where Arrow would rather have moments."""
    if pa.types.is_temporal(kind):
        return pa.array(values, pa.int32() if kind.bit_width == 32 else pa.int64()).view(kind)
    return pa.array(values, kind)


@given(st.lists(st.tuples(st.none() | INT64, st.none() | TEXT, TEXT), min_size=1, max_size=4))
def test_a_text_that_stands_for_a_value_is_sent_as_that_text(rows: list[tuple[int | None, str | None, str]]) -> None:
    """Also for rqlite, where a text that is a number is one: it could not be anything else."""
    table = TableSchema(TableName("s", "t"), (Column("a", pa.int64()), Column("at", pa.date32())))
    row = pa.array([{"a": number, "at": None} for number, _, _ in rows], table.row_type)
    exact = pa.array([None if text is None else json.dumps({"at": text}) for _, text, _ in rows], pa.string())
    for name in FORMATS:
        found = afters(name, encoded(name, table, row, exact=exact))
        assert [(each["a"], each["at"]) for each in found] == [(number, text) for number, text, _ in rows]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_go_reads_and_writes_the_numbers_of_the_rqlite_format_alike(values: list[float]) -> None:
    table = TableSchema(TableName("s", "t"), (Column("f", pa.float64()),))
    body = encoded("rqlite", table, pa.array([{"f": value} for value in values], table.row_type)).decode()
    for text, value in zip(re.findall(r'"f":([^}]+)\}', body), values, strict=True):
        assert equal(float(text), value)
        assert ("e" in text) == (value != 0 and not 1e-6 <= abs(value) < 1e21)
        assert not re.search(r"e-0|\.0$|\.$|E", text)
