"""Keys in a form that compares."""

from __future__ import annotations

import pyarrow as pa

from tailrace.model import key as keys


def test_lists_of_dates_outside_the_range_of_python_stay_distinct() -> None:
    far = pa.array([[-735_599], [3_000_000], [None], None], pa.list_(pa.int32())).cast(pa.list_(pa.date32()))
    found = keys.comparable([far])
    assert keys.positions(found, found).tolist() == [0, 1, 2, 3]
