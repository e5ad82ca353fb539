"""Lists, structs and maps as JSON, a whole column at a time.

Numbers are numbers, but decimals and what JSON has no number for (NaN, the infinities) are texts; bytes are hex digits;
dates and times are as in a column of their own. A map is a list of pairs.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.destination.sqlite.text import text_of

_CONTROLS = [chr(code) for code in range(0x20)]


def json_text(values: pa.Array[Any]) -> pa.Array[Any]:
    """Each value as JSON, a null as `null`."""
    kind = values.type
    if pa.types.is_list(kind):
        text = _list(values, json_text(pc.list_flatten(values)), pc.list_value_length(values))
    elif pa.types.is_map(kind):
        text = _map(values)
    elif pa.types.is_struct(kind):
        members = [
            pc.binary_join_element_wise(json.dumps(field.name, ensure_ascii=False), json_text(values.field(at)), ":")
            for at, field in enumerate(kind)
        ]
        text = (
            _around("{", pc.binary_join_element_wise(*members, ","), "}") if members else pa.array(["{}"] * len(values))
        )
    elif pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        text = values.cast(pa.string())
    elif pa.types.is_floating(kind):
        text = _floats(values)
    elif pa.types.is_string(kind):
        text = _around('"', _escaped(values), '"')
    elif pa.types.is_binary(kind):
        digits = [None if value is None else value.hex() for value in values.to_pylist()]
        text = _around('"', pa.array(digits, pa.string()), '"')
    else:
        text = _around('"', text_of(values), '"')
    return pc.fill_null(pc.if_else(values.is_valid(), text, None), "null")


def _around(start: str, text: pa.Array[Any], end: str) -> pa.Array[Any]:
    return pc.binary_join_element_wise(start, text, end, "")


def _escaped(text: pa.Array[Any]) -> pa.Array[Any]:
    for letter in ("\\", '"'):
        text = pc.replace_substring(text, letter, "\\" + letter)
    if pc.any(pc.match_substring_regex(text, "[\\x00-\\x1f]")).as_py():
        for letter in _CONTROLS:
            text = pc.replace_substring(text, letter, json.dumps(letter)[1:-1])
    return text


def _floats(values: pa.Array[Any]) -> pa.Array[Any]:
    odd = pc.if_else(pc.is_nan(values), '"NaN"', pc.if_else(pc.greater(values, 0), '"Infinity"', '"-Infinity"'))
    return pc.if_else(pc.is_finite(values), values.cast(pa.string()), odd)


def _list(values: pa.Array[Any], items: pa.Array[Any], lengths: pa.Array[Any]) -> pa.Array[Any]:
    ends = np.cumsum(pc.fill_null(lengths, 0).to_numpy(zero_copy_only=False), dtype=np.int32)
    offsets = pa.array(np.concatenate([np.zeros(1, np.int32), ends]))
    return _around("[", pc.binary_join(pa.ListArray.from_arrays(offsets, items), ","), "]")


def _map(values: pa.Array[Any]) -> pa.Array[Any]:
    kind = values.type
    pair = pa.struct([pa.field("key", kind.key_type), pa.field("value", kind.item_type)])
    pairs = values.cast(pa.list_(pair))
    flat = pc.list_flatten(pairs)
    both = pc.binary_join_element_wise(json_text(flat.field(0)), json_text(flat.field(1)), ",")
    return _list(values, _around("[", both, "]"), pc.list_value_length(pairs))
