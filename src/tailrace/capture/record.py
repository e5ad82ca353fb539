"""SQLite's record format, in which SQLite stores rows and the tape stores the images of a change.

A record is a header (its own size, then one serial type per value, all varints) followed by the values. This module
handles single records; `record_decode.decode_records` reads many at once.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence

from tailrace.capture.layout import CaptureConnection, read_table_shape

Value = int | float | str | bytes | None

REAL_SERIAL = 7
FIRST_LONG_SERIAL = 12
SIZES = (0, 1, 2, 3, 4, 6, 8, 8, 0, 0)
SURROGATE = "surrogateescape"


class MalformedRecordError(ValueError):
    """The bytes are not one complete record. The message never quotes them."""


def split(values: Sequence[Value]) -> list[tuple[int, bytes]]:
    """Each value's serial type and body. Two values have the same stored form if and only if these are equal."""
    return list(map(_part, values))


def join(parts: Iterable[tuple[int, bytes]]) -> bytes:
    """The record made of the parts that `split` returns."""
    header = bytearray(1)
    bodies = []
    for serial, body in parts:
        if serial < 128:
            header.append(serial)
        else:
            header += _varint(serial)
        bodies.append(body)
    if len(header) < 128:
        header[0] = len(header)
        return b"".join((header, *bodies))
    # The header size includes its own varint, whose length depends on that size.
    serials = header[1:]
    size = next(n for width in range(2, 10) if len(_varint(n := len(serials) + width)) == width)
    return b"".join((_varint(size), serials, *bodies))


def encode(values: Sequence[Value]) -> bytes:
    """The record of these values, in the smallest form, as SQLite writes it. NaN becomes null, as in SQLite.

    Text may contain surrogates from `decode`, so that bytes that are not UTF-8 survive a round trip.
    """
    return join(map(_part, values))


def decode(record: bytes) -> tuple[Value, ...]:
    """The values of one record. Raises MalformedRecordError for anything but one complete record."""
    size, at = _read_varint(record, 0)
    if size > len(record) or size < at:
        raise MalformedRecordError("the record's header goes beyond its end")
    values: list[Value] = []
    body = size
    while at < size:
        serial, at = _read_varint(record, at)
        length = (serial - FIRST_LONG_SERIAL) // 2 if serial >= FIRST_LONG_SERIAL else _short_length(serial)
        raw = record[body : body + length]
        if len(raw) != length:
            raise MalformedRecordError("a value goes beyond the record's end")
        values.append(_value(serial, raw))
        body += length
    if at != size or body != len(record):
        raise MalformedRecordError("the record does not end where its header says")
    return tuple(values)


def _part(value: Value) -> tuple[int, bytes]:
    # Capture spends most of its time here, so the most common types are tested first.
    if value is None:
        return _NULL
    if isinstance(value, str):
        raw = value.encode("utf-8", SURROGATE)
        return 13 + 2 * len(raw), raw
    if isinstance(value, int):
        if -128 <= value <= 127:
            return _SMALL[value + 128]
        return _integer_part(value)
    if isinstance(value, float):
        return (REAL_SERIAL, _pack_real(value)) if value == value else _NULL
    return 12 + 2 * len(value), bytes(value)


def _integer_part(value: int) -> tuple[int, bytes]:
    # One bit is for the sign, and -2**n needs no more bits than 2**n - 1.
    bits = (value if value >= 0 else ~value).bit_length() + 1
    if bits > 64:
        raise OverflowError("SQLite integers have at most 64 bits")
    serial = _SERIALS[(bits + 7) >> 3]
    return serial, value.to_bytes(SIZES[serial], "big", signed=True)


def _varint(value: int) -> bytes:
    if value < 128:
        return bytes((value,))
    if value >= 1 << 56:
        head, value = [value & 0xFF], value >> 8
        groups = [0x80 | (value >> shift) & 0x7F for shift in range(49, -1, -7)]
        return bytes(groups + head)
    groups = [value & 0x7F]
    while value := value >> 7:
        groups.append(0x80 | value & 0x7F)
    return bytes(reversed(groups))


_SERIALS = (0, 1, 2, 3, 4, 5, 5, 6, 6)
"""For each number of bytes, the serial type of the smallest integer with at least as many."""

_NULL = (0, b"")
_SMALL = tuple(
    (8 + value, b"") if value in (0, 1) else (1, value.to_bytes(1, "big", signed=True)) for value in range(-128, 128)
)
_pack_real = struct.Struct(">d").pack


def _read_varint(record: bytes, at: int) -> tuple[int, int]:
    value = 0
    for count, octet in enumerate(record[at : at + 9], 1):
        if count == 9:
            return value << 8 | octet, at + 9
        value = value << 7 | octet & 0x7F
        if octet < 0x80:
            return value, at + count
    raise MalformedRecordError("the record ends within a number")


def _short_length(serial: int) -> int:
    if serial in (10, 11):
        raise MalformedRecordError("a serial type that SQLite never writes to a file")
    return SIZES[serial]


def _value(serial: int, raw: bytes) -> Value:
    if serial == 0:
        return None
    if serial == REAL_SERIAL:
        return float(struct.unpack(">d", raw)[0])
    if serial < REAL_SERIAL:
        return int.from_bytes(raw, "big", signed=True)
    if serial < FIRST_LONG_SERIAL:
        return serial - 8
    return raw.decode("utf-8", SURROGATE) if serial % 2 else raw


# Turso's two SQL functions for inspecting records, available here for any file and any value.


def table_columns_json_array(connection: CaptureConnection, table: str) -> str:
    """The names of the table's columns as a JSON array. Raises PreflightError if there is no such table."""
    names = [field.name for field in read_table_shape(connection, table).fields]
    return json.dumps(names, ensure_ascii=False, separators=(",", ":"))


def bin_record_json_object(columns: str, record: bytes | None) -> str | None:
    """A record as a JSON object whose names are in `columns`, a JSON array; None if there is no record.

    Bytes become hex digits, as SQLite's hex() prints them; numbers that JSON cannot express become text. A record may
    have fewer values than `columns`; if it has more, they are left out, as in Turso. So an `updates` record shows its
    flags with the names of its table, and with those names twice its new values too. Raises MalformedRecordError for
    bytes that are not a record.
    """
    if record is None:
        return None
    names, values = json.loads(columns), decode(record)
    held = {name: _plain(value) for name, value in zip(names, values, strict=False)}
    return json.dumps(held, ensure_ascii=False, separators=(",", ":"))


def _plain(value: Value) -> Value:
    if isinstance(value, bytes):
        return value.hex().upper()
    if isinstance(value, float) and abs(value) == float("inf"):
        return "Infinity" if value > 0 else "-Infinity"
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace") if isinstance(value, str) else value
