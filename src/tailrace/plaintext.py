"""Decimals, dates and times as text that reads back to the same value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def text_of(values: pa.Array[Any]) -> pa.Array[Any]:
    """Numbers, dates and times, in ISO 8601; nulls stay."""
    kind = values.type
    if pa.types.is_decimal(kind):
        return _decimals(values)
    if pa.types.is_date64(kind):
        return text_of(values.cast(pa.date32()))
    if pa.types.is_date(kind):
        return _moments(values, values.view(pa.int32()), "D")
    if pa.types.is_timestamp(kind):
        # Without its zone, which is UTC: Arrow prints that form many times faster.
        local = values.cast(pa.timestamp(kind.unit)) if kind.tz else values
        text = pc.replace_substring(_moments(local, values.view(pa.int64()), kind.unit), " ", "T", max_replacements=1)
        return pc.binary_join_element_wise(text, "Z", "") if kind.tz else text
    return values.cast(pa.string())


def _decimals(values: pa.Array[Any]) -> pa.Array[Any]:
    text = values.cast(pa.string())
    scientific = pc.fill_null(pc.match_substring(text, "E"), False)
    if not pc.any(scientific).as_py():
        return text
    # Arrow turns to it for values near zero, which are few.
    plain = pa.array([f"{value:f}" for value in values.filter(scientific).to_pylist()], pa.string())
    return pc.replace_with_mask(text, scientific, plain)


def _moments(values: pa.Array[Any], ticks: pa.Array[Any], unit: str) -> pa.Array[Any]:
    """Dates or timestamps without a zone. Years before 0 and after 9999 have a sign and as many digits as they need."""
    if unit == "ns":
        return values.cast(pa.string())
    first, end = (
        int(np.datetime64(year - 1970, "Y").astype(f"datetime64[{unit}]").astype(int)) for year in (0, 10_000)
    )
    count = ticks.cast(pa.int64())
    far = pc.fill_null(pc.or_(pc.less(count, first), pc.greater_equal(count, end)), False)
    if not pc.any(far).as_py():
        return values.cast(pa.string())
    instants = count.filter(far).to_numpy().astype(f"datetime64[{unit}]")
    years = instants.astype("datetime64[Y]").astype(np.int64) + 1970
    rests = [text.lstrip("-").split("-", 1)[1] for text in np.datetime_as_string(instants)]
    texts = [f"{'-' if year < 0 else '+'}{abs(year):04}-{rest}" for year, rest in zip(years, rests, strict=True)]
    near = pc.if_else(far, pa.scalar(None, values.type), values).cast(pa.string())
    return pc.replace_with_mask(near, far, pa.array(texts, pa.string()))
