"""What the topic of a table holds, as its rows: for `tailrace verify`.

The topic is read from its beginning, and the last event of each key counts. Rows are held in memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from confluent_kafka import OFFSET_BEGINNING, TopicPartition

from tailrace.destination import plan_columns
from tailrace.destination.kafka.client import find_topic
from tailrace.destination.kafka.name import topic_of
from tailrace.destination.kafka.option import KafkaOptions
from tailrace.destination.kafka.progress import KafkaProgress, messages, read_progress
from tailrace.destination.kafka.record import EVERY_ROW
from tailrace.destination.kafka.value import is_unfit, parse, to_arrow
from tailrace.model.change import EXACT
from tailrace.model.schema import TableName, TableSchema
from tailrace.model.table_rows import TableRows

TopicEvent = dict[str, Any]
_RESTART = b'"snapshot":"first"'


def read_rows(options: KafkaOptions, table: TableSchema) -> TableRows | None:
    """The rows of a table with a key; none where there is no topic.

    None for a topic that does not have every value of every row.
    """
    if options.unchanged == "placeholder" or not options.copied_rows:
        return None
    progress = read_progress(options)
    last = progress.last_columns(table.table)
    kept = plan_columns(last, table).table if last is not None else table
    events = last_events(options, table.table, keyed=True) if last is not None else []
    rows = rows_of(events, kept, progress)

    def shape(batch: pa.RecordBatch) -> pa.RecordBatch:
        arrays = [batch.column(column.name).cast(column.type) for column in kept.columns]
        return pa.RecordBatch.from_arrays([*arrays, batch.column(EXACT)], schema=rows.schema)

    return TableRows(iter(rows.combine_chunks().to_batches()), shape)


def last_events(options: KafkaOptions, table: TableName, *, keyed: bool) -> list[TopicEvent]:
    """The events of the rows that are there; every event since its last copy, of a table without a key."""
    topic = find_topic(options, topic_of(options.topic, table))
    if topic is None:
        return []
    partitions = [TopicPartition(topic.name, at, OFFSET_BEGINNING) for at in range(topic.partitions)]
    found: list[dict[str, bytes]] = [{} for _ in partitions]
    for message in messages(options, *partitions):
        rows, key, value = found[message.partition() or 0], message.key(), message.value()
        if key == EVERY_ROW or (not keyed and value is not None and _RESTART in value):
            rows.clear()
            continue
        row = _identity(key) if key is not None else str(message.offset())
        if value is None:
            rows.pop(row, None)
        else:
            rows[row] = value
    return [parse(value) for rows in found for value in rows.values()]


def rows_of(events: Sequence[TopicEvent], kept: TableSchema, progress: KafkaProgress) -> pa.Table:
    """The rows after these events, with the columns that the table has now, and EXACT."""
    schema = pa.schema([*((column.name, column.type) for column in kept.columns), (EXACT, pa.string())])
    versions = np.array([event["source"]["schema_version"] for event in events], np.int64)
    pieces = [schema.empty_table()]
    for version in np.unique(versions).tolist():
        images = [
            events[at]["after"] or events[at]["before"] or {} for at in np.flatnonzero(versions == version).tolist()
        ]
        then = progress.version(kept.table, version) or kept
        pieces.append(_evolved(images, then, kept, schema))
    return pa.concat_tables(pieces)


def _evolved(images: list[TopicEvent], then: TableSchema, kept: TableSchema, schema: pa.Schema) -> pa.Table:
    """Rows that were written with the columns `then`, with those of `kept`."""
    plan = plan_columns(then, kept)
    names = {source: name for name, source in plan.sources.items() if source is not None}
    exact: list[dict[str, str]] = [{} for _ in images]
    arrays: dict[str, pa.Array[Any]] = {}
    for column in then.columns:
        if (name := names.get(column.name)) is None:
            continue
        values: list[Any] = [image.get(column.name) for image in images]
        for at, value in enumerate(values):
            if is_unfit(value, column.type):
                exact[at][name], values[at] = value, None
        arrays[name] = to_arrow(values, column.type).cast(kept.column(name).type)
    for name in kept.arrow.names:
        if name not in arrays:
            initial = plan.initial.column(name)[0]
            arrays[name] = pa.repeat(initial, len(images)).cast(kept.column(name).type)
    texts = [json.dumps(each, ensure_ascii=False) if each else None for each in exact]
    return pa.table([*(arrays[name] for name in kept.arrow.names), pa.array(texts, pa.string())], schema=schema)


def _identity(key: bytes) -> str:
    """The values of a key, without the names of its columns, which may be renamed."""
    return json.dumps([*json.loads(key).values()])
