"""The keys in a Delta table's files, and the files that a batch concerns."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyroaring import BitMap

from tailrace.destination.delta import deletion_vector
from tailrace.destination.delta.column import DeltaLayout
from tailrace.destination.delta.data_file import DataFile
from tailrace.destination.delta.file_reader import read_columns
from tailrace.destination.delta.option import Updates
from tailrace.destination.delta.projection import AS_IS, ColumnReading
from tailrace.destination.delta.table_folder import OWN, TablePath
from tailrace.destination.lake import key_cache, key_index, row_bitmap
from tailrace.destination.lake.key_index import Indexes, KeyedFile, KeyProbe, RowKeys
from tailrace.model import key as keys

MANY_ROWS = key_index.MOST_BYTES // 32
"""A table with more rows has more keys than fit into memory. Under `auto` they are stored, although its rows are not
marked yet: inserts alone never begin that, and each batch would read all keys. Copy on write would store the keys of
files that the next batch replaces."""
_KEYS = "keys"
_NAME_BYTES = 150
"""How long the name of a key file may be: drafts of it have 38 more bytes, and file systems allow 255."""

_last_keys: dict[str, dict[str, pa.DataType]] = {}
_lock = threading.Lock()


def keys_of(
    place: TablePath,
    file: DataFile,
    kinds: Mapping[str, pa.DataType],
    reading: ColumnReading,
    *,
    is_stored: bool = False,
) -> RowKeys:
    """The keys of a file (`lake.key_index.keys_of`). `kinds` gives the key's columns and their types."""
    names = [reading.name(column) for column in kinds]
    with _lock:
        _last_keys[place.uri] = dict(kinds)
    keyed = KeyedFile(
        place.uri,
        place.table,
        file.path,
        file.rows,
        str([*zip(names, kinds.values(), strict=True)]),
        lambda: key_folder(place) / key_name(file),
        lambda: _read_keys(place, file, kinds, reading),
        is_cached=not place.is_local,
    )
    return key_index.keys_of(keyed, is_stored=is_stored)


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
            alive &= ~np.isin(rows, row_bitmap.numbers(row_bitmap.bitmap(rows) & self.marked(place)))
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
