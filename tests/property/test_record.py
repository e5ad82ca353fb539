"""The record format against SQLite's own idea of values, against Turso's bytes, and the columns against the rows."""

from __future__ import annotations

import json
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.capture.change import describe_update
from tailrace.capture.column_type import Affinity, affinity_of, arrow_type, read_column
from tailrace.capture.record import MalformedRecordError, Value, decode, encode, split
from tailrace.capture.record_decode import CellKind, decode_records
from tailrace.capture.record_encode import describe_updates, encode_columns

integers = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    *(st.integers(-(2 ** (8 * size - 1)) - 1, 2 ** (8 * size - 1)) for size in (1, 2, 3, 4, 6)),
)
values = st.one_of(
    st.none(), integers, st.floats(allow_nan=False), st.text(max_size=20), st.binary(max_size=20), st.integers(0, 1)
)
rows = st.lists(values, max_size=12).map(tuple)


texts = st.one_of(st.text(max_size=5), st.integers(40, 200).map("é".__mul__), st.integers(8180, 8190).map("x".__mul__))
kinds_of_column: list[st.SearchStrategy[Value]] = [
    st.none(),
    integers,
    st.integers(-1, 2),
    st.floats(),
    st.sampled_from([0.0, -0.0, float("nan"), float("inf"), 5e-324]),
    texts,
    st.sampled_from(["", "a", "\0", "\udcff"]),
    st.one_of(st.binary(max_size=5), st.integers(40, 200).map(bytes), st.integers(8180, 8190).map(bytes)),
    st.one_of(values, st.floats(), texts),
]


@st.composite
def tables(draw: st.DrawFn, count: int = 1) -> list[list[list[Value]]]:
    """Some tables of the same width and length, each as columns."""
    length, kinds = draw(st.integers(1, 12)), draw(st.lists(st.sampled_from(kinds_of_column), min_size=1, max_size=8))
    column = [
        st.lists(st.one_of(kind, st.none()) if draw(st.booleans()) else kind, min_size=length, max_size=length)
        for kind in kinds
    ]
    return [[draw(values) for values in column] for _ in range(count)]


def exact(row: Any) -> list[Any]:
    return [(type(value), struct.pack(">d", value) if isinstance(value, float) else value) for value in row]


@given(rows)
def test_a_row_comes_back_from_its_record(row: tuple[Value, ...]) -> None:
    assert exact(decode(encode(row))) == exact(row)


@given(st.lists(st.lists(values, min_size=3, max_size=3).map(tuple), min_size=1, max_size=8))
@settings(max_examples=50)
def test_records_hold_what_sqlite_stores_and_reads(stored: list[tuple[Value, ...]]) -> None:
    connection = sqlite3.connect(":memory:")
    try:
        connection.execute("CREATE TABLE t(a, b, c)")
        connection.executemany("INSERT INTO t VALUES (?, ?, ?)", stored)
        read = connection.execute("SELECT a, b, c FROM t ORDER BY rowid").fetchall()
    finally:
        connection.close()
    decoded = decode_records(pa.array([encode(row) for row in stored], pa.binary()), 3)
    columns = [cells.to_list() for cells in decoded.columns]
    assert [exact(row) for row in zip(*columns, strict=True)] == [exact(row) for row in read]


@given(tables())
def test_rows_encoded_at_once_are_the_same_bytes_as_one_by_one(drawn: list[list[list[Value]]]) -> None:
    (table,) = drawn
    encoded = encode_columns(table)
    assert encoded is not None
    assert encoded.to_pylist() == [encode(row) for row in zip(*table, strict=True)]


@given(tables(count=2), st.data())
def test_updates_described_at_once_are_the_same_bytes_as_one_by_one(
    drawn: list[list[list[Value]]], data: st.DataObject
) -> None:
    old, changed = drawn
    kept = data.draw(st.lists(st.booleans(), min_size=len(old[0]), max_size=len(old[0])))
    new = [[a if keep else b for a, b, keep in zip(x, y, kept, strict=True)] for x, y in zip(old, changed, strict=True)]
    described = describe_updates(old, new)
    assert described is not None
    before, after, updates = (records.to_pylist() for records in described)
    assert list(zip(before, after, updates, strict=True)) == [
        describe_update(split(a), split(b)) for a, b in zip(zip(*old, strict=True), zip(*new, strict=True), strict=True)
    ]


@pytest.mark.parametrize("edge", [2**bits + step for bits in (0, 7, 15, 23, 31, 47) for step in (-2, -1, 0, 1)])
def test_integers_encoded_at_once_have_the_smallest_width(edge: int) -> None:
    numbers = [edge, -edge, 0, 1, 2**63 - 1, -(2**63)]
    for column in (numbers, numbers[:1], numbers[:2]):
        encoded = encode_columns([column])
        assert encoded is not None
        assert encoded.to_pylist() == [encode((number,)) for number in column]


def test_an_integer_of_more_than_64_bits_is_refused_at_once_too() -> None:
    with pytest.raises(OverflowError):
        encode_columns([[1, 2**63]])


@pytest.mark.parametrize(
    ("width", "value"), [(1, 5), (63, "x" * 100), (126, None), (127, None), (300, 1), (90, "x" * 100)]
)
def test_a_table_of_any_width_is_encoded_at_once_or_left_to_the_single_encoder(width: int, value: Value) -> None:
    encoded = encode_columns([[value, value]] * width)
    header = 1 + width * (2 if isinstance(value, str) else 1)
    assert (encoded is None) == (header > 127)
    if encoded is not None:
        assert encoded.to_pylist() == [encode([value] * width)] * 2


@given(st.lists(rows, max_size=12), st.integers(0, 3))
def test_many_records_at_once_equal_one_at_a_time(written: list[tuple[Value, ...]], offset: int) -> None:
    width = max((len(row) for row in written), default=0)
    records = pa.array([encode(row) for row in written], pa.binary())[offset:]
    decoded = decode_records(records, width)
    assert not decoded.malformed.any()
    for place, cells in enumerate(decoded.columns):
        expected = [row[place] if place < len(row) else None for row in written[offset:]]
        assert exact(cells.to_list()) == exact(expected)
        absent = [place >= len(row) for row in written[offset:]]
        assert cells.are(CellKind.ABSENT).tolist() == absent


@given(st.lists(st.one_of(rows.map(encode), st.binary(max_size=30)), max_size=12))
def test_damaged_records_are_marked_and_spoil_no_other(records: list[bytes]) -> None:
    decoded = decode_records(pa.array(records, pa.binary()), 12)
    columns = [cells.to_list() for cells in decoded.columns]
    for place, record in enumerate(records):
        try:
            row: tuple[Value, ...] | None = decode(record)
        except MalformedRecordError:
            row = None
        if row is None or len(row) > 12:
            assert decoded.malformed[place]
        else:
            assert not decoded.malformed[place]
            padded = (*row, *[None] * (12 - len(row)))
            # Any bits are a double to the walk; only SQLite never stores a NaN.
            assert exact(column[place] for column in columns) == exact(padded)


@pytest.mark.parametrize("length", [0, 57, 58, 8185, 8186, 70_000, 3_000_000])
def test_texts_of_any_length_come_back(length: int) -> None:
    row = (1, "x" * length, b"y" * length, 2.5)
    assert decode(encode(row)) == row
    decoded = decode_records(pa.array([encode(row)] * 3, pa.binary()), 4)
    assert [cells.to_list()[2] for cells in decoded.columns] == list(row)


def test_a_record_of_many_columns_counts_its_header() -> None:
    for width in (125, 126, 127, 128, 129, 2000):
        row = tuple(range(width))
        assert decode(encode(row)) == row


@pytest.mark.parametrize(
    ("declared", "affinity", "kept"),
    [
        ("INTEGER", Affinity.INTEGER, pa.int64()),
        ("bigint unsigned", Affinity.INTEGER, pa.int64()),
        ("VARCHAR(20)", Affinity.TEXT, pa.string()),
        ("CHARINT", Affinity.INTEGER, pa.int64()),
        ("BLOB", Affinity.BLOB, pa.binary()),
        ("", Affinity.BLOB, pa.string()),
        ("DOUBLE PRECISION", Affinity.REAL, pa.float64()),
        ("DECIMAL(10,2)", Affinity.NUMERIC, pa.float64()),
        ("DATETIME", Affinity.NUMERIC, pa.string()),
        ("BOOLEAN", Affinity.NUMERIC, pa.int64()),
    ],
)
def test_declared_types_have_the_affinity_sqlite_gives_them(
    declared: str, affinity: Affinity, kept: pa.DataType
) -> None:
    assert affinity_of(declared) is affinity
    assert arrow_type(declared) == kept
    connection = sqlite3.connect(":memory:")
    connection.execute(f"CREATE TABLE t(x {declared})")
    connection.execute("INSERT INTO t VALUES ('12')")
    (found,) = connection.execute("SELECT typeof(x) FROM t").fetchone()
    connection.close()
    expected = {Affinity.INTEGER: "integer", Affinity.NUMERIC: "integer", Affinity.REAL: "real"}
    assert found == expected.get(affinity, "text")


@given(st.lists(values, max_size=10), st.sampled_from([pa.int64(), pa.float64(), pa.string(), pa.binary()]))
def test_a_typed_column_holds_a_value_or_its_exact_text(cells: list[Value], type_: pa.DataType) -> None:
    decoded = decode_records(pa.array([encode((value,)) for value in cells], pa.binary()), 1)
    array, unfit = read_column(decoded.columns[0], type_)
    texts = unfit.to_pylist() if unfit is not None else [None] * len(cells)
    assert array.type == type_
    for value, held, text in zip(cells, array.to_pylist(), texts, strict=True):
        if held is not None:
            assert text is None
            assert held == value
        elif value is not None:
            assert text is not None
            if isinstance(value, bytes):
                assert text == f"X'{value.hex().upper()}'"
            else:
                assert text == (value if isinstance(value, str) else repr(value))


def test_text_that_is_not_utf8_is_kept_as_its_bytes() -> None:
    record = bytes([2, 17, 0xFF, 0xFE])
    assert encode(decode(record)) == record
    decoded = decode_records(pa.array([record, encode(("ok",))], pa.binary()), 1)
    array, unfit = read_column(decoded.columns[0], pa.string())
    assert array.to_pylist() == [None, "ok"]
    assert unfit is not None
    assert unfit.to_pylist() == ["X'FFFE'", None]


def test_rows_before_add_column_hold_its_default() -> None:
    decoded = decode_records(pa.array([encode((1,)), encode((2, None)), encode((3, 4))], pa.binary()), 2)
    array, unfit = read_column(decoded.columns[1], pa.int64(), pa.scalar(7))
    assert array.to_pylist() == [7, None, 4]
    assert unfit is None


TURSO = """
import json, sys, turso
connection = turso.connect(sys.argv[1], isolation_level=None)
connection.execute("CREATE TABLE t(a, b, c)")
connection.execute("PRAGMA capture_data_changes_conn('full')")
for row in json.load(sys.stdin):
    parameters = [bytes.fromhex(v[1:]) if isinstance(v, str) and v[:1] == "b" else
                  v[1:] if isinstance(v, str) else v for v in row]
    connection.execute("INSERT INTO t VALUES (?, ?, ?)", parameters)
found = connection.execute('SELECT "after" FROM turso_cdc WHERE change_type = 1 ORDER BY change_id').fetchall()
print(json.dumps([record.hex() for (record,) in found]))
"""


def test_turso_writes_the_very_bytes(tmp_path: Path) -> None:
    edges: list[Value] = [
        *(None, 0, 1, -1, 2, 127, 128, -128, -129, 2**23, 2**31 - 1, 2**47, -(2**47) - 1, 2**63 - 1, -(2**63)),
        *(1.5, 5e-324, 1.7976931348623157e308, -2.0, "", "a", "é🜂", "x" * 200, b"", b"\x00\xff", b"z" * 300),
    ]
    written = [(edges[i], edges[(i * 7 + 3) % len(edges)], edges[(i * 5 + 1) % len(edges)]) for i in range(len(edges))]
    sent = [
        ["b" + v.hex() if isinstance(v, bytes) else "t" + v if isinstance(v, str) else v for v in r] for r in written
    ]
    found = subprocess.run(
        [sys.executable, "-c", TURSO, str(tmp_path / "turso.db")],
        input=json.dumps(sent),
        capture_output=True,
        text=True,
        check=True,
    )
    records = [bytes.fromhex(text) for text in json.loads(found.stdout)]
    assert [encode(row) for row in written] == records
    columns = [cells.to_list() for cells in decode_records(pa.array(records, pa.binary()), 3).columns]
    assert [exact(row) for row in zip(*columns, strict=True)] == [exact(row) for row in written]
