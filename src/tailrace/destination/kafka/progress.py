"""What the pipeline's tables hold, as records of a compacted topic. They are written in the transaction of the changes.

There are two kinds of record, both JSON:

    {"pipeline": "shop/3f9c", "table": "public.orders"}   {"batch": "12-00c4…", "version": 3}
    {"table": "public.orders", "version": 3}              {"columns": …}

The second is the columns that a version of the table has: events name it, so that older ones can be read.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient

from tailrace.destination.kafka.client import find_topic, settings_of
from tailrace.destination.kafka.option import KafkaOptions
from tailrace.errors import UnavailableError
from tailrace.model.schema import TableName, TableSchema

ProgressRecord = tuple[bytes, bytes | None]
_FETCHED = 1000


@dataclass
class KafkaProgress:
    """The records as they are now, by key."""

    records: dict[bytes, bytes] = field(default_factory=dict)

    def mark(self, pipeline: str, table: TableName) -> str | None:
        """The mark of the last batch of the pipeline that the table's topic holds."""
        return str(found["batch"]) if (found := self._of(pipeline, table)) else None

    def columns(self, pipeline: str, table: TableName) -> TableSchema | None:
        """The columns of the last batch of the pipeline that the table's topic holds."""
        found = self._of(pipeline, table)
        return None if found is None else self.version(table, found["version"])

    def version(self, table: TableName, number: int) -> TableSchema | None:
        """The columns that a version of the table has."""
        value = self.records.get(_version_key(table, number))
        return None if value is None else TableSchema.from_json(json.dumps(json.loads(value)["columns"]))

    def last_columns(self, table: TableName) -> TableSchema | None:
        """The columns that the table's topic has now, whichever run of the pipeline wrote it."""
        held = [value for key, value in self.records.items() if _names(key) == {"pipeline": None, "table": str(table)}]
        return self.version(table, json.loads(held[-1])["version"]) if held else None

    def note(self, records: list[ProgressRecord]) -> None:
        """The records were committed."""
        for key, value in records:
            self.records.pop(key, None)
            if value is not None:
                self.records[key] = value

    def noting(self, pipeline: str, kept: TableSchema, mark: str) -> list[ProgressRecord]:
        """The records that say that a table holds a batch."""
        columns = _text({"columns": json.loads(kept.to_json())})
        version_key = _version_key(kept.table, kept.version)
        of_version = [(version_key, columns)] if self.records.get(version_key) != columns else []
        return [*of_version, (_batch_key(pipeline, kept.table), _text({"batch": mark, "version": kept.version}))]

    def forgetting(self, table: TableName) -> list[ProgressRecord]:
        """The records that say that a table holds no batch of any run."""
        wanted = {"pipeline": None, "table": str(table)}
        return [(key, None) for key in self.records if _names(key) == wanted]

    def _of(self, pipeline: str, table: TableName) -> dict[str, Any] | None:
        value = self.records.get(_batch_key(pipeline, table))
        return None if value is None else json.loads(value)


def _batch_key(pipeline: str, table: TableName) -> bytes:
    return _text({"pipeline": pipeline, "table": str(table)})


def _version_key(table: TableName, number: int) -> bytes:
    return _text({"table": str(table), "version": number})


def _names(key: bytes) -> dict[str, object]:
    """What a record is about, without the name of the pipeline."""
    names: dict[str, object] = json.loads(key)
    return names | {"pipeline": None} if "pipeline" in names else names


def _text(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


_lock = threading.Lock()
_read: dict[tuple[str, str], tuple[int, KafkaProgress]] = {}
"""How far this process has read a progress topic, and what it found: the next reading begins there."""


def read_progress(options: KafkaOptions, admin: AdminClient | None = None) -> KafkaProgress:
    """The committed records. Empty when there is no topic. Raises KafkaException."""
    place = options.servers, options.progress_topic
    if find_topic(options, options.progress_topic, admin) is None:
        return KafkaProgress()
    with _lock:
        start, progress = _read.pop(place, (OFFSET_BEGINNING, KafkaProgress()))
        try:
            end = start
            for message in messages(options, TopicPartition(options.progress_topic, 0, start)):
                if (key := message.key()) is not None:
                    progress.note([(key, message.value())])
                end = (message.offset() or 0) + 1
        except KafkaException as error:
            if error.args[0].code() != KafkaError._AUTO_OFFSET_RESET or start == OFFSET_BEGINNING:
                raise
            # The topic was deleted and created again: there are fewer records than were read.
        else:
            _read[place] = end, progress
            return KafkaProgress(dict(progress.records))
    return read_progress(options, admin)


def messages(options: KafkaOptions, *partitions: TopicPartition) -> Iterator[Message]:
    """The committed messages of partitions, from their offsets to where they end now. Raises KafkaException."""
    settings = settings_of(options) | {
        "group.id": options.transactional_id,
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "error",
        # There may be nothing to wait for: the end is what is asked for.
        "fetch.wait.max.ms": 10,
    }
    consumer = Consumer(settings)
    try:
        consumer.assign(list(partitions))
        left = {(each.topic, each.partition) for each in partitions}
        while left:
            first = consumer.poll(options.timeout)
            if first is None:
                raise UnavailableError(
                    f"kafka {options.servers} does not answer: nothing could be read from {partitions[0].topic}",
                    fix="start the brokers or check destination.servers; tailrace retries by itself",
                )
            # With a timeout, it would wait until it has as many.
            for message in [first, *consumer.consume(_FETCHED, 0)]:
                error = message.error()
                if error is None:
                    yield message
                elif error.code() == KafkaError._PARTITION_EOF:
                    left.discard((message.topic() or "", message.partition() or 0))
                elif not error.retriable() and error.code() not in (
                    KafkaError._TRANSPORT,
                    KafkaError._ALL_BROKERS_DOWN,
                ):
                    raise KafkaException(error)
    finally:
        consumer.close()
