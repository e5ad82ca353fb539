"""Writes the data files of a Delta table, and the statistics by which the log describes them."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import re
import sys
import uuid
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tailrace.destination.delta.data_file import GROUP_ROWS, DataFile, json_object
from tailrace.destination.delta.table_folder import TablePath
from tailrace.errors import UnfitError
from tailrace.model import key as keys

MOST_BYTES = 128 << 20  # of Arrow data, roughly three times the file's
COLUMNS = "tailrace.columns"
"""In a file's metadata: a checksum of its columns."""
_FEW_VALUES = 0.1
_FOOTER_BYTES = 4096
"""Parquet's footer has no bounds for longer texts."""
_NULL = "__HIVE_DEFAULT_PARTITION__"
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_]*=[A-Za-z0-9_.-]+")
_STAT_CHARS = 32
_LAST_CHAR = chr(sys.maxunicode)


class FileWriter:
    """Writes rows to new files of one table, rolled at `rows` rows; with `partition_by`, apart for each partition.

    The last file takes up to half as many rows more, so that none is left with a few. If more than `many` rows come,
    files are rolled at twice that number instead: so many rows wait until that is known. Used as a context: when it
    ends, files are durable but not visible. After an error the open files are deleted.
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
        self._waiting: list[pa.Table] = []
        self._open: dict[tuple[str | None, ...], _OpenFile] = {}

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            self._release(self._spare)
            self._release(0, self.limit + self._spare)
            for partition in list(self._open):
                self._close(partition)
            return
        for opened in self._open.values():
            opened.abandon(kind, error, trace)

    @property
    def _spare(self) -> int:
        """How many rows the last file may hold more than the others."""
        return self.limit // 2

    def write(self, rows: pa.Table) -> None:
        self._waiting.append(rows)
        waiting = sum(one.num_rows for one in self._waiting)
        if self.many and waiting > self.many:
            self.limit, self.many = 2 * self.many, 0
        if waiting > max(self.many, self._spare):
            self._release(self._spare)
        if sum(one.nbytes for one in self._waiting) > MOST_BYTES:
            self._release(0)

    def _release(self, keep: int, limit: int | None = None) -> None:
        """Write what waits, except for the last `keep` rows."""
        waiting, self._waiting = self._waiting, []
        left = sum(one.num_rows for one in waiting) - keep
        for rows in waiting:
            if left > 0:
                self._write(rows.slice(0, left), limit or self.limit)
            if rows.num_rows > left:
                self._waiting.append(rows.slice(max(left, 0)))
            left -= rows.num_rows

    def _write(self, rows: pa.Table, limit: int) -> None:
        for partition, part in split_by_partition(rows, self.partition_by):
            start = 0
            while start < part.num_rows:
                opened = self._open.get(partition)
                if opened is not None and (opened.rows >= limit or opened.bytes >= MOST_BYTES):
                    self._close(partition)
                    opened = None
                if opened is None:
                    if len(self._open) >= 64:
                        self._close(next(iter(self._open)))
                    opened = self._open[partition] = _OpenFile(
                        self.place, self.schema, dict(zip(self.partition_by, partition, strict=True))
                    )
                piece = part.slice(start, max(limit - opened.rows, 1))
                opened.write(piece)
                start += piece.num_rows

    def widen(self, schema: pa.Schema) -> None:
        """Write further rows with these columns, in new files."""
        self._release(0)
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
        if self._held_rows >= GROUP_ROWS:
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
        self._writer.write_table(group, row_group_size=GROUP_ROWS)

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
            self._writer.add_key_value_metadata({COLUMNS: _columns_written(self.schema)})
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
    fields = {"numRecords": str(footer.num_rows), "nullCount": json_object(counted)}
    if not unknown and None not in (*least_texts.values(), *most_texts.values()):
        fields |= {"minValues": json_object(least_texts), "maxValues": json_object(most_texts)}
    return json_object(fields)


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


@lru_cache(maxsize=256)
def _columns_written(schema: pa.Schema) -> str:
    """The checksum of the columns as a reader will find them, whose types are not always those that were written."""
    sink = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), sink, store_schema=False)
    return columns_checksum(pq.read_schema(pa.BufferReader(sink.getvalue())))


def columns_checksum(schema: pa.Schema) -> str:
    """What changes when a column has another name, type or nullability."""
    columns = [f"{column.name}\0{column.type}\0{column.nullable}" for column in schema]
    return f"{zlib.crc32(chr(1).join(columns).encode('utf-8', 'surrogatepass')):08x}"
