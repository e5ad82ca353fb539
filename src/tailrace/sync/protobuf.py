"""The messages of `/pull-updates` as bytes, in protobuf's wire format: four small messages, so no library is needed.

Decoding never trusts its input: whatever is not a message raises MalformedMessageError, before any memory is taken for
a length that the input only claims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

PAGE_BYTES = 4096
"""The only page size that the protocol carries."""

_VARINT_BYTES = 10
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LARGEST_HEADER = 1 << 16


class MalformedMessageError(ValueError):
    """The bytes are not the message they should be."""


@dataclass(frozen=True)
class PullRequest:
    """What a client asks for. An empty message asks for the whole database at the current revision."""

    encoding: int = 0
    server_revision: str = ""
    client_revision: str = ""
    long_poll_ms: int = 0
    selector: bytes = b""
    stream_kind: int = 0

    def encode(self) -> bytes:
        return (
            _number(1, self.encoding)
            + _text(2, self.server_revision)
            + _text(3, self.client_revision)
            + _number(4, self.long_poll_ms)
            + _blob(5, self.selector)
            + _number(8, self.stream_kind)
        )

    @classmethod
    def decode(cls, message: bytes) -> PullRequest:
        fields = read_fields(message)
        return cls(
            _as_int(fields, 1),
            _as_text(fields, 2),
            _as_text(fields, 3),
            _as_int(fields, 4),
            _as_bytes(fields, 5),
            _as_int(fields, 8),
        )


@dataclass(frozen=True)
class PullHeader:
    """The first message of an answer: the revision of its pages, and the size of the database in pages."""

    revision: str
    pages: int

    def encode(self) -> bytes:
        # Field 3 says that pages are raw. It is empty, but clients require it.
        return _text(1, self.revision) + _number(2, self.pages) + b"\x1a\x00" + _number(8, 1)

    @classmethod
    def decode(cls, message: bytes) -> PullHeader:
        fields = read_fields(message)
        if 3 not in fields or _as_int(fields, 5) or _as_int(fields, 6):
            raise MalformedMessageError("the remote does not answer with raw pages")
        return cls(_as_text(fields, 1), _as_int(fields, 2))


def encode_page(number: int, data: bytes) -> bytes:
    """A page as a delimited message; pages are numbered from 0."""
    message = _number(1, number) + _blob(2, data)
    return _varint(len(message)) + message


def page_message_bytes(number: int) -> int:
    """The length of what `encode_page` returns for a whole page."""
    return len(_number(1, number)) + _PAGE_OVERHEAD + PAGE_BYTES


def decode_page(message: bytes) -> tuple[int, bytes]:
    fields = read_fields(message)
    data = _as_bytes(fields, 2)
    if len(data) != PAGE_BYTES:
        raise MalformedMessageError(f"a page has {len(data)} bytes instead of {PAGE_BYTES}")
    return _as_int(fields, 1), data


def delimited(message: bytes) -> bytes:
    return _varint(len(message)) + message


def read_delimited(read: Callable[[int], bytes]) -> Iterator[bytes]:
    """The messages of a stream until its end. `read(n)` returns up to n bytes, and none at the end."""
    buffer = bytearray()
    is_first = True
    while True:
        while (found := _find_varint(buffer)) is None:
            piece = read(1 << 16)
            if not piece:
                if buffer:
                    raise MalformedMessageError("the answer ends within a length")
                return
            buffer += piece
        size, at = found
        if size > (_LARGEST_HEADER if is_first else PAGE_BYTES + 64):
            raise MalformedMessageError("a message of the answer is too long")
        is_first = False
        while len(buffer) < at + size:
            piece = read(1 << 16)
            if not piece:
                raise MalformedMessageError("the answer ends within a message")
            buffer += piece
        yield bytes(buffer[at : at + size])
        del buffer[: at + size]


def _find_varint(buffer: bytearray) -> tuple[int, int] | None:
    head = bytes(buffer[:_VARINT_BYTES])
    if all(octet >= 0x80 for octet in head) and len(head) < _VARINT_BYTES:
        return None
    return _read_varint(head, 0)


def read_fields(message: bytes) -> dict[int, int | bytes]:
    """The fields of a message by number; of a repeated one the last. Groups do not occur and are refused."""
    at, fields = 0, dict[int, int | bytes]()
    while at < len(message):
        tag, at = _read_varint(message, at)
        number, kind = tag >> 3, tag & 7
        if number == 0:
            raise MalformedMessageError("a field has the number 0")
        if kind == _VARINT:
            fields[number], at = _read_varint(message, at)
            continue
        if kind == _BYTES:
            size, at = _read_varint(message, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise MalformedMessageError(f"a field has the wire type {kind}")
        if size > len(message) - at:
            raise MalformedMessageError("a field is longer than its message")
        fields[number] = message[at : at + size]
        at += size
    return fields


def _read_varint(buffer: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 7 * _VARINT_BYTES, 7):
        if at >= len(buffer):
            raise MalformedMessageError("the message ends within a number")
        octet = buffer[at]
        at += 1
        value |= (octet & 0x7F) << shift
        if octet < 0x80:
            if value >= 1 << 64:
                break
            return value, at
    raise MalformedMessageError("a number has more than 64 bits")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value) if value else b""


def _blob(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(value)) + value if value else b""


def _text(field: int, value: str) -> bytes:
    return _blob(field, value.encode())


_PAGE_OVERHEAD = len(_varint(PAGE_BYTES + 16)) + len(_blob(2, b"\0" * PAGE_BYTES)) - PAGE_BYTES
"""What a message adds to a page, without the page's number: two lengths and a tag."""


def _as_int(fields: dict[int, int | bytes], number: int) -> int:
    value = fields.get(number, 0)
    if not isinstance(value, int):
        raise MalformedMessageError(f"field {number} is not a number")
    return value


def _as_bytes(fields: dict[int, int | bytes], number: int) -> bytes:
    value = fields.get(number, b"")
    if not isinstance(value, bytes):
        raise MalformedMessageError(f"field {number} is not a string of bytes")
    return value


def _as_text(fields: dict[int, int | bytes], number: int) -> str:
    try:
        return _as_bytes(fields, number).decode()
    except UnicodeDecodeError:
        raise MalformedMessageError(f"field {number} is not UTF-8") from None
