"""Which rows of a table have which key: the keys in its files, and the search for a batch's keys among them.

The index stays in memory, because a worker process serves many batches: small ones find their keys without reading a
file.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.destination.delta.column import DeltaLayout
from tailrace.destination.delta.data_file import DataFile, read_columns
from tailrace.destination.delta.projection import AS_IS, ColumnReading
from tailrace.destination.delta.table_folder import TablePath
from tailrace.model import key as keys

Indexes = npt.NDArray[np.int64]
_Name = tuple[str, str, str]
MOST_BYTES = 256 << 20
"""How much memory a process uses for the keys of all tables."""


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

    def match(self, wanted: KeyProbe) -> tuple[Indexes, Indexes]:
        """The rows of the file whose key is wanted, and for each of them the index of its key among the wanted ones."""
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


class KeyProbe:
    """Keys to be found in files; numbers are sorted once for all of them."""

    def __init__(self, key: keys.Comparable) -> None:
        self.key = key
        self.numbers: keys.Numbers | None = None
        if isinstance(key, np.ndarray):
            self.order: Indexes = np.argsort(key)
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


_kept: OrderedDict[_Name, FileKeys] = OrderedDict()
_kept_bytes = 0
_lock = threading.Lock()


def keys_of(place: TablePath, file: DataFile, kinds: Mapping[str, pa.DataType], reading: ColumnReading) -> FileKeys:
    """The keys of a file, from memory or read now. `kinds` gives the key's columns and their types."""
    global _kept_bytes
    schema = pa.schema(list(kinds.items()))
    names = [reading.name(column) for column in kinds]
    # A schema change may give the same file another key under the same name.
    name = (place.uri, file.path, str([*zip(names, kinds.values(), strict=True)]))
    with _lock:
        if name in _kept:
            _kept.move_to_end(name)
            return _kept[name]
    partitions = {old: kind for old, kind in zip(names, kinds.values(), strict=True) if old in file.partition and old}
    wanted = [old for old in names if old is not None]
    pieces = [reading.read(rows, schema) for rows in read_columns(place, file, wanted, partitions)]
    found = FileKeys(keys.comparable((pa.concat_tables(pieces) if pieces else schema.empty_table()).columns))
    with _lock:
        if name not in _kept:
            _kept[name] = found
            _kept_bytes += found.nbytes
            while _kept_bytes > MOST_BYTES and len(_kept) > 1:
                _, gone = _kept.popitem(last=False)
                _kept_bytes -= gone.nbytes
    return found


# A Delta table about to be changed: its files, and which of their rows a batch concerns.


@dataclass
class DeltaTarget:
    """A table to be changed: its files from before the batch, and how their columns are read.

    schema     the columns the table has after the batch (dropped ones included)
    staged     copied files that are to become the table's, each with how it is read
    reading    how `files` are read as rows of `schema`
    """

    place: TablePath
    layout: DeltaLayout
    schema: pa.Schema
    files: list[DataFile]
    staged: list[tuple[DataFile, ColumnReading]] = field(default_factory=list)
    reading: ColumnReading = AS_IS


@dataclass
class Candidate:
    file: DataFile
    reading: ColumnReading = AS_IS
    staged: bool = False
    keys: FileKeys | None = None
    dead: list[Indexes] = field(default_factory=list)
    joining: Indexes | None = None


class Finder:
    def __init__(self, target: DeltaTarget, kinds: Mapping[str, pa.DataType]) -> None:
        self.target = target
        self.kinds = kinds

    def keys(self, entry: Candidate) -> FileKeys:
        if entry.keys is None:
            entry.keys = keys_of(self.target.place, entry.file, self.kinds, entry.reading)
        return entry.keys

    def bury_all(self, candidates: list[Candidate], wanted: KeyProbe) -> None:
        for entry in candidates:
            if wanted.may_hold(entry.file.low, entry.file.high):
                rows, _ = self.keys(entry).match(wanted)
                if len(rows):
                    entry.dead.append(rows)


def partition_kinds(target: DeltaTarget, file: DataFile) -> dict[str, pa.DataType]:
    """The types of the columns a file is partitioned by."""
    names = target.schema.names
    return {name: target.schema.field(name).type if name in names else pa.string() for name in file.partition}
