"""Columns of JSON values made into typed Arrow columns: what the API answers and what events hold.

JSON knows no storage classes. A BLOB is text in base64 that only the declared type tells from TEXT, and 2.0 is sent as
2: a REAL column makes it a float again, any other column takes the number as it stands.
"""

from __future__ import annotations

import binascii
import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from tailrace.schema import Column
from tailrace.source.rqlite.catalog import INFERRED
from tailrace.source.sqlite.value import cells_of
from tailrace.sqlite.affinity import Affinity, affinity_of, read_column
from tailrace.sqlite.affinity import DecodedColumn as Typed

_INT64 = range(-(2**63), 2**63)
_NONE = type(None)


def read_values(column: Column, values: Sequence[Any], *, encoded: bool) -> Typed:
    """One column. With `encoded`, text in a BLOB column is base64; without, blobs are bytes.

    A value that the type cannot hold is null, and its exact text stands beside it. Cells are looked at one by one only
    in a column that does hold such a value.
    """
    kinds = set(map(type, values)) - {_NONE}
    if pa.types.is_string(column.type):
        if column.upstream_type == INFERRED and kinds - {str}:
            values = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
            kinds = {str}
        if kinds <= {str}:
            return Typed(pa.array(values, pa.string()), None)
    elif pa.types.is_int64(column.type) and kinds <= {int}:
        try:
            return Typed(pa.array(values, pa.int64()), None)
        except OverflowError:
            pass  # a float without a fraction that is larger than any integer of SQLite
    elif pa.types.is_float64(column.type) and kinds <= {int, float}:
        try:
            return Typed(pa.array(values, pa.float64()), None)
        except pa.ArrowInvalid:
            pass  # an integer that a float cannot hold exactly
    elif pa.types.is_binary(column.type):
        if kinds <= {bytes}:
            return Typed(pa.array(values, pa.binary()), None)
        if encoded and kinds <= {str}:
            try:
                octets = [None if value is None else binascii.a2b_base64(value, strict_mode=True) for value in values]
                return Typed(pa.array(octets, pa.binary()), None)
            except ValueError:
                pass  # text that stands in a BLOB column
    return _read_mixed(column, values, encoded=encoded)


def _read_mixed(column: Column, values: Sequence[Any], *, encoded: bool) -> Typed:
    is_real = affinity_of(column.upstream_type) is Affinity.REAL or column.upstream_type == INFERRED
    is_blob = encoded and pa.types.is_binary(column.type)

    def stored(value: Any) -> Any:
        if isinstance(value, int):
            return float(value) if (is_real and pa.types.is_float64(column.type)) or value not in _INT64 else int(value)
        return _octets(value) if is_blob and isinstance(value, str) else value

    return read_column(cells_of([stored(value) for value in values]), column.type)


def _octets(text: str) -> bytes | str:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        return text
