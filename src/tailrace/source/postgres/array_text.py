"""Array literals (`{1,NULL,"a b"}`) as Arrow lists of their elements' text.

Literals without quotes, which is most arrays of numbers, dates and plain words, are split natively; the others
are read one by one. What a list cannot hold becomes null: several dimensions, a lower bound other than 1.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_TOKEN = re.compile(r'(?:"((?:[^"\\]|\\.)*)"|([^,"]*))(,|$)', re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)

LIST = pa.list_(pa.string())


def split(literals: pa.Array[Any]) -> pa.ListArray:
    """The elements of each literal. Null for a null and for an array that is not a plain list starting at 1."""
    plain = pc.match_substring_regex(literals, r'^\{[^"\\{}]*\}$')
    fast = _split_plain(pc.if_else(plain, literals, None))
    slow = pc.fill_null(pc.invert(plain), False)
    if not pc.any(slow).as_py():
        return fast
    rows = np.flatnonzero(slow.to_numpy(zero_copy_only=False))
    read = pa.array([_split_quoted(text) for text in literals.take(pa.array(rows)).to_pylist()], LIST)
    # Each row takes its list from the plain ones or, at `rows`, from those read one by one.
    place = np.arange(len(literals))
    place[rows] = len(literals) + np.arange(len(rows))
    return pa.concat_arrays([fast, read]).take(pa.array(place))


def _split_plain(literals: pa.Array[Any]) -> pa.ListArray:
    inner = pc.utf8_slice_codeunits(literals, 1, -1)
    # Splitting the text of an empty array would give one empty element, so it is set aside.
    empty = pc.equal(inner, "")
    lists = pc.split_pattern(pc.if_else(empty, None, inner), ",")
    items = lists.flatten()
    words = pc.if_else(pc.equal(items, "NULL"), None, items)
    bounds = np.zeros(len(literals) + 1, np.int32)
    np.cumsum(pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False), out=bounds[1:])
    return pa.ListArray.from_arrays(pa.array(bounds), words, type=LIST, mask=pc.is_null(literals))


def _split_quoted(literal: str) -> list[str | None] | None:
    if literal.startswith(("[", "{{")):
        return None  # explicit bounds, as in [0:1]={…}, or several dimensions
    inner, at, elements = literal[1:-1], 0, list[str | None]()
    while True:
        token = _TOKEN.match(inner, at)
        if token is None:
            raise ValueError("text that is not an array literal")
        quoted, bare, comma = token.groups()
        if quoted is not None:
            elements.append(_ESCAPE.sub(r"\1", quoted))
        else:
            elements.append(None if bare == "NULL" else bare)
        if not comma:
            return elements
        at = token.end()
