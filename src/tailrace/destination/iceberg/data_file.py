"""The Parquet files of an Iceberg table: written once, never changed, their columns found by field id."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io import FileIO
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.typedef import Record
from pyiceberg.types import NestedField

from tailrace.destination.iceberg.column import FIELD_ID, TableColumns
from tailrace.destination.iceberg.statistics import statistics
from tailrace.destination.lake.key_index import Indexes

# The price of a small batch is the number of files that it marks rows in.
LEAST_ROWS = 131_072
MOST_ROWS = 1_048_576
FILES = 16
GROUP_ROWS = 131_072
"""How many rows a row group has."""


def rows_per_file(table_rows: int) -> int:
    """How many rows a file of a table of this size should hold."""
    return min(max(table_rows // FILES, LEAST_ROWS), MOST_ROWS)


@dataclass(frozen=True)
class TableFolder:
    """Where the files of a table are, and how they are reached."""

    io: FileIO
    location: str

    def new_name(self, suffix: str) -> str:
        return f"{self.location}/data/{uuid.uuid4().hex}{suffix}"


@dataclass(frozen=True)
class DataFileWriter:
    """Writes data files of one table, with the columns that it has after the batch."""

    folder: TableFolder
    columns: TableColumns

    def write(self, pieces: Iterable[pa.Table], most_rows: int) -> list[DataFile]:
        """Write rows to files of at most about so many rows each."""
        found: list[DataFile] = []
        rows = _cut(pieces, most_rows)
        for first in rows:
            found.append(self._write_file(first, rows, most_rows))
        return found

    def _write_file(self, first: pa.Table, more: Iterator[pa.Table], most_rows: int) -> DataFile:
        path = self.folder.new_name(".parquet")
        count = 0
        with self.folder.io.new_output(path).create() as stream:
            with pq.ParquetWriter(
                stream, self._arrow, compression="zstd", store_decimal_as_integer=True, write_page_checksum=True
            ) as writer:
                piece: pa.Table | None = first
                while piece is not None:
                    writer.write_table(self._shaped(piece), row_group_size=GROUP_ROWS)
                    count += piece.num_rows
                    piece = next(more, None) if count < most_rows else None
            metadata = writer.writer.metadata
            size = stream.tell()
        return new_file(DataFileContent.DATA, path, size, **statistics(metadata, self._fields))

    def _shaped(self, rows: pa.Table) -> pa.Table:
        return rows.select(self._arrow.names).cast(self._arrow)

    @cached_property
    def _arrow(self) -> pa.Schema:
        return self.columns.arrow()

    @cached_property
    def _fields(self) -> list[NestedField]:
        names = set(self._arrow.names)
        return [each for each in self.columns.schema.fields if each.name in names]


def new_file(content: DataFileContent, path: str, size: int, **statistics: Any) -> DataFile:
    """A file of an unpartitioned table, as a manifest names it."""
    made = DataFile.from_args(
        content=content,
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=Record(),
        file_size_in_bytes=size,
        sort_order_id=None,
        equality_ids=None,
        key_metadata=None,
        **statistics,
    )
    made.spec_id = 0
    return made


def _cut(pieces: Iterable[pa.Table], most_rows: int) -> Iterator[pa.Table]:
    for piece in pieces:
        for start in range(0, piece.num_rows, most_rows):
            yield piece.slice(start, most_rows)


# -- reading ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WantedColumn:
    """A column to read: under the first of these ids that the file has; else `initial`, or null."""

    field: pa.Field[Any]
    ids: tuple[int, ...]
    initial: pa.Scalar[Any] | None = None


def wanted_columns(columns: TableColumns, names: Sequence[str]) -> list[WantedColumn]:
    """Columns of a table as they are in its files."""
    schema = columns.kinds(names)
    return [WantedColumn(each, (number,)) for each, number in zip(schema, columns.ids(names), strict=True)]


def read_columns(folder: TableFolder, path: str, wanted: Sequence[WantedColumn]) -> Iterator[pa.Table]:
    """The wanted columns of all rows of a file, in order."""
    with folder.io.new_input(path).open() as stream, pq.ParquetFile(stream) as file:
        reading = _Reading.of(file, wanted)
        for number in range(file.num_row_groups):
            yield reading.read(number)


def read_rows(folder: TableFolder, path: str, wanted: Sequence[WantedColumn], rows: Indexes) -> Iterator[pa.Table]:
    """The wanted columns of some rows of a file, in their order, which ascends."""
    with folder.io.new_input(path).open() as stream, pq.ParquetFile(stream) as file:
        reading = _Reading.of(file, wanted)
        start = 0
        for number in range(file.num_row_groups):
            end = start + file.metadata.row_group(number).num_rows
            here = rows[np.searchsorted(rows, start) : np.searchsorted(rows, end)] - start
            if len(here):
                yield reading.read(number).take(pa.array(here))
            start = end


@dataclass(frozen=True)
class _Reading:
    file: pq.ParquetFile
    wanted: Sequence[WantedColumn]
    names: Sequence[str | None]

    @classmethod
    def of(cls, file: pq.ParquetFile, wanted: Sequence[WantedColumn]) -> _Reading:
        by_id = {int((each.metadata or {}).get(FIELD_ID, b"-1")): each.name for each in file.schema_arrow}
        names = [next((by_id[number] for number in one.ids if number in by_id), None) for one in wanted]
        return cls(file, wanted, names)

    def read(self, group: int) -> pa.Table:
        names = [name for name in self.names if name is not None]
        count = self.file.metadata.row_group(group).num_rows
        found = self.file.read_row_group(group, columns=names) if names else None
        arrays: list[Any] = []
        for one, name in zip(self.wanted, self.names, strict=True):
            if name is not None:
                assert found is not None
                arrays.append(found.column(name).cast(one.field.type))
            elif one.initial is not None:
                arrays.append(pa.repeat(one.initial, count))
            else:
                arrays.append(pa.nulls(count, one.field.type))
        return pa.table(arrays, schema=pa.schema([one.field for one in self.wanted]))
