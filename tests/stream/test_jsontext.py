"""Columns as JSON: whatever goes in comes out of a JSON parser again."""

from __future__ import annotations

import base64
import datetime
import decimal
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.stream.jsontext import object_text

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
