"""Digests of rows."""

from __future__ import annotations

import struct
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.model.digest import row_digests

COLUMNS: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int32(), [1, -1, 0, None]),
    (pa.uint64(), [2**64 - 1, 0, None]),
    (pa.bool_(), [True, False, None]),
    (pa.float64(), [1.5, -1.5, 0.0, float("inf"), None]),
    (pa.string(), ["", "a", "ab", "ba", "aa", None]),
    (pa.binary(), [b"", b"\0", b"\0\0", None]),
    (pa.decimal128(10, 2), [Decimal("1.10"), Decimal("-1.10"), None]),
    (pa.timestamp("us", "UTC"), [datetime(2026, 11, 15, tzinfo=UTC), datetime(1960, 1, 1, tzinfo=UTC), None]),
    (pa.list_(pa.string()), [[], [""], ["a", "b"], ["ab"], ["b", "a"], [None], None]),
    (
        pa.struct([("x", pa.int64()), ("y", pa.string())]),
        [{"x": 1, "y": "a"}, {"x": 1, "y": None}, {"x": None, "y": "a"}],
    ),
]


@pytest.mark.parametrize(
    ("kind", "values"), COLUMNS, ids=lambda each: str(each) if isinstance(each, pa.DataType) else ""
)
def test_values_that_differ_have_digests_that_differ(kind: pa.DataType, values: list[Any]) -> None:
    assert len(set(row_digests([pa.array(values, kind)]).tolist())) == len(values)


@given(st.lists(st.text(), min_size=1, max_size=30), st.integers(0, 29))
def test_a_digest_depends_on_the_row_alone_and_not_on_where_it_stands(texts: list[str], start: int) -> None:
    whole = row_digests([pa.array(texts), pa.array(range(len(texts)))])
    alone = [row_digests([pa.array([text]), pa.array([at])])[0] for at, text in enumerate(texts)]
    assert whole.tolist() == [int(each) for each in alone]
    assert row_digests([pa.array(texts).slice(start)]).tolist() == row_digests([pa.array(texts)])[start:].tolist()


def test_a_digest_depends_on_which_column_holds_a_value() -> None:
    a, b = pa.array(["x", "xy"]), pa.array(["yz", "z"])
    assert len(set(row_digests([a, b]).tolist())) == 2
    assert not np.array_equal(row_digests([a, b]), row_digests([b, a]))


def test_every_zero_and_every_nan_are_one() -> None:
    odd = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]
    zero, minus, nan, other = row_digests([pa.array([0.0, -0.0, float("nan"), odd])]).tolist()
    assert (zero, nan) == (minus, other)


def test_no_rows_have_no_digests() -> None:
    assert len(row_digests([pa.array([], pa.string()), pa.array([], pa.list_(pa.int8()))])) == 0
