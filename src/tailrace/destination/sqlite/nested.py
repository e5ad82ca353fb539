"""Lists, structs and maps as JSON, a whole column at a time.

Numbers are numbers, but decimals and what JSON has no number for (NaN, the infinities) are texts; bytes are hex digits;
dates and times are as in a column of their own. A map is a list of pairs.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from tailrace.jsontext import Writer, quote
from tailrace.plaintext import text_of


class _KeptWriter(Writer):
    nan = "NaN"
    infinity = "Infinity"

    def decimals(self, column: pa.Array[Any]) -> pa.Array[Any]:
        return quote(text_of(column))

    def octets(self, column: pa.Array[Any]) -> pa.Array[Any]:
        return quote(pa.array([None if value is None else value.hex() for value in column.to_pylist()], pa.string()))


_KEPT = _KeptWriter()


def json_text(values: pa.Array[Any]) -> pa.Array[Any]:
    """Each value as JSON, a null as `null`."""
    return _KEPT.value(values)
