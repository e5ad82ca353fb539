"""Reads the data files of a Delta table, and finds those that are not as they were written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tailrace.destination.delta.data_file import GROUP_ROWS, DataFile
from tailrace.destination.delta.file_writer import COLUMNS, columns_checksum
from tailrace.destination.delta.table_folder import TablePath
from tailrace.errors import TableError

_DAMAGE = re.compile(
    r"could not verify page integrity|Couldn't deserialize thrift|decompress|Parquet|ColumnMetaData|codec"
)


def read_columns(
    place: TablePath, file: DataFile, columns: Sequence[str] | None, kinds: Mapping[str, pa.DataType]
) -> Iterator[pa.Table]:
    """A file's rows, a row group's worth at a time, the partition's values put back. `kinds` types the latter.

    Rows that are marked as deleted are there, too. Raises TableError for a file that is not as it was written: a
    rewrite would make its damage permanent.
    """
    with _opened(place, file) as parquet:
        present = _present(parquet, columns)
        for batch in parquet.iter_batches(batch_size=GROUP_ROWS, columns=present, use_threads=False):
            yield _with_partition(pa.Table.from_batches([batch]), file, columns, kinds)


def read_rows(
    place: TablePath,
    file: DataFile,
    columns: Sequence[str] | None,
    kinds: Mapping[str, pa.DataType],
    rows: npt.NDArray[np.int64],
) -> Iterator[pa.Table]:
    """The rows of a file with these ascending numbers, as `read_columns` gives them; other row groups are not read."""
    with _opened(place, file) as parquet:
        present, start = _present(parquet, columns), 0
        for group in range(parquet.num_row_groups):
            end = start + parquet.metadata.row_group(group).num_rows
            low, high = np.searchsorted(rows, [start, end])
            if low < high:
                found = parquet.read_row_group(group, columns=present, use_threads=False)
                # Rows without a column have no places to take them from.
                taken = found.take(pa.array(rows[low:high] - start)) if present else found.slice(0, high - low)
                yield _with_partition(taken, file, columns, kinds)
            start = end


@contextmanager
def _opened(place: TablePath, file: DataFile) -> Iterator[pq.ParquetFile]:
    with (
        _sound(place, file),
        pq.ParquetFile(
            place.open(unquote(file.path), file.size),
            memory_map=place.is_local,
            pre_buffer=not place.is_local,
            coerce_int96_timestamp_unit="us",  # as Spark writes them; nanoseconds hold no year before 1677, after 2262
            page_checksum_verification=True,  # where there are checksums: tailrace did not always write them
        ) as parquet,
    ):
        _require_footer(parquet, file)
        yield parquet


def _present(parquet: pq.ParquetFile, columns: Sequence[str] | None) -> list[str]:
    return [name for name in parquet.schema_arrow.names if columns is None or name in columns]


def _with_partition(
    rows: pa.Table, file: DataFile, columns: Sequence[str] | None, kinds: Mapping[str, pa.DataType]
) -> pa.Table:
    for name in (name for name in file.partition if columns is None or name in columns):
        scalar = partition_value(file.partition[name], kinds[name])
        if name in rows.schema.names:
            rows = rows.drop_columns([name])
        rows = rows.append_column(pa.field(name, kinds[name]), pa.repeat(scalar, rows.num_rows))
    return rows


def _require_footer(parquet: pq.ParquetFile, file: DataFile) -> None:
    """A footer has no checksum. Most damage makes it unreadable; a damaged name of a column is just another name."""
    if parquet.metadata.num_rows != file.rows:
        raise pa.ArrowInvalid("its number of rows is not the one in the log")
    stored = (parquet.metadata.metadata or {}).get(COLUMNS.encode())
    if stored is not None and stored.decode() != columns_checksum(parquet.schema_arrow):
        raise pa.ArrowInvalid("its columns are not those that were written")


def partition_value(text: str | None, kind: pa.DataType) -> Any:
    """The inverse of `partition_text`, as an Arrow scalar."""
    return pa.scalar(text, pa.string()).cast(kind)


@contextmanager
def _sound(place: TablePath, file: DataFile) -> Iterator[None]:
    """Turn what a damaged file raises into a TableError. A failing disk or store has an errno, or other words."""
    try:
        yield
    except (OSError, pa.ArrowInvalid) as error:
        is_damage = isinstance(error, pa.ArrowInvalid) or (error.errno is None and _DAMAGE.search(str(error)))
        if not is_damage:
            raise
        raise TableError(
            f"{place.uri}/{file.path} is damaged: {str(error).splitlines()[0]}",
            table=place.table,
            fix=f"restore the file from a backup, then tailrace retry FILE {place.table}; or copy the table again:"
            f" tailrace resync FILE {place.table}",
        ) from error
