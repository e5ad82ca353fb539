"""The Parquet files of a Delta table: written once, never changed, and described by the log."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import re
import sys
import uuid
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tailrace.destination.delta.deletion_vector import Descriptor
from tailrace.destination.delta.table_folder import TablePath
from tailrace.errors import TableError, UnfitError
from tailrace.model import key as keys

# A random update rewrites the file that holds its row, so the file's size is the price of a small batch; but a table
# should not fall into thousands of files either. docs/decisions/0002-delta-engine.md has the measurements.
LEAST_ROWS = 32_768
MOST_ROWS = 1_048_576
FILES = 400
MOST_BYTES = 128 << 20  # of Arrow data, roughly three times the file's
_GROUP_ROWS = 131_072
_FEW_VALUES = 0.1
_VECTOR_BYTES = "tailrace.vector_bytes"
"""The tag of a file in the log for `DataFile.vector_bytes`."""
_COLUMNS = "tailrace.columns"
"""In a file's metadata: a checksum of its columns."""
_FOOTER_BYTES = 4096
"""Parquet's footer has no bounds for longer texts."""
_NULL = "__HIVE_DEFAULT_PARTITION__"
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_]*=[A-Za-z0-9_.-]+")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_STAT_CHARS = 32
_LAST_CHAR = chr(sys.maxunicode)


# A vector is rewritten with each batch that marks a row of its file, and the log names the file again: the price of a
# small batch is the number of files and the size of their vectors. docs/decisions/0008-merge-on-read.md measures both.
LEAST_MARKED_ROWS = 131_072
MARKED_FILES = 64


def rows_per_file(table_rows: int, *, marks: bool = False) -> int:
    """How many rows a file of a table of this size should hold: one whose rows are marked, or one that is rewritten."""
    if marks:
        return min(max(table_rows // MARKED_FILES, LEAST_MARKED_ROWS), MOST_ROWS)
    return min(max(table_rows // FILES, LEAST_ROWS), MOST_ROWS)


@dataclass(frozen=True)
class DataFile:
    """A file of the table, written or to be. `partition` holds Delta's text of the partition's values.

    rows           all rows in the file, those that `vector` marks as deleted included
    low, high      the bounds of the key, if it is one whole number or date
    modified       when the file was written, in milliseconds; 0: now
    vector_bytes   the bytes of all vectors that were ever written for the file
    """

    path: str
    size: int
    rows: int
    stats: str = ""
    partition: Mapping[str, str | None] = field(default_factory=dict)
    low: Any = None
    high: Any = None
    vector: Descriptor | None = None
    modified: int = 0
    vector_bytes: int = 0

    @property
    def identity(self) -> tuple[str, str]:
        """What the log knows the file by: the same file with another vector counts as another one."""
        return self.path, self.vector.unique_id if self.vector is not None else ""

    @property
    def dead(self) -> int:
        return self.vector.cardinality if self.vector is not None else 0

    @property
    def alive(self) -> int:
        return self.rows - self.dead

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "size": self.size,
            "rows": self.rows,
            "stats": self.stats,
            "partition": dict(self.partition),
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any], key: Sequence[str | None]) -> DataFile:
        """The inverse of `to_json`, with the bounds of a key, by its names in the file, that is one whole number."""
        return cls(raw["path"], raw["size"], raw["rows"], raw["stats"], raw["partition"]).bounded_by(key)

    @classmethod
    def from_add(cls, add: Mapping[str, Any], count: Callable[[str], int]) -> DataFile:
        """A file as the log describes it. `count` gives the rows of one whose number the log does not have."""
        stats, vector = add.get("stats") or "", add.get("deletionVector")
        rows = _parsed(stats).get("numRecords")
        return cls(
            add["path"],
            add["size"],
            count(unquote(add["path"])) if rows is None else rows,
            stats,
            # The empty text means null there.
            {name: value or None for name, value in (add.get("partitionValues") or {}).items()},
            vector=Descriptor.from_json(vector) if vector else None,
            modified=add.get("modificationTime") or 0,
            vector_bytes=int((add.get("tags") or {}).get(_VECTOR_BYTES) or 0),
        )

    def bounded_by(self, key: Sequence[str | None]) -> DataFile:
        """The same file with the bounds of a key, by its names in the file, that is one whole number or date."""
        if len(key) != 1 or key[0] is None:
            return self
        low, high = bounds_of(self.stats, key[0])
        return self if (low, high) == (self.low, self.high) else replace(self, low=low, high=high)

    def may_share_keys(self, other: DataFile) -> bool:
        """Whether two files can hold the same key, judged by their bounds."""
        if None in (self.low, self.high, other.low, other.high):
            return True
        return bool(self.low <= other.high and other.low <= self.high)

    def with_vector(self, vector: Descriptor) -> DataFile:
        """The same file with these rows marked as deleted. Its bounds are wide from now on: a marked row may be one."""
        parsed = _parsed(self.stats)
        # A file with a vector must say how many rows it has, which another writer may have left out.
        fields = {"numRecords": str(self.rows), "tightBounds": "false"}
        missing = {name: value for name, value in fields.items() if str(parsed.get(name)).lower() != value}
        stats = self.stats
        if missing:
            # As text: numbers must keep their digits.
            rest = stats.strip()[1:] if parsed else "}"
            stats = _object(missing)[:-1] + (", " if parsed else "") + rest
        written = self.vector_bytes + vector.size_in_bytes
        return replace(self, vector=vector, stats=stats, vector_bytes=written)

    def add(self, now: int, *, data_change: bool = True) -> dict[str, Any]:
        """The action that adds the file."""
        return {
            "path": self.path,
            "partitionValues": dict(self.partition),
            "size": self.size,
            "modificationTime": self.modified or now,
            "dataChange": data_change,
            "stats": self.stats,
            **({"tags": {_VECTOR_BYTES: str(self.vector_bytes)}} if self.vector_bytes else {}),
            **self._marked(),
        }

    def remove(self, now: int, *, data_change: bool = True) -> dict[str, Any]:
        """The action that removes the file. Without its vector it would name another file, and the rows would stay."""
        return {
            "path": self.path,
            "deletionTimestamp": now,
            "dataChange": data_change,
            "extendedFileMetadata": True,
            "partitionValues": dict(self.partition),
            "size": self.size,
            **self._marked(),
        }

    def _marked(self) -> dict[str, Any]:
        return {} if self.vector is None else {"deletionVector": self.vector.to_json()}

    def is_removed_by(self, remove: Mapping[str, Any]) -> bool:
        """Whether an action removes this very file."""
        vector = remove.get("deletionVector")
        return self.identity[1] == (Descriptor.from_json(vector).unique_id if vector else "")


class FileWriter:
    """Writes rows to new files of one table, rolled at `rows` rows; with `partition_by`, apart for each partition.

    If more than `many` rows come, files are rolled at that number instead: so many rows wait until that is known.
    Used as a context: when it ends, files are durable but not visible. After an error the open files are deleted.
    """

    def __init__(
        self, place: TablePath, schema: pa.Schema, partition_by: Sequence[str], rows: int, *, many: int = 0
    ) -> None:
        self.place = place
        self.schema = schema
        self.partition_by = tuple(partition_by)
        self.limit = rows
        self.many = many
        self.written: list[DataFile] = []
        self._waiting: list[pa.Table] | None = [] if many > rows else None
        self._open: dict[tuple[str | None, ...], _OpenFile] = {}

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            self._release()
            for partition in list(self._open):
                self._close(partition)
            return
        for opened in self._open.values():
            opened.abandon(kind, error, trace)

    def write(self, rows: pa.Table) -> None:
        if self._waiting is None:
            self._write(rows)
            return
        self._waiting.append(rows)
        if sum(one.num_rows for one in self._waiting) > self.many:
            self.limit = self.many
            self._release()
        elif sum(one.nbytes for one in self._waiting) > MOST_BYTES:
            self._release()

    def _release(self) -> None:
        waiting, self._waiting = self._waiting or [], None
        for rows in waiting:
            self._write(rows)

    def _write(self, rows: pa.Table) -> None:
        for partition, part in split_by_partition(rows, self.partition_by):
            start = 0
            while start < part.num_rows:
                opened = self._open.get(partition)
                if opened is None:
                    if len(self._open) >= 64:
                        self._close(next(iter(self._open)))
                    opened = self._open[partition] = _OpenFile(
                        self.place, self.schema, dict(zip(self.partition_by, partition, strict=True))
                    )
                piece = part.slice(start, max(self.limit - opened.rows, 1))
                opened.write(piece)
                start += piece.num_rows
                if opened.rows >= self.limit or opened.bytes >= MOST_BYTES:
                    self._close(partition)

    def widen(self, schema: pa.Schema) -> None:
        """Write further rows with these columns, in new files."""
        self._release()
        for partition in list(self._open):
            self._close(partition)
        self.schema = schema

    def _close(self, partition: tuple[str | None, ...]) -> None:
        opened = self._open.pop(partition)
        self.written.append(opened.close())


class _OpenFile:
    def __init__(self, place: TablePath, schema: pa.Schema, partition: Mapping[str, str | None]) -> None:
        self.place = place
        self.partition = partition
        self.schema = pa.schema([f.remove_metadata() for f in schema if f.name not in partition])
        self.name = f"{_folder(partition)}part-{uuid.uuid4().hex}.parquet"
        self.rows = 0
        self.bytes = 0
        self._context = place.creating(self.name)
        self._stream = self._context.__enter__()
        self._writer: pq.ParquetWriter | None = None
        self._held: list[pa.Table] = []
        self._held_rows = 0
        self._texts: dict[str, tuple[str, str]] = {}
        self._with_nan: set[str] = set()

    def write(self, rows: pa.Table) -> None:
        part = rows.select(self.schema.names)
        self.rows += part.num_rows
        self.bytes += part.nbytes
        self._held.append(part)
        self._held_rows += part.num_rows
        if self._held_rows >= _GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        if not self._held:
            return
        group = pa.concat_tables(self._held).cast(self.schema)
        self._held, self._held_rows = [], 0
        self._look_at(group)
        if self._writer is None:
            self._writer = pq.ParquetWriter(
                self._stream,
                self.schema,
                compression="zstd",
                compression_level=1,
                use_dictionary=_worth_dictionary(group),
                store_schema=False,
                write_page_checksum=True,
            )
        self._writer.write_table(group, row_group_size=_GROUP_ROWS)

    def _look_at(self, group: pa.Table) -> None:
        """Note what the footer lacks: the bounds of long texts, and which columns hold NaN."""
        for name, values in zip(group.schema.names, group.columns, strict=True):
            if pa.types.is_string(values.type) and (pc.max(pc.binary_length(values)).as_py() or 0) > _FOOTER_BYTES:
                low, high = pc.min_max(values).as_py().values()
                known = self._texts.get(name, (low, high))
                self._texts[name] = min(low, known[0]), max(high, known[1])
            elif pa.types.is_floating(values.type) and pc.any(pc.is_nan(values)).as_py():
                self._with_nan.add(name)

    def close(self) -> DataFile:
        try:
            self._flush()
            assert self._writer is not None
            self._writer.add_key_value_metadata({_COLUMNS: _columns_written(self.schema)})
            self._writer.close()
        except BaseException as error:
            self.abandon(type(error), error, error.__traceback__)
            raise
        size = self._stream.tell()
        footer = self._writer.writer.metadata
        self._context.__exit__(None, None, None)
        return DataFile(self.name, size, self.rows, stats_of(footer, self._texts, self._with_nan), self.partition)

    def abandon(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self._context.__exit__(kind, error, trace)
        except BaseException as again:
            if again is not error:
                raise


def _folder(partition: Mapping[str, str | None]) -> str:
    """The folder of a partition, as most writers of Delta name it: some readers take its values from there.

    None where a name or a value would have to be escaped, which not all of them do in the same way.
    """
    parts = [f"{name}={_NULL if value is None else value}" for name, value in partition.items()]
    is_plain = _NULL not in partition.values() and all(_PLAIN.fullmatch(part) for part in parts)
    return "".join(f"{part}/" for part in parts) if is_plain else ""


def _worth_dictionary(rows: pa.Table) -> list[str] | bool:
    """The text columns with few values: a dictionary saves space only there, and is the costliest part of writing."""
    sample = rows.slice(0, 4096)
    worth = [
        name
        for name, values in zip(sample.schema.names, sample.columns, strict=True)
        if (pa.types.is_string(values.type) or pa.types.is_binary(values.type))
        and pc.count_distinct(values).as_py() <= sample.num_rows * _FEW_VALUES
    ]
    return worth or False


def split_by_partition(
    rows: pa.Table, partition_by: Sequence[str]
) -> Iterator[tuple[tuple[str | None, ...], pa.Table]]:
    """The rows of each partition, with the partition's values as Delta's text."""
    if not partition_by or not rows.num_rows:
        yield tuple(None for _ in partition_by), rows
        return
    code = keys.codes(keys.comparable([rows.column(name) for name in partition_by]))
    order = np.argsort(code, kind="stable")
    starts = np.flatnonzero(np.append(True, code[order][1:] != code[order][:-1]))
    for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
        part = rows.take(pa.array(order[start:end]))
        try:
            values = {name: part.column(name)[0].as_py() for name in partition_by}
        except OverflowError:
            raise UnfitError(
                "a partition column holds a date before year 1 or after 9999, which not every reader knows there",
                fix=f"partition the table by other columns than {', '.join(partition_by)}",
            ) from None
        if empty := [name for name, value in values.items() if value == ""]:
            raise UnfitError(
                f"column {empty[0]} holds an empty text, which Delta would give back as null in a partition column",
                fix=f"partition the table by another column than {empty[0]}",
            )
        yield tuple(partition_text(value) for value in values.values()), part


def partition_text(value: Any) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    # Delta knows no empty text as a partition: it means null.
    return None if value is None or value == "" else str(value)


def partition_value(text: str | None, kind: pa.DataType) -> Any:
    """The inverse of `partition_text`, as an Arrow scalar."""
    return pa.scalar(text, pa.string()).cast(kind)


def stats_of(footer: pq.FileMetaData, texts: Mapping[str, tuple[str, str]], with_nan: Collection[str]) -> str:
    """Delta's statistics of a file, from its Parquet footer, the bounds of long texts and the columns that hold NaN.

    There are bounds for every column or for none: delta-rs treats a bound that is missing among others as null, and its
    datasets then leave out the file's rows for every filter on that column.
    """
    low: dict[str, Any] = {name: pair[0] for name, pair in texts.items()}
    high: dict[str, Any] = {name: pair[1] for name, pair in texts.items()}
    nulls: dict[str, int] = {}
    unknown = set(with_nan)
    uncounted: set[str] = set()
    columns = set(footer.schema.to_arrow_schema().names)
    for group in range(footer.num_row_groups):
        for index in range(footer.num_columns):
            kind = footer.schema.column(index)
            chunk = footer.row_group(group).column(index)
            name = chunk.path_in_schema
            stats = chunk.statistics
            if kind.max_repetition_level or name not in columns:
                continue
            if stats is None or not stats.has_null_count:
                unknown.add(name)
                uncounted.add(name)
                continue
            nulls[name] = nulls.get(name, 0) + stats.null_count
            is_binary = kind.physical_type == "BYTE_ARRAY" and kind.logical_type.type == "NONE"
            if stats.num_values == 0 or is_binary or (name in texts and not stats.has_min_max):
                continue
            try:
                least, most = (stats.min, stats.max) if stats.has_min_max else (None, None)
            except (ValueError, OverflowError):
                least = most = None  # past what Python's calendar knows
            if least is None or most is None:
                unknown.add(name)
                continue
            low[name] = min(low[name], least) if name in low else least
            high[name] = max(high[name], most) if name in high else most
    least_texts = {name: _stat(value, False) for name, value in low.items()}
    most_texts = {name: _stat(value, True) for name, value in high.items()}
    counted = {name: str(count) for name, count in nulls.items() if name not in uncounted}
    fields = {"numRecords": str(footer.num_rows), "nullCount": _object(counted)}
    if not unknown and None not in (*least_texts.values(), *most_texts.values()):
        fields |= {"minValues": _object(least_texts), "maxValues": _object(most_texts)}
    return _object(fields)


def _object(values: Mapping[str, str | None]) -> str:
    """A JSON object of values that are JSON already."""
    return "{" + ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in values.items()) + "}"


def _stat(value: Any, is_high: bool) -> str | None:
    """A bound as JSON; None if not every reader would understand it as a bound."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, str):
        if len(value) > _STAT_CHARS:
            if is_high and value[_STAT_CHARS] == _LAST_CHAR:
                return None
            value = value[:_STAT_CHARS] + (_LAST_CHAR if is_high else "")
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, datetime.datetime):
        if is_high:
            # Delta reads milliseconds; an upper bound must not fall below the value.
            try:
                value += datetime.timedelta(microseconds=999)
            except OverflowError:
                return None
        text = value.replace(microsecond=value.microsecond // 1000 * 1000).isoformat(timespec="milliseconds")
        return json.dumps(text.replace("+00:00", "Z"))
    if isinstance(value, datetime.date):
        return json.dumps(value.isoformat())
    if isinstance(value, decimal.Decimal):
        # All digits: a float's would be another number to readers that take them as decimals.
        text = format(value, "f")
        return text if "." in text else f"{text}.0"
    return None


def read_columns(
    place: TablePath, file: DataFile, columns: Sequence[str] | None, kinds: Mapping[str, pa.DataType]
) -> Iterator[pa.Table]:
    """A file's rows, a row group's worth at a time, the partition's values put back. `kinds` types the latter.

    Rows that are marked as deleted are there, too. Raises TableError for a file that is not as it was written: a
    rewrite would make its damage permanent.
    """
    with _opened(place, file) as parquet:
        present = _present(parquet, columns)
        for batch in parquet.iter_batches(batch_size=_GROUP_ROWS, columns=present, use_threads=False):
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
            place.open(unquote(file.path)),
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
    stored = (parquet.metadata.metadata or {}).get(_COLUMNS.encode())
    if stored is not None and stored.decode() != _checksum(parquet.schema_arrow):
        raise pa.ArrowInvalid("its columns are not those that were written")


@lru_cache(maxsize=256)
def _columns_written(schema: pa.Schema) -> str:
    """The checksum of the columns as a reader will find them, whose types are not always those that were written."""
    sink = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), sink, store_schema=False)
    return _checksum(pq.read_schema(pa.BufferReader(sink.getvalue())))


def _checksum(schema: pa.Schema) -> str:
    columns = [f"{column.name}\0{column.type}\0{column.nullable}" for column in schema]
    return f"{zlib.crc32(chr(1).join(columns).encode('utf-8', 'surrogatepass')):08x}"


_DAMAGE = re.compile(
    r"could not verify page integrity|Couldn't deserialize thrift|decompress|Parquet|ColumnMetaData|codec"
)


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


def mean_row_bytes(files: Sequence[DataFile]) -> int:
    """The approximate memory that one row of these files takes."""
    return 3 * sum(file.size for file in files) // max(total_rows(files), 1)


def total_rows(files: Iterable[DataFile]) -> int:
    return sum(file.alive for file in files)


@lru_cache(maxsize=65_536)
def _parsed(stats: str) -> dict[str, Any]:
    try:
        found = json.loads(stats or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


@lru_cache(maxsize=65_536)
def bounds_of(stats: str, column: str) -> tuple[int | None, int | None]:
    """The bounds of a column in a file's statistics, as whole numbers; None where they are not, or not there."""
    parsed = _parsed(stats)
    low, high = (_number((parsed.get(side) or {}).get(column)) for side in ("minValues", "maxValues"))
    return (None, None) if low is None or high is None else (low, high)


def _number(value: Any) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and _DATE.fullmatch(value):
        # A text may look like a date and be none.
        with suppress(ValueError):
            return (datetime.date.fromisoformat(value) - datetime.date(1970, 1, 1)).days
    return None
