"""`spark.readStream.format("tailrace")`: a stream of the changes, for users who write their own Spark jobs.

With a table, a row has the table's typed columns and `_tailrace_op`, `_tailrace_position`, `_tailrace_txn`,
`_tailrace_committed_at`, `_tailrace_unchanged` (columns the log left out) and `_tailrace_exact`. Without a table, the
stream has every change of every table: table, op, position, txn, committed_at, and key, before, after as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from tailrace.config.pipeline import load_all
from tailrace.config.registry import begin_at, open_source
from tailrace.errors import ConfigError, SchemaChangedError, suggest
from tailrace.model.change import EXACT, UNCHANGED, Changes, Op, op_names, position_texts
from tailrace.model.collapse import fit
from tailrace.model.schema import TableName, TableSchema
from tailrace.model.value_text import object_text
from tailrace.source.follower import Limit, Offset
from tailrace.source.source import Source, SourceContext
from tailrace.stream.data_source import BlockPartition, BlockReader, Feed

_OPTIONS = ["config", "table", "reader", "from"]
_METADATA = [
    pa.field("_tailrace_op", pa.string()),
    pa.field("_tailrace_position", pa.string()),
    pa.field("_tailrace_txn", pa.int64()),
    pa.field("_tailrace_committed_at", pa.timestamp("us", "UTC")),
    pa.field(UNCHANGED, pa.list_(pa.string())),
    pa.field(EXACT, pa.string()),
]
_EVERY = pa.schema(
    [
        ("table", pa.string()),
        ("op", pa.string()),
        ("position", pa.string()),
        ("txn", pa.int64()),
        ("committed_at", pa.timestamp("us", "UTC")),
        ("key", pa.string()),
        ("before", pa.string()),
        ("after", pa.string()),
    ]
)


@dataclass(frozen=True)
class StreamRequest:
    """The options of a stream, validated."""

    source: Source
    table: TableSchema | None
    limit: Limit

    @classmethod
    def of(cls, options: Mapping[str, str]) -> StreamRequest:
        for word in options:
            if word.lower() not in _OPTIONS:
                raise ConfigError(f"a stream has no option {word}{suggest(word, _OPTIONS)}", fix=f'leave out "{word}"')
        path = options.get("config")
        if not path:
            raise ConfigError("the stream has no config", fix='add .option("config", "shop.yaml")')
        config = load_all(path)[0]
        if begin := options.get("from"):
            config = begin_at(config, begin)
        name = options.get("table")
        reader = options.get("reader") or f"stream {name or 'every table'}"
        if SourceContext(reader=reader).is_pipeline:
            raise ConfigError(
                f"the pipeline itself uses the reader name {reader!r}", fix='use another name as "reader"'
            )
        source = open_source(config).for_reader(reader, name)
        table = None
        if name:
            found = {schema.table: schema for schema in source.tables()}
            try:
                table = found[TableName.parse(name)]
            except (KeyError, ValueError):
                raise ConfigError(f"the source has no table {name}", fix=f"tailrace tables {path}") from None
        return cls(source, table, Limit(config.batch.max_rows, config.batch.max_bytes))

    def layout(self) -> pa.Schema:
        return _EVERY if self.table is None else pa.schema([*self.table.row_type, *_METADATA])

    def schema(self) -> StructType:
        return from_arrow_schema(self.layout())

    def open_reader(self) -> DataSourceStreamReader:
        return ChangeReader(self)


class ChangeReader(BlockReader):
    """Reads like the pipeline's reader, but yields changes instead of blocks."""

    def __init__(self, request: StreamRequest) -> None:
        super().__init__(Feed(request.source, request.limit, lanes=1))
        self.request = request

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "request": self.request}

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, BlockPartition)
        table = self.request.table
        for changes in self.feed.source.read(partition.split):
            # A stream keeps the columns that the table had when the stream was opened.
            yield json_rows(changes) if table is None else typed_rows(fitted(changes, table), self.request.layout())

    def commit(self, end: Offset) -> None:
        self.feed.source.release(end)


def fitted(changes: Changes, table: TableSchema) -> Changes:
    """The changes with the columns of `table`. Raises SchemaChangedError; its fix is for streams, which lack resync."""
    try:
        return fit(changes, table)
    except SchemaChangedError as error:
        error.fix = (
            "load the stream again, with the current columns; use a new checkpoint to skip changes that fit neither"
        )
        raise


def typed_rows(changes: Changes, layout: pa.Schema) -> pa.RecordBatch:
    """The table's columns and the metadata columns."""
    batch = changes.batch
    return pa.RecordBatch.from_arrays(
        [
            *changes.row.flatten(),
            op_names(changes.numpy("op")),
            position_texts(changes.numpy("commit"), changes.numpy("ordinal")),
            batch.column("txn"),
            batch.column("committed_at"),
            changes.unchanged_names(),
            batch.column("exact"),
        ],
        schema=layout,
    )


def json_rows(changes: Changes) -> pa.RecordBatch:
    """One row per change; columns that the log left out are absent from `after`."""
    batch, table = changes.batch, changes.table
    op = changes.numpy("op")
    gone = (op == Op.DELETE) | (op == Op.TRUNCATE)
    columns = dict(zip((column.name for column in table.columns), changes.row.flatten(), strict=True))
    mask = changes.unchanged_mask()
    image = object_text(columns, left_out=mask)
    before = batch.column("before")
    old = dict(zip(columns, before.flatten(), strict=True))
    key = object_text({name: columns[name] for name in table.key}) if table.key else pa.nulls(len(changes), pa.string())
    whole_before = pc.if_else(before.is_valid(), object_text(old), None)
    return pa.RecordBatch.from_arrays(
        [
            pa.array([str(table.table)] * len(changes), pa.string()),
            op_names(changes.numpy("op")),
            position_texts(changes.numpy("commit"), changes.numpy("ordinal")),
            batch.column("txn"),
            batch.column("committed_at"),
            pc.if_else(pa.array(op == Op.TRUNCATE), None, key),
            pc.if_else(pa.array(op == Op.DELETE), pc.coalesce(whole_before, image), whole_before),
            pc.if_else(pa.array(gone), None, image),
        ],
        schema=_EVERY,
    )
