"""Which rows of a table have which key: the keys in its files, and the search for a batch's keys among them.

The index stays in memory, because a worker process serves many batches: small ones find their keys without reading a
file.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap

from tailrace.destination.delta import deletion_vector, key_cache, key_file, key_hash
from tailrace.destination.delta.column import DeltaLayout
from tailrace.destination.delta.data_file import DataFile
from tailrace.destination.delta.file_reader import read_columns
from tailrace.destination.delta.option import Updates
from tailrace.destination.delta.projection import AS_IS, ColumnReading
from tailrace.destination.delta.table_folder import OWN, TablePath
from tailrace.model import key as keys

_log = logging.getLogger(__name__)

Indexes = npt.NDArray[np.int64]
_Name = tuple[str, str, str]
_Number = TypeVar("_Number", np.int64, np.uint64)
MOST_BYTES = 256 << 20
"""How much memory a process uses for the keys of all tables."""
STORED_ROWS = 16_384
"""The keys of a file with fewer rows are read again by a new process: that takes a millisecond."""
MANY_ROWS = MOST_BYTES // 32
"""A table with more rows has more keys than fit into memory. Under `auto` they are stored, although its rows are not
marked yet: inserts alone never begin that, and each batch would read all keys. Copy on write would store the keys of
files that the next batch replaces."""
_KEYS = "keys"
_NAME_BYTES = 150
"""How long the name of a key file may be: drafts of it have 38 more bytes, and file systems allow 255."""


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


_last_keys: dict[str, dict[str, pa.DataType]] = {}
_kept: OrderedDict[_Name, RowKeys] = OrderedDict()
_kept_bytes = 0
_lock = threading.Lock()


def keys_of(
    place: TablePath,
    file: DataFile,
    kinds: Mapping[str, pa.DataType],
    reading: ColumnReading,
    *,
    is_stored: bool = False,
) -> RowKeys:
    """The keys of a file, from memory, from its key file or read now. `kinds` gives the key's columns and their types.

    `is_stored`: the file will be there for long, and its keys are worth a file of their own.
    """
    global _kept_bytes
    names = [reading.name(column) for column in kinds]
    # A schema change may give the same file another key under the same name.
    name = (place.uri, file.path, str([*zip(names, kinds.values(), strict=True)]))
    with _lock:
        _last_keys[place.uri] = dict(kinds)
        if name in _kept:
            _kept.move_to_end(name)
            return _kept[name]
    found: RowKeys
    if is_stored and file.rows >= STORED_ROWS:
        found = _stored_keys(place, file, kinds, reading, signature=str(name))
    else:
        found = FileKeys(_read_keys(place, file, kinds, reading))
    with _lock:
        if name not in _kept:
            _kept[name] = found
            _kept_bytes += found.nbytes
            while _kept_bytes > MOST_BYTES and len(_kept) > 1:
                _, gone = _kept.popitem(last=False)
                _kept_bytes -= gone.nbytes
    return found


def last_key(place: TablePath) -> Mapping[str, pa.DataType] | None:
    """The key's columns and their types, as this process last asked for the keys of a table; None if it never did."""
    with _lock:
        return _last_keys.get(place.uri)


def key_folder(place: TablePath) -> Path:
    """The folder of a table's key files: next to the table on a disk; on this machine for an object store."""
    if place.is_local:
        return Path(place.base, OWN, _KEYS)
    return key_cache.folder_for(place.uri)


def key_name(file: DataFile) -> str:
    """The name of a data file's key file."""
    name = file.path.replace("/", "~")
    if len(name.encode()) > _NAME_BYTES:
        name = hashlib.sha256(name.encode()).hexdigest()
    return f"{name}.keys"


def _stored_keys(
    place: TablePath, file: DataFile, kinds: Mapping[str, pa.DataType], reading: ColumnReading, signature: str
) -> RowKeys:
    """The keys from the data file's key file, which is written now if there is none.

    Where that is not possible, because the disk is full for example, the keys are held in memory.
    """
    with _no_disk(place):
        path = key_folder(place) / key_name(file)
        if (found := key_file.open(path, signature)) is not None:
            if not place.is_local:
                key_cache.note_use(path)
            return found
    keys_read = _read_keys(place, file, kinds, reading)
    with _no_disk(place):
        path = key_folder(place) / key_name(file)
        key_file.write(path, keys_read, signature)
        if not place.is_local:
            key_cache.sweep_if_due()
        # It may be gone already: maintenance deletes key files that the version it looks at does not need.
        if (found := key_file.open(path, signature)) is not None:
            return found
    return FileKeys(keys_read)


@contextmanager
def _no_disk(place: TablePath) -> Iterator[None]:
    """The index only saves time: without a place for it, a batch is applied all the same."""
    try:
        yield
    except OSError as error:
        _log.warning("%s: the keys of a file are held in memory: %s", place.table, error.strerror)


def _read_keys(
    place: TablePath, file: DataFile, kinds: Mapping[str, pa.DataType], reading: ColumnReading
) -> keys.Comparable:
    schema = pa.schema(list(kinds.items()))
    names = [reading.name(column) for column in kinds]
    partitions = {old: kind for old, kind in zip(names, kinds.values(), strict=True) if old in file.partition and old}
    wanted = [old for old in names if old is not None]
    pieces = [reading.read(rows, schema) for rows in read_columns(place, file, wanted, partitions)]
    return keys.comparable((pa.concat_tables(pieces) if pieces else schema.empty_table()).columns)


# A Delta table about to be changed: its files, and which of their rows a batch concerns.


@dataclass
class DeltaTarget:
    """A table to be changed: its files from before the batch, and how their columns are read.

    schema     the columns the table has after the batch (dropped ones included)
    staged     copied files that are to become the table's, each with how it is read
    reading    how `files` are read as rows of `schema`
    updates    whether changed rows are marked, or their files rewritten; `auto` chooses by the cost of this batch
    """

    place: TablePath
    layout: DeltaLayout
    schema: pa.Schema
    files: list[DataFile]
    staged: list[tuple[DataFile, ColumnReading]] = field(default_factory=list)
    reading: ColumnReading = AS_IS
    updates: Updates = "copy_on_write"


@dataclass
class Candidate:
    """A file that a batch may concern. `dead` are its rows that the batch replaces or deletes."""

    file: DataFile
    reading: ColumnReading = AS_IS
    staged: bool = False
    dead: list[Indexes] = field(default_factory=list)
    joining: Indexes | None = None

    def marked(self, place: TablePath) -> BitMap:
        """The rows that were deleted before this batch."""
        return BitMap() if self.file.vector is None else deletion_vector.read(place, self.file.vector, place.table)

    def still_alive(self, place: TablePath, rows: Indexes) -> Indexes:
        """Which of these rows, by their place in the list, are neither deleted before nor by this batch."""
        if not len(rows):
            return rows
        alive = np.ones(len(rows), bool)
        if self.file.vector is not None:
            alive &= ~np.isin(rows, deletion_vector.numbers(deletion_vector.bitmap(rows) & self.marked(place)))
        if self.dead:
            alive &= ~np.isin(rows, np.concatenate(self.dead))
        return np.flatnonzero(alive)

    def kill(self, rows: Indexes) -> None:
        if len(rows):
            self.dead.append(rows)


class Finder:
    """Finds rows by their keys. It holds no keys itself: those of all files may be more than fit into memory."""

    def __init__(self, target: DeltaTarget, kinds: Mapping[str, pa.DataType]) -> None:
        self.target = target
        self.kinds = kinds
        has_many = sum(file.rows for file in target.files) > MANY_ROWS
        self._stores = target.updates == "merge_on_read" or (target.updates == "auto" and has_many)

    def keys(self, entry: Candidate) -> RowKeys:
        is_stored = self._stores and not entry.staged
        return keys_of(self.target.place, entry.file, self.kinds, entry.reading, is_stored=is_stored)

    def find(self, entry: Candidate, wanted: KeyProbe) -> tuple[Indexes, Indexes]:
        """The living rows of a file whose key is wanted, and for each the index of its key among the wanted ones."""
        rows, which = self.keys(entry).match(wanted)
        alive = entry.still_alive(self.target.place, rows)
        return rows[alive], which[alive]

    def bury_all(self, candidates: list[Candidate], wanted: KeyProbe) -> None:
        for entry in candidates:
            if wanted.may_hold(entry.file.low, entry.file.high):
                entry.kill(self.find(entry, wanted)[0])


def partition_kinds(target: DeltaTarget, file: DataFile) -> dict[str, pa.DataType]:
    """The types of the columns a file is partitioned by."""
    names = target.schema.names
    return {name: target.schema.field(name).type if name in names else pa.string() for name in file.partition}
