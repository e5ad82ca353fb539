"""How values look in events.

Numbers are numbers, decimals with every digit; what JSON has no number for is "NaN", "Infinity", "-Infinity". Dates and
times are ISO 8601, in UTC with a Z; a duration is the number of its units. Bytes are base64.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.model.value_text import Writer, escape, quote, text_of


class EventWriter(Writer):
    """What the formats have in common."""

    nan = "NaN"
    infinity = "Infinity"

    def decimals(self, column: pa.Array[Any]) -> pa.Array[Any]:
        return text_of(column)

    def moments(self, column: pa.Array[Any]) -> pa.Array[Any]:
        if pa.types.is_duration(column.type):
            return column.cast(pa.int64()).cast(pa.string())
        return super().moments(column)

    def exact(self, texts: pa.Array[Any], kind: pa.DataType) -> pa.Array[Any]:
        """The exact texts of values that a column of this type cannot hold; nulls stay."""
        return self.texts(texts)


# What Go's encoding/json escapes in addition: HTML, and the line ends of JavaScript. Bytes that are not UTF-8 become an
# escaped U+FFFD; one that was in the text itself can no longer be distinguished from these.
_GO_ESCAPES = ("<", ">", "&", "\u2028", "\u2029", "\ufffd")
_GO_EXPONENT = 21
_WHOLE = r"^-?[0-9]+$"
_NUMBER = r"^-?[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?$"
_SQLITE_TYPES = frozenset({pa.int64(), pa.float64(), pa.string()})


class GoWriter(EventWriter):
    """As Go writes JSON, to the byte."""

    def texts(self, column: pa.Array[Any]) -> pa.Array[Any]:
        text = escape(column)
        if pc.any(pc.match_substring_regex(text, f"[{''.join(_GO_ESCAPES)}]")).as_py():
            for letter in _GO_ESCAPES:
                text = pc.replace_substring(text, letter, f"\\u{ord(letter):04x}")
        return quote(text)

    def name(self, name: str) -> str:
        text: str = self.texts(pa.array([name], pa.string()))[0].as_py()
        return text

    def floats(self, column: pa.Array[Any]) -> pa.Array[Any]:
        """Arrow turns to exponents at 1e10 already, Go at 1e21; below 1e-6 both do."""
        text = super().floats(column)
        large = pc.fill_null(pc.match_substring(text, "e+"), False)
        if not pc.any(large).as_py():
            return text
        return pc.replace_with_mask(text, large, _expanded(text.filter(large)))

    def exact(self, texts: pa.Array[Any], kind: pa.DataType) -> pa.Array[Any]:
        """SQLite keeps numbers in any column. Text that looks like a number is one, unless the column has bytes."""
        plain = super().exact(texts, kind)
        if kind not in _SQLITE_TYPES:
            return plain
        is_number = pc.match_substring_regex(texts, _NUMBER)
        is_whole = pc.match_substring_regex(texts, _WHOLE)
        real = pc.if_else(pc.and_not(is_number, is_whole), texts, None).cast(pa.float64())
        return pc.if_else(is_whole, texts, pc.if_else(is_number, self.floats(real), plain))


def _expanded(text: pa.Array[Any]) -> pa.Array[Any]:
    """Numbers like -1.25e+10 without their exponent, unless it is too large for that."""
    parts = pc.split_pattern(text, "e+")
    exponent = pc.list_element(parts, 1).cast(pa.int32())
    mantissa = pc.list_element(parts, 0)
    sign = pc.if_else(pc.starts_with(mantissa, "-"), "-", "")
    digits = pc.replace_substring_regex(mantissa, "[-.]", "")
    for each in pc.unique(exponent).to_pylist():
        if each >= _GO_EXPONENT:
            continue
        padded = pc.utf8_rpad(digits, each + 1, "0")
        rest = pc.utf8_slice_codeunits(padded, each + 1)
        point = pc.if_else(pc.equal(rest, ""), "", ".")
        plain = pc.binary_join_element_wise(sign, pc.utf8_slice_codeunits(padded, 0, each + 1), point, rest, "")
        text = pc.if_else(pc.equal(exponent, each), plain, text)
    return text
