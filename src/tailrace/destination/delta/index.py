"""Which rows of a file have which key. Files never change, so what was read once is kept, within a bound.

A worker process serves many batches: a trickle of small ones finds its keys here without touching a file.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace import key as keys
from tailrace.destination.delta.file import DataFile, read_columns
from tailrace.destination.delta.path import Place

Index = npt.NDArray[np.int64]
MOST_BYTES = 256 << 20
"""What a process keeps of all tables' keys."""


class FileKeys:
    """The keys of one file's rows, ready to be searched."""

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
        """The keys, in no particular order."""
        return self.key

    def match(self, wanted: Wanted) -> tuple[Index, Index]:
        """The rows of the file whose key is wanted, and which of the wanted ones each is."""
        nothing = np.zeros(0, np.int64)
        if isinstance(self.key, np.ndarray) and wanted.numbers is not None:
            if not len(self.key):
                return nothing, nothing
            start = int(np.searchsorted(wanted.numbers, self.key[0], "left"))
            end = int(np.searchsorted(wanted.numbers, self.key[-1], "right"))
            sought = wanted.numbers[start:end]
            if not len(sought):
                return nothing, nothing
            # Search the shorter side in the longer; both ascend, so the searches walk through memory once.
            if len(sought) <= len(self.key):
                at = np.searchsorted(self.key, sought)
                hit = np.flatnonzero(self.key[np.minimum(at, len(self.key) - 1)] == sought)
                rows, which = at[hit], hit
            else:
                at = np.searchsorted(sought, self.key)
                rows = np.flatnonzero(sought[np.minimum(at, len(sought) - 1)] == self.key)
                which = at[rows]
            found = rows if self.order is None else self.order[rows].astype(np.int64)
            return found, wanted.order[start + which]
        among = pc.index_in(keys.binary(self.key), value_set=wanted.binary)
        rows = np.flatnonzero(np.asarray(among.is_valid().to_numpy(zero_copy_only=False), bool))
        return rows, np.asarray(among.drop_null().to_numpy(zero_copy_only=False), np.int64)


class Wanted:
    """Keys to be found in files; numbers are sorted once for all of them."""

    def __init__(self, key: keys.Comparable) -> None:
        self.key = key
        self.numbers: keys.Numbers | None = None
        if isinstance(key, np.ndarray):
            self.order: Index = np.argsort(key)
            self.numbers = key[self.order]
        self._binary: pa.Array[Any] | None = None

    def __len__(self) -> int:
        return len(self.key)

    @property
    def binary(self) -> pa.Array[Any]:
        if self._binary is None:
            self._binary = keys.binary(self.key)
        return self._binary

    def may_hold(self, low: Any, high: Any) -> bool:
        """Whether a file with these bounds, as numbers, can hold a wanted key; True when that is not known."""
        if self.numbers is None or low is None or high is None:
            return True
        return bool(np.searchsorted(self.numbers, low, "left") < np.searchsorted(self.numbers, high, "right"))


_kept: OrderedDict[tuple[str, str, tuple[str, ...]], FileKeys] = OrderedDict()
_kept_bytes = 0
_lock = threading.Lock()


def keys_of(
    place: Place, file: DataFile, key: Sequence[str], kinds: Mapping[str, pa.DataType], renamed: Mapping[str, str]
) -> FileKeys:
    """The keys of a file, from memory or read now. `renamed` gives the file's names of columns renamed since."""
    name = (place.uri, file.path, tuple(key))
    with _lock:
        if name in _kept:
            _kept.move_to_end(name)
            return _kept[name]
    names = [renamed.get(column, column) for column in key]
    table = pa.concat_tables(
        [
            pa.table([rows.column(old).cast(kinds[new]) for new, old in zip(key, names, strict=True)], names=list(key))
            for rows in read_columns(place, file, names, {renamed.get(c, c): kinds[c] for c in key})
        ]
        or [pa.table([pa.nulls(0, kinds[column]) for column in key], names=list(key))]
    )
    found = FileKeys(keys.comparable(table.columns))
    remember(place, file, key, found)
    return found


def remember(place: Place, file: DataFile, key: Sequence[str], found: FileKeys) -> None:
    """Keep a file's keys, e.g. those of a file just written; the least used go when there are too many."""
    global _kept_bytes
    with _lock:
        name = (place.uri, file.path, tuple(key))
        if name in _kept:
            return
        _kept[name] = found
        _kept_bytes += found.nbytes
        while _kept_bytes > MOST_BYTES and len(_kept) > 1:
            _, gone = _kept.popitem(last=False)
            _kept_bytes -= gone.nbytes
