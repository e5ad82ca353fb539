"""The values of events as Arrow again: the inverse of how `webhook.format.json_value` writes them."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

_DATE = r"(\d{4}|[+-]\d{4,})-\d\d-\d\d"
_TIME = r"([01]\d|2[0-3]):\d\d:\d\d(\.\d+)?"
_MOMENT = re.compile(rf"{_DATE}(T{_TIME}Z?)?|{_TIME}")
"""As events have them; the text of a value that no type holds looks different."""
_FLOATS = frozenset({"NaN", "Infinity", "-Infinity"})


def is_unfit(value: Any, kind: pa.DataType) -> bool:
    """Whether a value stands as text because its column's type cannot hold it, such as `infinity`."""
    if not isinstance(value, str) or pa.types.is_string(kind) or pa.types.is_binary(kind):
        return False
    if pa.types.is_floating(kind):
        return value not in _FLOATS
    if pa.types.is_temporal(kind) and not pa.types.is_duration(kind):
        return _MOMENT.fullmatch(value) is None
    return True


def parse(event: bytes) -> dict[str, Any]:
    """An event with all digits of its numbers, for `to_arrow`."""
    found: dict[str, Any] = json.loads(event, parse_float=Decimal, parse_int=_number)
    return found


def _number(text: str) -> int | float:
    # Floats that are whole have no point; as an integer, minus zero would lose its sign.
    return -0.0 if text == "-0" else int(text)


def to_arrow(values: Sequence[Any], kind: pa.DataType) -> pa.Array[Any]:
    """Values that `parse` read. Raises TypeError for a type that cannot be read back."""
    if pa.types.is_floating(kind):
        return pa.array([None if value is None else float(value) for value in values], kind)
    if pa.types.is_decimal(kind):
        return pa.array([None if value is None else Decimal(value) for value in values], kind)
    if pa.types.is_duration(kind):
        return pa.array(values, pa.int64()).cast(kind)
    if pa.types.is_temporal(kind):
        return _moments(values, kind)
    if pa.types.is_binary(kind):
        return pa.array([None if value is None else base64.b64decode(value) for value in values], kind)
    if pa.types.is_list(kind):
        items = to_arrow([item for value in values for item in value or ()], kind.value_type)
        ends = np.cumsum([0, *(len(value or ()) for value in values)])
        mask = pa.array([value is None for value in values], pa.bool_())
        return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), items, type=kind, mask=mask)
    if pa.types.is_struct(kind):
        children = [to_arrow([(value or {}).get(field.name) for value in values], field.type) for field in kind]
        return pa.StructArray.from_arrays(
            children, fields=list(kind), mask=pa.array([value is None for value in values], pa.bool_())
        )
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_string(kind):
        return pa.array(values, kind)
    raise TypeError(f"type {kind} cannot be read back")


def _moments(values: Sequence[Any], kind: pa.DataType) -> pa.Array[Any]:
    if pa.types.is_time(kind):
        # Arrow reads no times of day.
        days = [None if value is None else f"1970-01-01T{value}" for value in values]
        return pa.array(days, pa.string()).cast(pa.timestamp(kind.unit)).cast(kind)
    text = pa.array(values, pa.string())
    try:
        return text.cast(kind)
    except pa.ArrowInvalid:
        # Arrow reads the years 0 to 9999 only.
        unit = "D" if pa.types.is_date(kind) else kind.unit
        plain = [None if value is None else value.removesuffix("Z").removeprefix("+") for value in values]
        ticks = np.array([value or "NaT" for value in plain], f"datetime64[{unit}]").astype(np.int64)
        absent = np.array([value is None for value in plain], bool)
        numbers = pa.array(ticks.astype(np.int32) if unit == "D" else ticks, mask=absent)
        return numbers.cast(kind)
