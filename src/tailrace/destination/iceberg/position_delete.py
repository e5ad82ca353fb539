"""Position deletes: which rows of a data file are deleted, as a file of paths and positions.

A delete file concerns one data file, and a data file has at most one: a batch that deletes more of its rows writes all
of them into a new one, which replaces the other.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.manifest import DataFile, DataFileContent

from tailrace.destination.iceberg.column import FIELD_ID
from tailrace.destination.iceberg.data_file import TableFolder, new_file
from tailrace.destination.lake.row_bitmap import Rows, bitmap, numbers

PATH_ID, POSITION_ID = 2147483546, 2147483545
CACHE_BYTES = 64 << 20
"""How much memory a process uses for deletes it has read or written."""

_SCHEMA = pa.schema(
    [
        pa.field("file_path", pa.string(), False, metadata={FIELD_ID: str(PATH_ID).encode()}),
        pa.field("pos", pa.int64(), False, metadata={FIELD_ID: str(POSITION_ID).encode()}),
    ]
)
_kept: OrderedDict[str, tuple[Rows, int]] = OrderedDict()
_kept_bytes = 0
_lock = threading.Lock()


def target_of(file: DataFile) -> str | None:
    """The one data file that a delete file concerns; None for one that may concern several."""
    low, high = ((bounds or {}).get(PATH_ID) for bounds in (file.lower_bounds, file.upper_bounds))
    return low.decode() if file.content == DataFileContent.POSITION_DELETES and low and low == high else None


def write_deletes(folder: TableFolder, target: str, rows: Rows) -> DataFile:
    """Write the deleted rows of a data file."""
    path = folder.new_name("-deletes.parquet")
    positions = numbers(rows)
    table = pa.table([pa.repeat(pa.scalar(target, pa.string()), len(positions)), pa.array(positions)], schema=_SCHEMA)
    with folder.io.new_output(path).create() as stream:
        with pq.ParquetWriter(
            stream,
            _SCHEMA,
            compression="zstd",
            column_encoding={"pos": "DELTA_BINARY_PACKED"},
            use_dictionary=["file_path"],
            write_page_checksum=True,
        ) as writer:
            writer.write_table(table)
        size = stream.tell()
    low, high = (int(positions[at]).to_bytes(8, "little", signed=True) for at in (0, -1))
    made = new_file(
        DataFileContent.POSITION_DELETES,
        path,
        size,
        record_count=len(positions),
        column_sizes={},
        value_counts={PATH_ID: len(positions), POSITION_ID: len(positions)},
        null_value_counts={PATH_ID: 0, POSITION_ID: 0},
        nan_value_counts={},
        lower_bounds={PATH_ID: target.encode(), POSITION_ID: low},
        upper_bounds={PATH_ID: target.encode(), POSITION_ID: high},
        split_offsets=None,
    )
    _keep(path, rows)
    return made


def read_deletes(folder: TableFolder, file: DataFile) -> Rows:
    """The deleted rows that a delete file names."""
    with _lock:
        if (known := _kept.get(file.file_path)) is not None:
            _kept.move_to_end(file.file_path)
            return known[0]
    with folder.io.new_input(file.file_path).open() as stream:
        positions = pq.read_table(stream, columns=["pos"], page_checksum_verification=True).column("pos")
    rows = bitmap(positions.to_numpy())
    _keep(file.file_path, rows)
    return rows


def forget_all() -> None:
    """Hold no deletes any more, as in a new process."""
    global _kept_bytes
    with _lock:
        _kept.clear()
        _kept_bytes = 0


def _keep(path: str, rows: Rows) -> None:
    global _kept_bytes
    size = 512 + 2 * len(rows)
    with _lock:
        if path in _kept:
            return
        _kept[path] = rows, size
        _kept_bytes += size
        while _kept_bytes > CACHE_BYTES and len(_kept) > 1:
            _, (_, gone) = _kept.popitem(last=False)
            _kept_bytes -= gone
