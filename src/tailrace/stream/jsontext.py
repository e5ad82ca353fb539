"""Arrow columns as JSON objects, many rows at a time."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_CONTROL = "[\\x00-\\x1f]"


def object_text(
    columns: Mapping[str, pa.Array[Any]], *, left_out: npt.NDArray[np.bool_] | None = None
) -> pa.Array[Any]:
    """One JSON object per row. `left_out`, (rows, columns), names members that a row does not have.

    Numbers are numbers (decimals with all their digits; NaN and the infinities are strings), times are ISO 8601,
    bytes are base64.
    """
    members = []
    for index, (name, column) in enumerate(columns.items()):
        member = pc.binary_join_element_wise(f",{json.dumps(name, ensure_ascii=False)}:", value_text(column), "")
        if left_out is not None and left_out[:, index].any():
            member = pc.if_else(pa.array(left_out[:, index]), "", member)
        members.append(member)
    if not members:
        raise ValueError("an object needs a member")
    # Every member brings its own comma, the first one's goes: skipping nulls instead loses rows that have no member.
    inner = pc.utf8_slice_codeunits(pc.binary_join_element_wise(*members, ""), 1)
    return pc.binary_join_element_wise("{", inner, "}", "")


def value_text(column: pa.Array[Any]) -> pa.Array[Any]:
    """Every value as JSON, nulls as `null`."""
    type_ = column.type
    if pa.types.is_boolean(type_) or pa.types.is_integer(type_) or pa.types.is_decimal(type_):
        text = column.cast(pa.string())
    elif pa.types.is_floating(type_):
        text = column.cast(pa.string())
        text = pc.if_else(pc.is_finite(column), text, _quoted(text))
    elif pa.types.is_string(type_):
        text = _quoted(_escaped(column))
    elif pa.types.is_temporal(type_):
        text = _quoted(_moment(column))
    elif pa.types.is_binary(type_):
        encoded = [None if value is None else base64.b64encode(value).decode() for value in column.to_pylist()]
        text = _quoted(pa.array(encoded, pa.string()))
    elif pa.types.is_list(type_):
        text = _lists(column)
    else:
        raise TypeError(f"no JSON for {type_}")
    return pc.fill_null(text, "null")


def _quoted(text: pa.Array[Any]) -> pa.Array[Any]:
    return pc.binary_join_element_wise('"', text, '"', "")


def _escaped(text: pa.Array[Any]) -> pa.Array[Any]:
    text = pc.replace_substring(text, "\\", "\\\\")
    text = pc.replace_substring(text, '"', '\\"')
    if pc.any(pc.match_substring_regex(text, _CONTROL)).as_py():
        for code in range(0x20):
            text = pc.replace_substring(text, chr(code), json.dumps(chr(code))[1:-1])
    return text


def _moment(column: pa.Array[Any]) -> pa.Array[Any]:
    text = column.cast(pa.string())
    return pc.replace_substring(text, " ", "T", max_replacements=1)


def _lists(column: pa.Array[Any]) -> pa.Array[Any]:
    flat = pc.list_flatten(column)
    offsets = np.concatenate([[0], np.cumsum(pc.fill_null(pc.list_value_length(column), 0).to_numpy())])
    inner = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), value_text(flat))
    joined = pc.binary_join(inner, ",")
    return pc.if_else(column.is_valid(), pc.binary_join_element_wise("[", joined, "]", ""), None)
