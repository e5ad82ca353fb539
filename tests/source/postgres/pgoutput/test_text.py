"""Text columns at their edges: nothing in them, only nulls, slices of a larger array."""

from __future__ import annotations

from fractions import Fraction

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.source.postgres.pgoutput.text import parse, parse_decimals

SAMPLES: dict[pa.DataType, tuple[str, str]] = {
    pa.bool_(): ("t", "f"),
    pa.int16(): ("1", "-2"),
    pa.int64(): ("1", "-2"),
    pa.float32(): ("1.5", "-Infinity"),
    pa.float64(): ("1.5", "NaN"),
    pa.decimal128(6, 2): ("1.50", "NaN"),
    pa.string(): ("", "🦫"),
    pa.binary(): ("\\x", "\\x00ff"),
    pa.date32(): ("2026-11-15", "infinity"),
    pa.timestamp("us"): ("2026-11-15 19:34:01", "0044-03-15 12:00:00 BC"),
    pa.timestamp("us", "UTC"): ("2026-11-15 19:34:01.5+00", "12026-01-01 00:00:00+00"),
    pa.list_(pa.int32()): ("{1,NULL}", "{{1}}"),
    pa.list_(pa.string()): ("{}", '{"a b",NULL}'),
    pa.list_(pa.date32()): ("{2026-11-15}", "{infinity}"),
}


@pytest.mark.parametrize("type_", SAMPLES, ids=str)
def test_a_column_without_rows_or_with_nulls_alone_is_read(type_: pa.DataType) -> None:
    for texts in (pa.array([], pa.string()), pa.nulls(3, pa.string()), pa.array(["x", None], pa.string())[1:]):
        array, unfit = parse(texts, type_)
        array.validate(full=True)
        assert array.type == type_
        assert array.null_count == len(texts) == len(array)
        assert unfit is None


@pytest.mark.parametrize("type_", SAMPLES, ids=str)
def test_a_slice_is_read_as_the_whole_is(type_: pa.DataType) -> None:
    texts = pa.array([*SAMPLES[type_], None, *reversed(SAMPLES[type_]), None], pa.string())
    whole, whole_unfit = parse(texts, type_)
    for begin in range(len(texts)):
        array, unfit = parse(texts[begin:], type_)
        array.validate(full=True)
        assert str(array) == str(whole[begin:])
        assert (unfit or pa.nulls(len(array), pa.string())).to_pylist() == (
            (whole_unfit or pa.nulls(len(whole), pa.string()))[begin:].to_pylist()
        )


@pytest.mark.parametrize(
    ("text", "type_"),
    [
        ("1.5", pa.int32()),
        ("99999999999", pa.int32()),
        ("1.555", pa.decimal128(6, 2)),
        ("12345.00", pa.decimal128(6, 2)),
        ("nan", pa.decimal128(6, 2)),
        ("15.11.2026", pa.date32()),
        ("abc", pa.binary()),
        ("\\xabc", pa.binary()),
        ("{1,x}", pa.list_(pa.int32())),
        ('{"unclosed}', pa.list_(pa.string())),
    ],
)
def test_text_of_another_form_is_refused_rather_than_guessed_at(text: str, type_: pa.DataType) -> None:
    with pytest.raises(ValueError):
        parse(pa.array([text]), type_)


@given(
    st.from_regex(r"-?(0|[1-9][0-9]{0,44})(\.[0-9]{1,45}0{0,40})?", fullmatch=True).filter(str.isascii),
    st.integers(1, 38).flatmap(lambda precision: st.tuples(st.just(precision), st.integers(0, precision))),
)
def test_a_number_is_read_or_kept_as_text_whatever_stands_next_to_it(said: str, type_: tuple[int, int]) -> None:
    precision, scale = type_
    units = Fraction(said) * 10**scale
    is_held = units.denominator == 1 and abs(units) < 10**precision
    for texts in ([said], [said, "NaN"], [said, "1" * 60]):
        parsed = parse_decimals(pa.array(texts, pa.string()), pa.decimal128(precision, scale))
        read = parsed.array[0].as_py()
        assert (read is not None) == is_held
        assert read is None or Fraction(read) * 10**scale == units
        unfit = None if parsed.unfit is None else parsed.unfit[0].as_py()
        assert unfit == (None if is_held else said)


def test_a_text_that_is_no_number_is_refused() -> None:
    for said in ("abc", "1.2.3", "", "1e5"):
        with pytest.raises(ValueError):
            parse_decimals(pa.array([said, "NaN"], pa.string()), pa.decimal128(6, 2))
