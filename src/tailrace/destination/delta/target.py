"""A Delta table about to be changed: its files, and which of their rows a batch concerns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from tailrace.destination.delta.file import DataFile
from tailrace.destination.delta.index import FileKeys, Indexes, KeyProbe, keys_of
from tailrace.destination.delta.layout import DeltaLayout
from tailrace.destination.delta.path import TablePath
from tailrace.destination.delta.reading import AS_IS, ColumnReading


@dataclass
class DeltaTarget:
    """A table to be changed: its files of before the batch, and how its columns read.

    schema     the columns the table has after the batch (dropped ones included)
    staged     copied files that are to become the table's, each with how it reads
    reading    how `files` read as rows of `schema`
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
