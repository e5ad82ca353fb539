"""Which rows of a table's data files have which key: the keys of each file, and the search for those of a batch.

The index stays in memory, because a worker process serves many batches: small ones find their keys without reading a
file. A data file never changes, so neither do its keys.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.destination.lake import key_cache, key_file, key_hash
from tailrace.model import key as keys

_log = logging.getLogger(__name__)

Indexes = npt.NDArray[np.int64]
_Name = tuple[str, str, str]
_Number = TypeVar("_Number", np.int64, np.uint64)
MOST_BYTES = 256 << 20
"""How much memory a process uses for the keys of all tables."""
STORED_ROWS = 16_384
"""The keys of a file with fewer rows are read again by a new process: that takes a millisecond."""


class RowKeys(Protocol):
    """The keys of one file's rows, ready to be searched."""

    @property
    def nbytes(self) -> int:
        """The memory that is held until this object is gone."""

    def comparable(self) -> keys.Comparable:
        """The keys, in no particular order."""

    def match(self, wanted: KeyProbe) -> tuple[Indexes, Indexes]:
        """Each row of the file whose key is wanted, and the index of its key among the wanted ones.

        A key that several rows have is found in all of them. Of a key that is wanted more than once, the first counts.
        """


class FileKeys:
    """Keys in memory: a `RowKeys`."""

    def __init__(self, key: keys.Comparable) -> None:
        self.key = key
        self.order: npt.NDArray[np.uint32] | None = None
        if isinstance(key, np.ndarray) and not keys.is_ascending(key):
            order = np.argsort(key)
            self.key, self.order = key[order], order.astype(np.uint32)

    @property
    def nbytes(self) -> int:
        return int(self.key.nbytes) + (0 if self.order is None else self.order.nbytes)

    def comparable(self) -> keys.Comparable:
        return self.key

    def match(self, wanted: KeyProbe) -> tuple[Indexes, Indexes]:
        if isinstance(self.key, np.ndarray):
            return wanted.find(self.key, self.order)
        among = pc.index_in(self.key, value_set=wanted.binary)
        rows = np.flatnonzero(np.asarray(among.is_valid().to_numpy(zero_copy_only=False), bool))
        return rows, np.asarray(among.drop_null().to_numpy(zero_copy_only=False), np.int64)


class KeyProbe:
    """Keys to be found in files; they are sorted and hashed once for all of them."""

    def __init__(self, key: keys.Comparable) -> None:
        self.key = key

    def __len__(self) -> int:
        return len(self.key)

    @cached_property
    def numbers(self) -> tuple[keys.Numbers, Indexes]:
        """The keys that are whole numbers, ascending and each once, and their indexes."""
        if isinstance(self.key, np.ndarray):
            return _each_once(self.key)
        found, at = keys.numbers(self.key)
        once, order = _each_once(found)
        return once, at[order]

    @cached_property
    def binary(self) -> pa.Array[Any]:
        return keys.binary(self.key)

    @cached_property
    def hashes(self) -> tuple[key_hash.KeyHashes, Indexes]:
        """The hashes of `binary`, ascending, and the index of each one's key."""
        return _ordered(key_hash.hash64(self.binary))

    def find(self, ascending: keys.Numbers, rows: npt.NDArray[np.uint32] | None = None) -> tuple[Indexes, Indexes]:
        """`RowKeys.match` for a file's keys that are numbers, sorted, and the row of each of them.

        Without `rows` the file's rows are in this order.
        """
        nothing = np.zeros(0, np.int64)
        if not len(ascending):
            return nothing, nothing
        numbers, order = self.numbers
        start = int(np.searchsorted(numbers, ascending[0], "left"))
        end = int(np.searchsorted(numbers, ascending[-1], "right"))
        if start == end:
            return nothing, nothing
        at, which = keys.matches(ascending, numbers[start:end])
        return at if rows is None else rows[at].astype(np.int64), order[start + which]

    def may_hold(self, low: Any, high: Any) -> bool:
        """Whether a file with these bounds, as numbers, can hold a wanted key; True when that is not known."""
        if not isinstance(self.key, np.ndarray) or low is None or high is None:
            return True
        numbers, _ = self.numbers
        return bool(np.searchsorted(numbers, low, "left") < np.searchsorted(numbers, high, "right"))


def _each_once(numbers: keys.Numbers) -> tuple[keys.Numbers, Indexes]:
    """The numbers, ascending and without repeats, and the first index of each."""
    ascending, order = _ordered(numbers)
    first = np.append(True, ascending[1:] != ascending[:-1])[: len(ascending)]
    return (ascending, order) if first.all() else (ascending[first], order[first])


def _ordered(numbers: npt.NDArray[_Number]) -> tuple[npt.NDArray[_Number], Indexes]:
    """The numbers, ascending, and their indexes; those of equal numbers ascend too."""
    order = np.argsort(numbers)
    ascending = numbers[order]
    if (ascending[1:] == ascending[:-1]).any():
        order = np.argsort(numbers, kind="stable")  # which takes longer, and seldom matters
    return ascending, order


@dataclass(frozen=True)
class KeyedFile:
    """A data file whose keys are wanted.

    table      where its table is
    label      what the log calls the table
    path       identifies the file within the table
    rows       how many there are in it
    columns    identifies the columns of the key, as they are in the file
    stored     where its key file is
    read       reads the keys from the data file
    is_cached  whether the key file is in this machine's cache, and not next to the table
    """

    table: str
    label: str
    path: str
    rows: int
    columns: str
    stored: Callable[[], Path]
    read: Callable[[], keys.Comparable]
    is_cached: bool = False

    @property
    def name(self) -> _Name:
        # A schema change may give the same file another key under the same name.
        return self.table, self.path, self.columns


_kept: OrderedDict[_Name, RowKeys] = OrderedDict()
_kept_bytes = 0
_lock = threading.Lock()


def keys_of(file: KeyedFile, *, is_stored: bool = False) -> RowKeys:
    """The keys of a file, from memory, from its key file or read now.

    `is_stored`: the file will be there for long, and its keys are worth a file of their own.
    """
    global _kept_bytes
    name = file.name
    with _lock:
        if name in _kept:
            _kept.move_to_end(name)
            return _kept[name]
    found: RowKeys = _stored_keys(file) if is_stored and file.rows >= STORED_ROWS else FileKeys(file.read())
    with _lock:
        if name not in _kept:
            _kept[name] = found
            _kept_bytes += found.nbytes
            while _kept_bytes > MOST_BYTES and len(_kept) > 1:
                _, gone = _kept.popitem(last=False)
                _kept_bytes -= gone.nbytes
    return found


def forget_all() -> None:
    """Hold no keys any more, as in a new process."""
    global _kept_bytes
    with _lock:
        _kept.clear()
        _kept_bytes = 0


def _stored_keys(file: KeyedFile) -> RowKeys:
    """The keys from the data file's key file, which is written now if there is none.

    Where that is not possible, because the disk is full for example, the keys are held in memory.
    """
    signature = str(file.name)
    with _no_disk(file):
        path = file.stored()
        if (found := key_file.open(path, signature)) is not None:
            if file.is_cached:
                key_cache.note_use(path)
            return found
    keys_read = file.read()
    with _no_disk(file):
        path = file.stored()
        key_file.write(path, keys_read, signature)
        if file.is_cached:
            key_cache.sweep_if_due()
        # It may be gone already: maintenance deletes key files that the version it looks at does not need.
        if (found := key_file.open(path, signature)) is not None:
            return found
    return FileKeys(keys_read)


@contextmanager
def _no_disk(file: KeyedFile) -> Iterator[None]:
    """The index only saves time: without a place for it, a batch is applied all the same."""
    try:
        yield
    except OSError as error:
        _log.warning("%s: the keys of a file are held in memory: %s", file.label, error.strerror)
