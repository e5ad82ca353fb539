"""Deletion vectors: which rows of a data file are deleted, in the form that Delta's protocol gives them.

file          one byte, the version 1; then for each vector
              size of data, 4 bytes big-endian | data | CRC-32 of data, 4 bytes big-endian
data          magic number, 4 bytes | number of bitmaps, 8 bytes | for each bitmap, the upper half of its row numbers,
              4 bytes | the bitmap in Roaring's portable form; all little-endian
descriptor    what the log says about a vector; `offset` is that of the size, and `size_in_bytes` counts only data
"""

from __future__ import annotations

import base64
import struct
import threading
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from tailrace.destination.delta.table_folder import VECTORS, TablePath
from tailrace.destination.lake import row_bitmap
from tailrace.destination.lake.row_bitmap import Rows, encode
from tailrace.errors import TableError

FILE_BYTES = 128 << 10
"""How large a file of several vectors may be: readers built on delta-kernel read all of it for each vector in it."""
CACHE_BYTES = 64 << 20
"""How much memory a process uses for vectors it has read."""

_VERSION = b"\x01"
_RELATIVE, _INLINE, _ABSOLUTE = "u", "i", "p"
_UUID_CHARS = 20
_ENTRY_BYTES = 512
"""What a cached vector takes besides its bitmap."""

_Z85 = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85 = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_TO_Z85 = bytes.maketrans(_B85, _Z85)
_TO_B85 = bytes(_B85[_Z85.index(byte)] if byte in _Z85 else 0 for byte in range(256))  # 0 is no digit


@dataclass(frozen=True)
class Descriptor:
    """Where a vector is stored and what it must be, as the log says.

    storage_type      `u`: in a file of the table; `i`: in `path_or_inline` itself; `p`: in a file with an absolute path
    path_or_inline    for `u` a folder, which may be empty, and the Z85 text of a UUID
    offset            where the vector begins in its file; None: right after the version
    """

    storage_type: str
    path_or_inline: str
    offset: int | None
    size_in_bytes: int
    cardinality: int

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Descriptor:
        """The descriptor in an `add` or `remove` of the log. Raises KeyError for one that is not complete."""
        return cls(raw["storageType"], raw["pathOrInlineDv"], raw.get("offset"), raw["sizeInBytes"], raw["cardinality"])

    def to_json(self) -> dict[str, Any]:
        """The inverse of `from_json`; without the offset when there is none."""
        place = {} if self.offset is None else {"offset": self.offset}
        return {
            "storageType": self.storage_type,
            "pathOrInlineDv": self.path_or_inline,
            **place,
            "sizeInBytes": self.size_in_bytes,
            "cardinality": self.cardinality,
        }

    @property
    def unique_id(self) -> str:
        """Delta's name of a vector: two descriptors have the same exactly when they mean the same vector."""
        return f"{self.storage_type}{self.path_or_inline}" + ("" if self.offset is None else f"@{self.offset}")

    @property
    def file(self) -> str | None:
        """The file that holds the vector, relative to the table; None when the descriptor holds it itself.

        Raises ValueError for an absolute path, which `file_in` understands, and for a descriptor that names no file
        below the table.
        """
        if self.storage_type == _INLINE:
            return None
        if self.storage_type != _RELATIVE:
            raise ValueError(f"a deletion vector of storage type {self.storage_type} has no path within the table")
        prefix, text = self.path_or_inline[:-_UUID_CHARS], self.path_or_inline[-_UUID_CHARS:]
        return _below(f"{prefix}/" * bool(prefix) + _name(uuid.UUID(bytes=_from_z85(text))))

    def file_in(self, place: TablePath) -> str | None:
        """`file`, also for an absolute path, if that is one of a file below the table. Raises ValueError otherwise."""
        if self.storage_type != _ABSOLUTE:
            return self.file
        path, root = self.path_or_inline, place.uri
        if place.is_local:
            # A local path may be a URL, and is percent-encoded then.
            path = unquote(urlsplit(path).path) if path.startswith("file:") else path
            root = place.base
        inner = path.removeprefix(f"{root.rstrip('/')}/")
        if inner == path:
            raise ValueError("its file is not in the table's folder")
        return _below(inner)


def decode(data: bytes, table: str) -> Rows:
    """The inverse of `encode`. Raises TableError for data that is damaged, or has row numbers of 2³² and more."""
    try:
        return row_bitmap.decode(data)
    except ValueError as error:
        raise _unreadable("a deletion vector", error, table) from error


class VectorWriter:
    """Writes the vectors of one commit to new files of the table, `FILE_BYTES` each unless one vector is larger.

    Used as a context, or closed by `close`: only then are all files durable, once the caller has also called the
    `sync` of the table's folder. After an error the rest is not written; files written before it are in no log, and
    are collected like everything that is in no log.
    """

    def __init__(self, place: TablePath) -> None:
        self.place = place
        self.written: list[str] = []
        self._begin()

    def __enter__(self) -> VectorWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.close()

    def put(self, rows: Rows) -> Descriptor:
        """Take a vector; the descriptor may go into the log after `close`.

        Raises ValueError for an empty one: a file with all its rows has no vector.
        """
        if not rows:
            raise ValueError("a deletion vector without rows")
        data = encode(rows)
        if self._parts and self._size + len(data) + 8 > FILE_BYTES:
            self.close()
        found = Descriptor(_RELATIVE, VECTORS + _to_z85(self._id.bytes), self._size, len(data), len(rows))
        # The next batch reads it again.
        _keep((self.place.uri, found), rows.copy())
        self._parts += [struct.pack(">I", len(data)), data, struct.pack(">I", zlib.crc32(data))]
        self._size += len(data) + 8
        return found

    def close(self) -> None:
        """Write what is left; nothing when there is nothing. The writer may take further vectors afterwards."""
        if not self._parts:
            return
        name = f"{VECTORS}/{_name(self._id)}"
        with self.place.creating(name) as file:
            file.write(b"".join([_VERSION, *self._parts]))
        self.written.append(name)
        self._begin()

    def _begin(self) -> None:
        self._id = uuid.uuid4()
        self._parts: list[bytes] = []
        self._size = len(_VERSION)


_kept: OrderedDict[tuple[str, Descriptor], Rows] = OrderedDict()
_kept_bytes = 0
_lock = threading.Lock()


def read(place: TablePath, descriptor: Descriptor, table: str) -> Rows:
    """The rows that a vector deletes, from memory or read now. The caller may change what it gets.

    Raises TableError when the vector is damaged or missing, is not what the log says, or is not in the table's folder.
    """
    name = (place.uri, descriptor)
    with _lock:
        if name in _kept:
            _kept.move_to_end(name)
            return _kept[name].copy()
    try:
        rows = row_bitmap.decode(_data(place, descriptor))
        if len(rows) != descriptor.cardinality:
            raise ValueError(f"it deletes {len(rows)} rows, and {descriptor.cardinality} in the log")
    except FileNotFoundError as error:
        raise _unreadable(_where(place, descriptor), "its file is missing", table) from error
    except ValueError as error:
        raise _unreadable(_where(place, descriptor), error, table) from error
    _keep(name, rows.copy())
    return rows


def _keep(name: tuple[str, Descriptor], rows: Rows) -> None:
    global _kept_bytes
    with _lock:
        if name not in _kept:
            _kept[name] = rows
            _kept_bytes += name[1].size_in_bytes + _ENTRY_BYTES
            while _kept_bytes > CACHE_BYTES:
                (_, gone), _ = _kept.popitem(last=False)
                _kept_bytes -= gone.size_in_bytes + _ENTRY_BYTES


def _data(place: TablePath, descriptor: Descriptor) -> bytes:
    """A vector's data, its size and checksum verified. Reads no other part of the file."""
    size = descriptor.size_in_bytes
    name = descriptor.file_in(place)
    if name is None:
        data = _from_z85(descriptor.path_or_inline)
        if not size <= len(data) < size + 4:
            raise ValueError("its size is not the one in the log")
        return data[:size]
    offset = len(_VERSION) if descriptor.offset is None else descriptor.offset
    if offset < 0 or size < 0:
        raise ValueError("the log gives it a negative size or offset")
    raw = place.read_range(name, offset, size + 8)
    if len(raw) < size + 8:
        raise ValueError("its file is too short")
    if raw[:4] != struct.pack(">I", size):
        raise ValueError("its size is not the one in the log")
    if raw[-4:] != struct.pack(">I", zlib.crc32(raw[4:-4])):
        raise ValueError("its checksum does not fit")
    return raw[4:-4]


def _unreadable(what: str, why: str | ValueError, table: str) -> TableError:
    return TableError(f"{what} cannot be read: {why}", table=table, fix=f"tailrace resync FILE {table}")


def _where(place: TablePath, descriptor: Descriptor) -> str:
    # A vector in the log is row data, and an absolute path may hold keys to a store.
    name = f" {descriptor.unique_id}" if descriptor.storage_type == _RELATIVE else ""
    return f"the deletion vector{name} of a file in {place.uri}"


def _name(unique: uuid.UUID) -> str:
    return f"deletion_vector_{unique}.bin"


def _below(name: str) -> str:
    """A path that stays below the table: the log is not trusted to name other files."""
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError("its file is not in the table's folder")
    return name


def _to_z85(raw: bytes) -> str:
    # Z85 and Python's base 85 differ only in their alphabets, for multiples of four bytes.
    return base64.b85encode(raw).translate(_TO_Z85).decode()


def _from_z85(text: str) -> bytes:
    """Raises ValueError for what is not Z85."""
    if len(text) % 5:
        raise ValueError("its text is not complete")
    return base64.b85decode(text.encode("ascii").translate(_TO_B85))
