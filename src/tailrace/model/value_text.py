"""Convert Arrow columns to JSON or plain text, many rows at a time."""

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


class Writer:
    """Writes values as JSON. This is the default form; subclasses override methods to change it.

    Numbers are numbers (decimals with all their digits; NaN and the infinities are strings), times are ISO 8601,
    bytes are base64. A struct is an object, a map a list of pairs.
    """

    nan = "nan"
    infinity = "inf"

    def value(self, column: pa.Array[Any]) -> pa.Array[Any]:
        """Every value as JSON, nulls as `null`. Raises TypeError for a type that has no JSON form."""
        return pc.fill_null(self._present(column, column.type), "null")

    def _present(self, column: pa.Array[Any], kind: pa.DataType) -> pa.Array[Any]:
        if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
            return column.cast(pa.string())
        if pa.types.is_string(kind):
            return self.texts(column)
        if pa.types.is_floating(kind):
            return self.floats(column)
        if pa.types.is_decimal(kind):
            return self.decimals(column)
        if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
            return self.moments(column)
        if pa.types.is_binary(kind):
            return self.octets(column)
        if pa.types.is_list(kind):
            return self._lists(column, self.value(pc.list_flatten(column)))
        if pa.types.is_map(kind):
            return self._maps(column)
        if pa.types.is_struct(kind):
            members = {field.name: self.value(column.field(at)) for at, field in enumerate(kind)}
            return pc.if_else(column.is_valid(), self.join(members, len(column)), None)
        plain = _plain(column, kind)
        if plain is column:
            raise TypeError(f"type {kind} has no JSON form")
        return self._present(plain, plain.type)

    def texts(self, column: pa.Array[Any]) -> pa.Array[Any]:
        """Strings as JSON. Here and in the methods below, nulls stay null."""
        return quote(escape(column))

    def floats(self, column: pa.Array[Any]) -> pa.Array[Any]:
        text, finite = column.cast(pa.string()), pc.is_finite(column)
        if pc.all(finite).as_py():
            return text
        infinite = pc.if_else(pc.greater(column, 0), f'"{self.infinity}"', f'"-{self.infinity}"')
        return pc.if_else(finite, text, pc.if_else(pc.is_nan(column), f'"{self.nan}"', infinite))

    def decimals(self, column: pa.Array[Any]) -> pa.Array[Any]:
        return column.cast(pa.string())

    def moments(self, column: pa.Array[Any]) -> pa.Array[Any]:
        """Dates, times, timestamps and durations as JSON."""
        return quote(text_of(column))

    def octets(self, column: pa.Array[Any]) -> pa.Array[Any]:
        encoded = [None if value is None else base64.b64encode(value).decode() for value in column.to_pylist()]
        return quote(pa.array(encoded, pa.string()))

    def name(self, name: str) -> str:
        """The name of a member, as JSON."""
        return json.dumps(name, ensure_ascii=False)

    def join(
        self, members: Mapping[str, pa.Array[Any]], count: int, left_out: npt.NDArray[np.bool_] | None = None
    ) -> pa.Array[Any]:
        """One object for each of `count` rows, from the JSON of its members.

        `left_out` is a (rows, members) mask of the members that a row does not have.
        """
        if left_out is None:
            left_out = np.zeros((count, len(members)), bool)
        parts: list[Any] = ["{"]
        has_member = np.zeros(count, bool)
        for (name, text), lacks in zip(members.items(), left_out.T, strict=True):
            prefix = [f"{self.name(name)}:", f",{self.name(name)}:", ""]
            choice = np.where(lacks, 2, has_member)
            if lacks.any():
                text = pc.if_else(pa.array(lacks), "", text)
            same = bool((choice == choice[:1]).all())
            parts += [prefix[choice[0]] if count and same else pa.array(prefix).take(pa.array(choice)), text]
            has_member = has_member | ~lacks
        return pc.binary_join_element_wise(*parts, "}", "") if members else pa.repeat("{}", count)

    def _lists(self, column: pa.Array[Any], items: pa.Array[Any]) -> pa.Array[Any]:
        """Each list of the column as JSON, from the JSON of all items."""
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
        joined = pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), items), ",")
        return pc.if_else(column.is_valid(), pc.binary_join_element_wise("[", joined, "]", ""), None)

    def _maps(self, column: pa.Array[Any]) -> pa.Array[Any]:
        kind = column.type
        pairs = column.cast(pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)])))
        key, value = (self.value(part) for part in pc.list_flatten(pairs).flatten())
        return self._lists(pairs, pc.binary_join_element_wise("[", key, ",", value, "]", ""))


PLAIN = Writer()


def object_text(
    columns: Mapping[str, pa.Array[Any]], *, left_out: npt.NDArray[np.bool_] | None = None
) -> pa.Array[Any]:
    """One JSON object per row. `left_out` is a (rows, columns) mask of the members that a row does not have."""
    if not columns:
        raise ValueError("an object needs at least one member")
    count = len(next(iter(columns.values())))
    return PLAIN.join({name: PLAIN.value(column) for name, column in columns.items()}, count, left_out)


def quote(text: pa.Array[Any]) -> pa.Array[Any]:
    return pc.binary_join_element_wise('"', text, '"', "")


def escape(text: pa.Array[Any]) -> pa.Array[Any]:
    """Escape strings for JSON, without the surrounding quotes."""
    text = pc.replace_substring(text, "\\", "\\\\")
    text = pc.replace_substring(text, '"', '\\"')
    if pc.any(pc.match_substring_regex(text, _CONTROL)).as_py():
        for code in range(0x20):
            text = pc.replace_substring(text, chr(code), json.dumps(chr(code))[1:-1])
    return text


def _plain(column: pa.Array[Any], kind: pa.DataType) -> pa.Array[Any]:
    """The same values in an Arrow type that `Writer` handles; the column itself if none is needed."""
    if isinstance(kind, pa.BaseExtensionType):
        return column.storage
    if pa.types.is_dictionary(kind):
        return column.dictionary_decode()
    if pa.types.is_null(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return column.cast(pa.string())
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind):
        return column.cast(pa.binary())
    if pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return column.cast(pa.list_(kind.value_type))
    return column


# Decimals, dates and times as text that reads back to the same value.


def text_of(values: pa.Array[Any]) -> pa.Array[Any]:
    """Numbers, dates and times as text, in ISO 8601; nulls stay null."""
    kind = values.type
    if pa.types.is_decimal(kind):
        return _decimals(values)
    if pa.types.is_date64(kind):
        return text_of(values.cast(pa.date32()))
    if pa.types.is_date(kind):
        return _moments(values, values.view(pa.int32()), "D")
    if pa.types.is_timestamp(kind):
        # Remove the time zone, which is always UTC: Arrow prints timestamps without one many times faster.
        local = values.cast(pa.timestamp(kind.unit)) if kind.tz else values
        text = pc.replace_substring(_moments(local, values.view(pa.int64()), kind.unit), " ", "T", max_replacements=1)
        return pc.binary_join_element_wise(text, "Z", "") if kind.tz else text
    return values.cast(pa.string())


def _decimals(values: pa.Array[Any]) -> pa.Array[Any]:
    text = values.cast(pa.string())
    scientific = pc.fill_null(pc.match_substring(text, "E"), False)
    if not pc.any(scientific).as_py():
        return text
    # Arrow uses scientific notation for values near zero, which are rare.
    plain = pa.array([f"{value:f}" for value in values.filter(scientific).to_pylist()], pa.string())
    return pc.replace_with_mask(text, scientific, plain)


def _moments(values: pa.Array[Any], ticks: pa.Array[Any], unit: str) -> pa.Array[Any]:
    """Dates or timestamps without a zone. Years before 0 or after 9999 have a sign and as many digits as they need."""
    if unit == "ns":
        return values.cast(pa.string())
    first, end = (
        int(np.datetime64(year - 1970, "Y").astype(f"datetime64[{unit}]").astype(int)) for year in (0, 10_000)
    )
    count = ticks.cast(pa.int64())
    far = pc.fill_null(pc.or_(pc.less(count, first), pc.greater_equal(count, end)), False)
    if not pc.any(far).as_py():
        return values.cast(pa.string())
    ticks_far = count.filter(far).to_numpy()
    # The smallest of all is no instant for numpy; in every unit the text of the next one ends with a 3.
    is_least = ticks_far == np.iinfo(np.int64).min
    instants = (ticks_far + is_least).astype(f"datetime64[{unit}]")
    years = instants.astype("datetime64[Y]").astype(np.int64) + 1970
    rests = [text.lstrip("-").split("-", 1)[1] for text in np.datetime_as_string(instants)]
    rests = [f"{rest[:-1]}2" if least else rest for rest, least in zip(rests, is_least, strict=True)]
    texts = [f"{'-' if year < 0 else '+'}{abs(year):04}-{rest}" for year, rest in zip(years, rests, strict=True)]
    near = pc.if_else(far, pa.scalar(None, values.type), values).cast(pa.string())
    return pc.replace_with_mask(near, far, pa.array(texts, pa.string()))
