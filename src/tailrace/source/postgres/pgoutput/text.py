"""Parses Postgres's text output into typed Arrow arrays.

The log (pgoutput sends text) and the copy (types without an Arrow form are cast to text) share one parser, so that a
value is the same from either. The Arrow type alone decides how a text is parsed. The texts must come from a session
with the settings of `copy_query.SESSION`.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.source.postgres.pgoutput import instant

# Array literals (`{1,NULL,"a b"}`) as Arrow lists of their elements' text.
#
# Literals without quotes, which is most arrays of numbers, dates and plain words, are split natively; the others
# are read one by one. An array that a list cannot hold becomes null: several dimensions, a lower bound other than 1.

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
    # Splitting the text of an empty array would give one empty element, so empty arrays are left out.
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


Bytes = npt.NDArray[np.uint8]
Indexes = npt.NDArray[np.int64]


class Parsed(NamedTuple):
    """A column read from text. `unfit` holds, at the rows whose value the type cannot hold, the text itself.

    There the array is null; `unfit` is null everywhere else, and None when every value fits.
    """

    array: pa.Array[Any]
    unfit: pa.Array[Any] | None


def slice_texts(
    data: pa.Buffer, starts: Indexes, lengths: Indexes, present: npt.NDArray[np.bool_] | None
) -> pa.Array[Any]:
    """The strings at `starts` of `data` as one Arrow string array; null, and of length 0, where not `present`.

    `starts` ascend and strings do not overlap. Nothing checks that they are UTF-8.
    """
    count = len(starts)
    # One array over the unchanged buffer holds the strings and the gaps between them in turn: taking every other
    # value is a single native pass.
    bounds = np.empty(2 * count, np.int32)
    bounds[0::2] = starts
    np.add(starts, lengths, out=bounds[1::2], casting="unsafe")
    woven = pa.Array.from_buffers(pa.string(), max(2 * count - 1, 0), [None, pa.py_buffer(bounds), data])
    texts = woven.take(pa.array(np.arange(0, 2 * count, 2, dtype=np.int32)))
    return texts if present is None else with_nulls(texts, present)


def with_nulls(array: pa.Array[Any], present: npt.NDArray[np.bool_]) -> pa.Array[Any]:
    """The same flat array, null where not `present`."""
    _, *buffers = array.buffers()
    return pa.Array.from_buffers(array.type, len(array), [pack(present), *buffers], offset=array.offset)


def pack(present: npt.NDArray[np.bool_]) -> pa.Buffer:
    """An Arrow validity bitmap."""
    return pa.py_buffer(np.packbits(present, bitorder="little"))


def parse(texts: pa.Array[Any], type_: pa.DataType) -> Parsed:
    """`texts` as `type_`. Values that `type_` cannot hold are returned in `unfit`.

    Raises ValueError (pyarrow's ArrowInvalid is one) for text that is not of this type at all, and
    UnicodeDecodeError for text that is not UTF-8.
    """
    if pa.types.is_string(type_):
        return Parsed(_checked(texts), None)
    if pa.types.is_list(type_):
        return _parse_lists(texts, type_)
    if pa.types.is_boolean(type_):
        return Parsed(_parse_booleans(texts), None)
    if pa.types.is_binary(type_):
        return Parsed(_parse_hex(texts), None)
    try:
        return Parsed(texts.cast(type_), None)
    except pa.ArrowInvalid:
        return _parse_odd(texts, type_)


def parse_decimals(texts: pa.Array[Any], type_: pa.Decimal128Type) -> Parsed:
    """Any numbers as a decimal type; what it does not hold exactly is returned in `unfit`. Whether a number is held
    does not depend on the others. Raises ValueError for text that is not a number.
    """
    # Arrow's own cast takes some numbers that are too large, and makes others of them.
    shortest = _without_zeros(texts, type_.scale)
    held = pc.match_substring_regex(shortest, _digits_of(type_))
    unfit = pc.if_else(held, None, texts)
    if pc.all(pc.match_substring_regex(unfit, _ANY_NUMBER)).as_py() is False:
        raise ValueError("text that is not a number")
    return Parsed(pc.if_else(held, shortest, None).cast(type_), unfit if unfit.null_count < len(unfit) else None)


_ANY_NUMBER: Final = r"^(NaN|-?(Infinity|[0-9]+(\.[0-9]*)?))$"


def _digits_of(type_: pa.Decimal128Type) -> str:
    """The pattern of the numbers that the type holds."""
    whole = type_.precision - type_.scale
    before = rf"-?(0|[0-9]{{1,{whole}}})" if whole else "-?0"
    return rf"^{before}(\.[0-9]{{1,{type_.scale}}})?$" if type_.scale else f"^{before}$"


def _without_zeros(texts: pa.Array[Any], scale: int) -> pa.Array[Any]:
    """Numbers without the zeros past this many digits after the point, of which Arrow reads only some."""
    past = rf"^(-?[0-9]+\.[0-9]{{{scale}}})0+$" if scale else r"^(-?[0-9]+)\.0+$"
    return pc.replace_substring_regex(texts, past, r"\1")


def _checked(texts: pa.Array[Any]) -> pa.Array[Any]:
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid as error:
        # Arrow's message quotes the value.
        raise UnicodeDecodeError("utf-8", b"", 0, 0, "invalid byte sequence") from error
    return texts


def view(texts: pa.Array[Any]) -> tuple[Bytes, npt.NDArray[np.int32]]:
    """The bytes of a string array and the bounds of its values in them, without a copy."""
    _, bounds, data = texts.buffers()
    if bounds is None or data is None:
        return np.empty(0, np.uint8), np.zeros(len(texts) + 1, np.int32)
    return np.frombuffer(data, np.uint8), np.frombuffer(bounds, np.int32, len(texts) + 1, texts.offset * 4)


def validity(array: pa.Array[Any]) -> pa.Buffer | None:
    """The validity bitmap of an array, moved to begin at its first row."""
    if not array.null_count:
        return None
    return pack(pc.is_valid(array).to_numpy(zero_copy_only=False))


def _parse_booleans(texts: pa.Array[Any]) -> pa.Array[Any]:
    data, bounds = view(texts)
    if not len(data):
        return pa.nulls(len(texts), pa.bool_())
    # A null at the end may begin where the data ends.
    true = data[np.minimum(bounds[:-1], len(data) - 1)] == ord("t")
    return pa.Array.from_buffers(pa.bool_(), len(texts), [validity(texts), pack(true)])


def _parse_hex(texts: pa.Array[Any]) -> pa.Array[Any]:
    """`\\x0aff` as bytes."""
    data, bounds = view(texts)
    starts = bounds[:-1].astype(np.int64)
    lengths = np.diff(bounds).astype(np.int64)
    present = pc.is_valid(texts).to_numpy(zero_copy_only=False)
    if not present.any():
        return pa.nulls(len(texts), pa.binary())
    if lengths[present].min() < 2 or (data[starts[present]] != ord("\\")).any():
        raise ValueError("bytea is not in hex format")
    skipped = np.where(present, 2, 0)
    digits = slice_texts(texts.buffers()[2], starts + skipped, lengths - skipped, None)
    packed, digit_bounds = view(digits)
    raw = binascii.unhexlify(packed[digit_bounds[0] : digit_bounds[-1]].data)
    halves = pa.py_buffer((digit_bounds - digit_bounds[0]) // 2)
    return pa.Array.from_buffers(pa.binary(), len(texts), [validity(texts), halves, pa.py_buffer(raw)])


def _parse_odd(texts: pa.Array[Any], type_: pa.DataType) -> Parsed:
    """A column with texts that Arrow's own cast refused: those are parsed one by one, each distinct text once."""
    regular, read = _reading(type_)
    odd = pc.invert(pc.match_substring_regex(texts, regular))
    distinct = pc.if_else(odd, texts, None).dictionary_encode()
    values = pa.array([read(text) for text in distinct.dictionary.to_pylist()], pa.int64())
    fitting = pc.if_else(odd, None, texts).cast(type_)
    if values.null_count < len(values):
        # Decimals have no odd values that fit, so what is left are counts of days or microseconds.
        count_type = pa.int32() if pa.types.is_date32(type_) else pa.int64()
        rescued = values.cast(count_type).take(distinct.indices).view(type_)
        fitting = pc.coalesce(fitting, rescued)
    unfit = pc.and_(pc.is_valid(texts), pc.is_null(fitting))
    return Parsed(fitting, pc.if_else(unfit, texts, None) if pc.any(unfit).as_py() else None)


def _reading(type_: pa.DataType) -> tuple[str, Callable[[str], int | None]]:
    """The pattern of texts that Arrow's own cast can read, and a parser for the others."""
    if pa.types.is_date32(type_):
        return r"^\d{4}-\d\d-\d\d$", instant.parse_day
    if pa.types.is_timestamp(type_):
        return r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d+)?(\+00)?$", instant.parse_microsecond
    if pa.types.is_decimal128(type_):
        return r"^-?[0-9.]+$", _read_special_number
    raise ValueError(f"text that is not {type_}")


def _read_special_number(text: str) -> None:
    if text not in ("NaN", "Infinity", "-Infinity"):
        raise ValueError("text that is not a number")


def _parse_lists(texts: pa.Array[Any], type_: pa.ListType) -> Parsed:
    element = type_.value_type
    texts = _checked(texts)
    lists = split(texts)
    items, unfit_items = parse(lists.flatten(), element)
    bounds = lists.offsets
    held = pc.is_valid(lists)
    array = pa.ListArray.from_arrays(bounds, items, type=type_, mask=pc.invert(held))
    if unfit_items is not None:
        parents = lists.value_parent_indices().filter(pc.is_valid(unfit_items)).to_numpy()
        broken = np.zeros(len(texts), bool)
        broken[parents] = True
        held = pc.and_(held, pa.array(~broken))
        array = pc.if_else(held, array, None)
    unfit = pc.and_(pc.is_valid(texts), pc.invert(held))
    return Parsed(array, pc.if_else(unfit, texts, None) if pc.any(unfit).as_py() else None)
