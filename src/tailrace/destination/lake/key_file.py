"""The keys of one data file's rows, sorted, in a local file that is mapped into memory instead of read.

A key file follows from its data file, which never changes, and from the columns of the key. So there is nothing to
keep consistent: one that is missing, damaged or of something else is written again from the data file.

file      magic number with the version, 8 bytes | length of the header and its CRC-32, 4 bytes little-endian each |
          header: JSON, with spaces up to a multiple of 64 bytes | arrays, one after the other

arrays    for keys that are numbers: `key`, ascending, and `row`, unless the rows are in this order already
          for keys that are bytes: `hash`, ascending, and `row`; `offset` and `data`, the bytes of each row's key
"""

from __future__ import annotations

import ctypes
import json
import mmap
import struct
import uuid
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.destination.lake import key_hash
from tailrace.model import key as keys
from tailrace.system import atomic_file

if TYPE_CHECKING:
    from tailrace.destination.lake.key_index import KeyProbe

Indexes = npt.NDArray[np.int64]
_Arrays = dict[str, npt.NDArray[Any]]
_libc = ctypes.CDLL(None)

_MAGIC = b"tr-keys\x01"
_START = struct.Struct("<8sII")
_ALIGNMENT = 64
_TYPES = {"key": "<i8", "hash": "<u8", "offset": "<i8", "row": "<u4", "data": "|u1"}
"""The arrays, in the order of the file: each begins at a multiple of its width."""
_MAPPING_BYTES = 8 << 10
"""What a mapped file counts as held memory. It is less, but Linux gives a process no more than 65,530 mappings."""


class MappedKeys:
    """The keys in a key file, ready to be searched: a `RowKeys` that holds almost no memory.

    A search reads the pages it needs. The file may be deleted or replaced meanwhile, but not written to.
    """

    def __init__(self, arrays: _Arrays) -> None:
        self._row = arrays.get("row")
        self._hash = arrays.get("hash")
        if self._hash is None:
            self._key: keys.Comparable = arrays["key"]
        else:
            parts = [None, pa.py_buffer(arrays["offset"]), pa.py_buffer(arrays["data"])]
            self._key = pa.Array.from_buffers(pa.large_binary(), len(self._hash), parts)

    @property
    def nbytes(self) -> int:
        return _MAPPING_BYTES

    def comparable(self) -> keys.Comparable:
        return self._key

    def match(self, wanted: KeyProbe) -> tuple[Indexes, Indexes]:
        if isinstance(self._key, np.ndarray):
            return wanted.find(self._key, self._row)
        assert self._hash is not None
        assert self._row is not None
        hashes, order = wanted.hashes
        is_first = np.append(True, hashes[1:] != hashes[:-1])[: len(hashes)]
        at, found = keys.matches(self._hash, hashes[is_first])
        if not len(at):
            return at, found
        # The hash only selects: a key is found where its bytes are. Each row and each key is compared once, however
        # many have the same hash.
        rows = np.sort(self._row[at]).astype(np.int64)
        is_found = np.zeros(int(is_first.sum()), bool)
        is_found[found] = True
        possible = order[is_found[np.cumsum(is_first) - 1]]
        which = pc.index_in(self._key.take(pa.array(rows)), value_set=wanted.binary.take(pa.array(possible)))
        is_wanted = np.asarray(which.is_valid().to_numpy(zero_copy_only=False), bool)
        return rows[is_wanted], possible[np.asarray(which.drop_null().to_numpy(zero_copy_only=False), np.int64)]


def write(path: Path, key: keys.Comparable, signature: str) -> None:
    """Write the key file of a data file, or replace it. `key` has the data file's rows in their order.

    `signature` names the data file and the key's columns. The file appears whole or not at all, but is not durable:
    after a power cut `open` may find it damaged. Raises OSError when it cannot be written. A process that is killed
    here leaves a file whose name ends in `.tmp`.
    """
    arrays = _arrays(key)
    described = {name: [array.nbytes, zlib.crc32(array.data)] for name, array in arrays.items()}
    header = json.dumps({"signature": signature, "arrays": described}).encode()
    header += b" " * (-(_START.size + len(header)) % _ALIGNMENT)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with atomic_file.open_alike(draft) as file:
            file.write(_START.pack(_MAGIC, len(header), zlib.crc32(header)) + header)
            for array in arrays.values():
                file.write(array.data)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def open(path: Path, signature: str) -> MappedKeys | None:  # noqa: A001 - only ever called as key_file.open
    """The keys that `write` wrote with this signature; None when there is no such file or it is damaged.

    Verifies every byte once, which takes about a third of a second for each gigabyte.
    """
    try:
        with pa.memory_map(str(path)) as file:
            content = file.read_buffer() if file.size() else None
    except FileNotFoundError:
        return None
    arrays = None if content is None else _sound(content, signature)
    if content is None or arrays is None:
        return None
    # Give back the pages that were verified; later read single ones, not the up to 128 KiB around each.
    for advice in (mmap.MADV_DONTNEED, mmap.MADV_RANDOM):
        _advise(content, advice)
    return MappedKeys(arrays)


def _advise(content: pa.Buffer, advice: int) -> None:
    """Tell the kernel how mapped bytes are used. Python's own `mmap` would keep a descriptor open for each file."""
    _libc.madvise(ctypes.c_void_p(content.address), ctypes.c_size_t(content.size), ctypes.c_int(advice))


def _arrays(key: keys.Comparable) -> _Arrays:
    assert len(key) < 1 << 32
    if isinstance(key, np.ndarray):
        found: _Arrays = {"key": key}
        if not keys.is_ascending(key):
            order = np.argsort(key)
            found = {"key": key[order], "row": order}
    else:
        hashes = key_hash.hash64(key)
        order = np.argsort(hashes)
        offset, data = keys.parts(key)
        found = {"hash": hashes[order], "offset": offset, "row": order, "data": data}
    return {name: np.ascontiguousarray(found[name], kind) for name, kind in _TYPES.items() if name in found}


def _sound(content: pa.Buffer, signature: str) -> _Arrays | None:
    """The arrays of a key file; None unless all its bytes are as they were written, with this signature."""
    if content.size < _START.size:
        return None
    magic, length, checksum = _START.unpack(content[: _START.size])
    header = content[_START.size : _START.size + length]
    if magic != _MAGIC or zlib.crc32(header) != checksum:
        return None
    described = json.loads(header.to_pybytes())
    if described["signature"] != signature:
        return None
    arrays: _Arrays = {}
    at = _START.size + length
    for name, (size, expected) in described["arrays"].items():
        part = content[at : at + size]
        if part.size != size or zlib.crc32(part) != expected:
            return None
        arrays[name] = np.frombuffer(part, _TYPES[name])
        at += size
    return arrays if at == content.size else None
