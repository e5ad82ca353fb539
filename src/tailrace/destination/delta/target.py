"""A Delta table about to be changed: its files, and which of their rows a batch concerns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from tailrace.destination.delta.file import DataFile
from tailrace.destination.delta.index import FileKeys, Index, Wanted, keys_of
from tailrace.destination.delta.layout import Layout
from tailrace.destination.delta.path import Place


@dataclass
class Target:
    """A table to be changed: its files of before the batch, and how its columns read.

    schema     the columns the table has after the batch (dropped ones included)
    renamed    the files' names of columns that were renamed; with `rewrite`, every file is written anew to fit `schema`
    """

    place: Place
    layout: Layout
    schema: pa.Schema
    files: list[DataFile]
    staged: list[DataFile] = field(default_factory=list)
    renamed: Mapping[str, str] = field(default_factory=dict)
    rewrite: bool = False


@dataclass
class Candidate:
    file: DataFile
    staged: bool
    keys: FileKeys | None = None
    dead: list[Index] = field(default_factory=list)
    joining: Index | None = None


class Finder:
    def __init__(self, target: Target, kinds: Mapping[str, pa.DataType]) -> None:
        self.target = target
        self.kinds = kinds

    def keys(self, entry: Candidate) -> FileKeys:
        if entry.keys is None:
            renamed = {} if entry.staged else self.target.renamed
            key = self.target.layout.table.key
            entry.keys = keys_of(self.target.place, entry.file, key, self.kinds, renamed)
        return entry.keys

    def bury_all(self, candidates: list[Candidate], wanted: Wanted) -> None:
        for entry in candidates:
            if wanted.may_hold(entry.file.low, entry.file.high):
                rows, _ = self.keys(entry).match(wanted)
                if len(rows):
                    entry.dead.append(rows)


def partition_kinds(target: Target) -> dict[str, pa.DataType]:
    return {name: target.schema.field(name).type for name in target.layout.partition_by}
