"""Keys in a form that compares."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tailrace.model import key as keys


def test_lists_of_dates_outside_the_range_of_python_stay_distinct() -> None:
    far = pa.array([[-735_599], [3_000_000], [None], None], pa.list_(pa.int32())).cast(pa.list_(pa.date32()))
    found = keys.comparable([far])
    assert keys.positions(found, found).tolist() == [0, 1, 2, 3]


def test_joined_keys_are_numbers_only_where_all_of_them_are() -> None:
    numbers, texts = keys.comparable([pa.array([1, 2])]), keys.comparable([pa.array([3, None])])
    assert isinstance(joined := keys.joined([numbers, numbers]), np.ndarray)
    assert joined.tolist() == [1, 2, 1, 2]
    assert keys.binary(keys.joined([numbers, texts])).to_pylist()[:3] == [b"1", b"2", b"3"]
