"""Every value that an event holds is read back as it was."""

from __future__ import annotations

import datetime
import re
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.destination.kafka.name import LONGEST, topic_of
from tailrace.destination.kafka.value import is_unfit, parse, to_arrow
from tailrace.destination.webhook.format.json_value import EventWriter
from tailrace.model.digest import row_digests
from tailrace.model.schema import TableName

WIDE = [-(2**63) + 1, 2**63 - 1, 0, -62135596800000010, 253402300800000000, None]
FLOATS = st.floats(width=32) | st.sampled_from([-0.0, 1e22, 16777216.0])


def back(column: pa.Array[Any]) -> pa.Array[Any]:
    values = [parse(b'{"v":' + text.encode() + b"}")["v"] for text in EventWriter().value(column).to_pylist()]
    assert not any(is_unfit(value, column.type) for value in values)
    return to_arrow(values, column.type)


@pytest.mark.parametrize(
    "column",
    [
        *(pa.array(WIDE, pa.int64()).cast(pa.timestamp(unit, zone)) for unit in ("us", "ns") for zone in (None, "UTC")),
        pa.array([-(2**31) + 1, 2**31 - 1, 0, -800000, None], pa.int32()).cast(pa.date32()),
        pa.array([0, 86399999999, None], pa.int64()).cast(pa.time64("us")),
        pa.array([86399999, None], pa.int32()).cast(pa.time32("ms")),
        pa.array([[Decimal("1.50"), None], None, []], pa.list_(pa.decimal128(10, 2))),
        pa.array([Decimal("1e-10"), Decimal("-123456789012345678.5"), None], pa.decimal128(38, 10)),
        pa.array([Decimal("9" * 50 + ".5")], pa.decimal256(76, 10)),
        pa.array([10**6, None], pa.duration("us")),
        pa.array([[[1], [2, None]], None], pa.list_(pa.list_(pa.int32()))),
        pa.array([[datetime.date(2024, 2, 29), None]], pa.list_(pa.date32())),
        pa.array([{"a": 1, "b": "x"}, None], pa.struct([("a", pa.int32()), ("b", pa.string())])),
        pa.array([b"", b"\x00\xff", None]),
        pa.array([True, None]),
    ],
    ids=lambda column: str(column.type),
)
def test_a_value_comes_back_as_it_was(column: pa.Array[Any]) -> None:
    assert back(column).equals(column)


@given(st.lists(FLOATS, min_size=1))
def test_a_float_comes_back_with_its_sign(values: list[float]) -> None:
    for kind in (pa.float64(), pa.float32()):
        column = pa.array(np.array(values, "f4" if kind == pa.float32() else "f8"))
        assert (row_digests([back(column)]) == row_digests([column])).all()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("infinity", pa.date32()),
        ("294276-12-31 23:59:59", pa.timestamp("us")),
        ("24:00:00", pa.time64("us")),
        ("NaN", pa.decimal128(4)),
        ("24:00", pa.int32()),
        ("{{1}}", pa.list_(pa.int32())),
    ],
)
def test_the_text_of_a_value_that_no_type_holds_is_recognized(text: str, kind: pa.DataType) -> None:
    assert is_unfit(text, kind)
    assert not is_unfit(text, pa.string())


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)


@given(NAMES, NAMES, NAMES, NAMES)
def test_two_tables_never_have_one_topic(schema: str, name: str, other_schema: str, other_name: str) -> None:
    one, other = TableName(schema, name), TableName(other_schema, other_name)
    topics = [topic_of("shop.{schema}.{table}", table) for table in (one, other)]
    assert (topics[0] == topics[1]) == (one == other)
    assert all(len(topic) <= LONGEST and re.fullmatch(r"[\w.-]+", topic, re.ASCII) for topic in topics)
