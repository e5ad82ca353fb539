"""Columns as JSON: whatever goes in comes out of a JSON parser again."""

from __future__ import annotations

import base64
import datetime
import decimal
import json
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.model.value_text import object_text, text_of

_VALUES: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "integer": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "text": (pa.string(), st.text()),
    "truth": (pa.bool_(), st.booleans()),
    "number": (pa.float64(), st.floats(allow_nan=False, allow_infinity=False)),
    "words": (pa.list_(pa.string()), st.lists(st.none() | st.text(), max_size=3)),
}


@st.composite
def columns(draw: st.DrawFn) -> tuple[dict[str, list[Any]], dict[str, pa.Array[Any]]]:
    count = draw(st.integers(1, 5))
    names = draw(st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=4, unique=True))
    values: dict[str, list[Any]] = {}
    arrays: dict[str, pa.Array[Any]] = {}
    for name in names:
        type_, strategy = _VALUES[draw(st.sampled_from(sorted(_VALUES)))]
        values[name] = draw(st.lists(st.none() | strategy, min_size=count, max_size=count))
        arrays[name] = pa.array(values[name], type_)
    return values, arrays


@given(columns())
def test_any_values_are_read_back_from_the_text(drawn: tuple[dict[str, list[Any]], dict[str, pa.Array[Any]]]) -> None:
    values, arrays = drawn
    texts = object_text(arrays).to_pylist()
    for index, text in enumerate(texts):
        assert json.loads(text) == {name: column[index] for name, column in values.items()}


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_any_members_may_be_left_out_of_any_row(rows: int, members: int, data: st.DataObject) -> None:
    flags = st.lists(st.booleans(), min_size=members, max_size=members)
    left_out = data.draw(st.lists(flags, min_size=rows, max_size=rows))
    arrays = {f"m{index}": pa.array(range(rows)) for index in range(members)}
    texts = object_text(arrays, left_out=np.array(left_out)).to_pylist()
    for row, (text, lacks) in enumerate(zip(texts, left_out, strict=True)):
        assert json.loads(text) == {name: row for name, lack in zip(arrays, lacks, strict=True) if not lack}


def test_members_that_a_row_lacks_are_absent() -> None:
    arrays = {"a": pa.array([1, 2]), "b": pa.array(["x", "y"])}
    texts = object_text(arrays, left_out=np.array([[False, True], [True, True]])).to_pylist()
    assert texts == ['{"a":1}', "{}"]


def test_decimals_keep_their_digits_and_times_are_iso_8601() -> None:
    moment = datetime.datetime(2024, 2, 29, 12, 30, 0, 123456, tzinfo=datetime.UTC)
    arrays = {
        "d": pa.array([decimal.Decimal("12345678901234567890.10")]),
        "t": pa.array([moment], pa.timestamp("us", "UTC")),
        "day": pa.array([moment.date()], pa.date32()),
        "b": pa.array([b"\x00\xff"]),
    }
    [text] = object_text(arrays).to_pylist()
    assert '"d":12345678901234567890.10' in text
    read = json.loads(text)
    assert datetime.datetime.fromisoformat(read["t"]) == moment
    assert read["day"] == "2024-02-29"
    assert base64.b64decode(read["b"]) == b"\x00\xff"


@pytest.mark.parametrize(("value", "text"), [(float("nan"), "nan"), (float("inf"), "inf"), (float("-inf"), "-inf")])
def test_floats_that_json_has_no_number_for_are_strings(value: float, text: str) -> None:
    assert object_text({"f": pa.array([value])}).to_pylist() == [f'{{"f":"{text}"}}']


def test_years_that_four_digits_cannot_hold_have_a_sign() -> None:
    day, moment = pa.array([109_500_000], pa.date32()), pa.array([2**60], pa.timestamp("us"))
    text = json.loads(object_text({"day": day, "moment": moment})[0].as_py())
    assert text == {"day": "+301770-10-26", "moment": "+38504-08-17T21:30:06.846976"}


@pytest.mark.parametrize(
    ("unit", "texts"),
    [
        ("s", ["-292277022657-01-27T08:29:52", "-292277022657-01-27T08:29:53"]),
        ("ms", ["-292275055-05-16T16:47:04.192", "-292275055-05-16T16:47:04.193"]),
        ("us", ["-290308-12-21T19:59:05.224192", "-290308-12-21T19:59:05.224193"]),
    ],
)
def test_the_earliest_timestamps_have_a_text(unit: Literal["s", "ms", "us"], texts: list[str]) -> None:
    moments = pa.array([-(2**63), -(2**63) + 1], pa.int64()).view(pa.timestamp(unit))
    assert text_of(moments).to_pylist() == texts


def test_structs_are_objects_and_maps_are_lists_of_pairs() -> None:
    arrays = {
        "s": pa.array([{"a": 1, "b": ["x"]}, None], pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))])),
        "m": pa.array([[(1, "x"), (2, None)], None], pa.map_(pa.int64(), pa.string())),
    }
    assert object_text(arrays).to_pylist() == [
        '{"s":{"a":1,"b":["x"]},"m":[[1,"x"],[2,null]]}',
        '{"s":null,"m":null}',
    ]


def test_a_type_without_a_form_in_json_is_refused() -> None:
    with pytest.raises(TypeError, match="month_day_nano"):
        object_text({"i": pa.array([(1, 2, 3)], pa.month_day_nano_interval())})
