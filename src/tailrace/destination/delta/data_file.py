"""The Parquet files of a Delta table: written once, never changed, and described by the log."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import re
import sys
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake.transaction import AddAction, RemoveAction

from tailrace.destination.delta.table_folder import TablePath
from tailrace.errors import UnfitError
from tailrace.model import key as keys

# A random update rewrites the file that holds its row, so the file's size is the price of a small batch; but a table
# should not fall into thousands of files either. docs/decisions/0002-delta-engine.md has the measurements.
LEAST_ROWS = 32_768
MOST_ROWS = 1_048_576
FILES = 400
MOST_BYTES = 128 << 20  # of Arrow data, roughly three times the file's
_GROUP_ROWS = 131_072
_FEW_VALUES = 0.1
_FOOTER_BYTES = 4096
"""Parquet's footer has no bounds for longer texts."""
_NULL = "__HIVE_DEFAULT_PARTITION__"
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_]*=[A-Za-z0-9_.-]+")
_STAT_CHARS = 32
_LAST_CHAR = chr(sys.maxunicode)


def rows_per_file(table_rows: int) -> int:
    """How many rows a file of a table of this size should hold."""
    return min(max(table_rows // FILES, LEAST_ROWS), MOST_ROWS)


@dataclass(frozen=True)
class DataFile:
    """A file of the table, written or to be. `partition` holds Delta's text of the partition's values."""

    path: str
    size: int
    rows: int
    stats: str = ""
    partition: Mapping[str, str | None] = field(default_factory=dict)
    low: Any = None
    high: Any = None

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
        stats = json.loads(raw["stats"])
        low, high = (stats.get(side, {}).get(key[0]) if len(key) == 1 else None for side in ("minValues", "maxValues"))
        whole = type(low) is type(high) is int
        return cls(
            raw["path"],
            raw["size"],
            raw["rows"],
            raw["stats"],
            raw["partition"],
            low if whole else None,
            high if whole else None,
        )

    def may_share_keys(self, other: DataFile) -> bool:
        """Whether two files can hold the same key, judged by their bounds."""
        if None in (self.low, self.high, other.low, other.high):
            return True
        return bool(self.low <= other.high and other.low <= self.high)

    def add(self, *, data_change: bool = True) -> AddAction:
        return AddAction(self.path, self.size, self.partition, int(time.time() * 1000), data_change, self.stats)

    def remove(self, *, data_change: bool = True) -> RemoveAction:
        # The log keeps paths percent-encoded and delta-rs encodes them again on the way out.
        return RemoveAction(
            unquote(self.path),
            data_change,
            int(time.time() * 1000),
            size=self.size,
            partition_values=dict(self.partition),
        )


class FileWriter:
    """Writes rows to new files of one table, rolled at `rows` rows; with `partition_by`, apart for each partition.

    Used as a context: when it ends, files are durable but not visible. After an error the open files are deleted.
    """

    def __init__(self, place: TablePath, schema: pa.Schema, partition_by: Sequence[str], rows: int) -> None:
        self.place = place
        self.schema = schema
        self.partition_by = tuple(partition_by)
        self.limit = rows
        self.written: list[DataFile] = []
        self._open: dict[tuple[str | None, ...], _OpenFile] = {}

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            for partition in list(self._open):
                self._close(partition)
            return
        for opened in self._open.values():
            opened.abandon(kind, error, trace)

    def write(self, rows: pa.Table) -> None:
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
    """A file's rows, a row group's worth at a time, the partition's values put back. `kinds` types the latter."""
    with pq.ParquetFile(
        place.open(unquote(file.path)),
        memory_map=place.is_local,
        pre_buffer=not place.is_local,
        coerce_int96_timestamp_unit="us",  # as Spark writes them; nanoseconds hold no year before 1677 or after 2262
    ) as parquet:
        present = [name for name in parquet.schema_arrow.names if columns is None or name in columns]
        constant = [name for name in file.partition if columns is None or name in columns]
        for batch in parquet.iter_batches(batch_size=_GROUP_ROWS, columns=present, use_threads=False):
            rows = pa.Table.from_batches([batch])
            for name in constant:
                scalar = partition_value(file.partition[name], kinds[name])
                if name in rows.schema.names:
                    rows = rows.drop_columns([name])
                rows = rows.append_column(pa.field(name, kinds[name]), pa.repeat(scalar, rows.num_rows))
            yield rows


def mean_row_bytes(files: Sequence[DataFile]) -> int:
    """The approximate memory that one row of these files takes."""
    return 3 * sum(file.size for file in files) // max(total_rows(files), 1)


def total_rows(files: Iterable[DataFile]) -> int:
    return sum(file.rows for file in files)
