"""The transactional producer of a pipeline, and what it writes in one transaction.

There is one for each batch. Opening it ends what an earlier producer with the same transactional id left open, and
fences that producer: whatever it still tries to commit is refused. Only then is the progress read, so nothing can come
between.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec
from confluent_kafka.cimpl import NewTopic

from tailrace.destination import Batch
from tailrace.destination.kafka.client import (
    KafkaTopic,
    as_error,
    find_topic,
    missing_topic,
    place_name,
    reaching,
    settings_of,
)
from tailrace.destination.kafka.option import KafkaOptions
from tailrace.destination.kafka.progress import KafkaProgress, ProgressRecord, read_progress
from tailrace.destination.kafka.record import RecordHeaders, RecordKey, RecordValue
from tailrace.errors import OwnedError, TableError, UnavailableError
from tailrace.model.schema import TableName, TableSchema
from tailrace.system import failpoint

ANY_PARTITION = -1
_PROGRESS_SETTINGS = {
    "cleanup.policy": "compact",
    # It is read from its beginning, so it is kept short.
    "segment.bytes": str(4 << 20),
    "segment.ms": "3600000",
    "min.cleanable.dirty.ratio": "0.1",
}


class KafkaSession:
    """Use it in one thread."""

    def __init__(self, options: KafkaOptions, batch: Batch | None) -> None:
        self.options = options
        self.batch = batch
        self.pid = os.getpid()
        self._failed: KafkaError | None = None
        self._topics: dict[str, KafkaTopic] = {}
        self._admin = AdminClient(settings_of(options))
        self._producer = Producer(
            settings_of(options)
            | {
                "transactional.id": options.transactional_id,
                "transaction.timeout.ms": int(options.transaction_timeout * 1000),
                "message.timeout.ms": int(min(options.timeout, options.transaction_timeout) * 1000),
                "message.max.bytes": options.max_message_bytes,
                "compression.type": options.compression,
                "linger.ms": 20,
                "queue.buffering.max.kbytes": 128 << 10,
                # As Java clients choose a partition, so that others can write to the topic, or find a key.
                "partitioner": "murmur2_random",
                "delivery.report.only.error": True,
                "on_delivery": self._on_delivery,
            }
        )
        self._require_progress_topic()
        self._producer.init_transactions(options.timeout)
        self.progress: KafkaProgress = read_progress(options, self._admin)

    def require_topic(self, table: TableSchema, topic: str, *, is_known: bool) -> KafkaTopic:
        """The topic of a table, which is created if it is missing and was never written."""
        if topic not in self._topics:
            found = self.find_topic(topic)
            if found is None:
                if is_known:
                    raise missing_topic(self.options, str(table.table), topic)
                found = self._create(topic, str(table.table), self.options.partitions, self._settings_for(table))
            self._topics[topic] = found
        return self._topics[topic]

    def find_topic(self, topic: str) -> KafkaTopic | None:
        """A topic if it is there."""
        return find_topic(self.options, topic, self._admin)

    def has_records(self, topic: KafkaTopic) -> bool:
        """Whether anything was ever written to a topic."""
        wanted = {
            TopicPartition(topic.name, at): OffsetSpec.latest()  # type: ignore[no-untyped-call]
            for at in range(topic.partitions)
        }
        return any(each.result().offset > 0 for each in self._admin.list_offsets(wanted).values())

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all that is sent within the block, or nothing. After an error the session is closed."""
        began = time.monotonic()
        try:
            with reaching(self.options, None):
                self._producer.begin_transaction()
                yield
                failpoint.reach("kafka.before_commit")
                self._commit()
        except OwnedError as error:
            self.close()
            if time.monotonic() - began < self.options.transaction_timeout:
                raise
            # The brokers fence a producer whose transaction they have ended.
            raise UnavailableError(
                f"the brokers ended a transaction that took longer than {self.options.transaction_timeout:g} seconds",
                fix="raise destination.transaction_timeout, or lower batch.max_bytes",
            ) from error
        except BaseException:
            self.close()
            raise
        failpoint.reach("kafka.committed")

    def send(
        self,
        topic: KafkaTopic,
        keys: Iterable[RecordKey],
        values: Iterable[RecordValue],
        headers: Iterable[RecordHeaders],
        *,
        table: TableName,
        partition: int = ANY_PARTITION,
    ) -> None:
        """Send records in their order. The client takes records one by one, and sends them from a thread of its own."""
        produce = self._producer.produce
        for key, value, header in zip(keys, values, headers, strict=True):
            while True:
                try:
                    produce(topic.name, value, key, partition, headers=header)
                except BufferError:
                    self._producer.poll(0.1)
                    self._require_delivered(topic.name, table)
                except KafkaException as error:
                    raise as_error(error.args[0], self.options, str(table), topic.name) from error
                else:
                    break
        self._producer.poll(0)
        self._require_delivered(topic.name, table)

    def send_everywhere(self, topic: KafkaTopic, key: bytes | None, value: bytes, *, table: TableName) -> None:
        """Send a record to every partition."""
        for partition in range(topic.partitions):
            self.send(topic, [key], [value], [None], table=table, partition=partition)

    def note(self, records: Sequence[ProgressRecord], table: TableName) -> None:
        """Send records of the progress. They count for this session at once."""
        topic = KafkaTopic(self.options.progress_topic, 1)
        keys, values = [key for key, _ in records], [value for _, value in records]
        self.send(topic, keys, values, [None] * len(records), table=table)
        self.progress.note(list(records))

    def flush(self, topic: KafkaTopic, table: TableName) -> None:
        """Wait until the brokers have all records, so that one that they refuse is the error of its table."""
        self._producer.flush(self.options.timeout)
        self._require_delivered(topic.name, table)

    def close(self) -> None:
        """Give up what is not committed."""
        forget(self)
        with suppress(KafkaException):
            self._producer.abort_transaction(2.0)
        with suppress(KafkaException):
            self._producer.purge()
            self._producer.close()

    def _commit(self) -> None:
        deadline = time.monotonic() + self.options.timeout
        while True:
            try:
                self._producer.commit_transaction(max(deadline - time.monotonic(), 1.0))
            except KafkaException as error:
                if not error.args[0].retriable() or time.monotonic() > deadline:
                    raise
            else:
                return

    def _on_delivery(self, error: KafkaError | None, message: Message) -> None:
        # Those that follow the first one only failed because of it.
        self._failed = self._failed or error

    def _require_delivered(self, topic: str, table: TableName) -> None:
        if self._failed is not None:
            raise as_error(self._failed, self.options, str(table), topic)

    def _settings_for(self, table: TableSchema) -> dict[str, str]:
        # Records without a key cannot be compacted.
        policy = {"cleanup.policy": "compact"} if table.key else {}
        return policy | self.options.topic_settings

    def _require_progress_topic(self) -> None:
        topic = self.options.progress_topic
        if self.find_topic(topic) is None:
            self._create(topic, None, 1, _PROGRESS_SETTINGS)

    def _create(self, topic: str, table: str | None, partitions: int, settings: dict[str, str]) -> KafkaTopic:
        if not self.options.create_topics:
            raise TableError(
                f"there is no topic {topic} at {place_name(self.options)}",
                table=table,
                fix=f"create it, or set destination.create_topics: true; then tailrace retry FILE {table}",
            )
        new = NewTopic(topic, partitions, self.options.replication, config=settings)
        try:
            self._admin.create_topics([new], request_timeout=self.options.timeout)[topic].result()
        except KafkaException as error:
            found = error.args[0]
            if found.code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise as_creation_error(found, self.options, topic, table) from error
        deadline = time.monotonic() + self.options.timeout
        while (made := self.find_topic(topic)) is None:
            # The brokers learn of it one after the other.
            if time.monotonic() > deadline:
                raise UnavailableError(f"the topic {topic} does not appear", fix="look at the log of the brokers")
            time.sleep(0.05)
        return made


def as_creation_error(error: KafkaError, options: KafkaOptions, topic: str, table: str | None) -> Exception:
    """Why a topic cannot be created."""
    if error.code() in (KafkaError.TOPIC_EXCEPTION, KafkaError.INVALID_CONFIG, KafkaError.INVALID_REPLICATION_FACTOR):
        return TableError(
            f"{place_name(options)} does not create topic {topic}: {error.str()}",
            table=table,
            fix="change destination.topic, destination.topic_settings or destination.replication",
        )
    return as_error(error, options, table, topic)


_lock = threading.Lock()
_current: KafkaSession | None = None


def forget(session: KafkaSession) -> None:
    """The next batch opens another session."""
    global _current
    if _current is session:
        _current = None


@contextmanager
def session_of(options: KafkaOptions, batch: Batch | None, table: TableName) -> Iterator[KafkaSession]:
    """The session of a batch, for all its tables. None: a new one, which the next batch takes over.

    Errors of Kafka become errors of tailrace.
    """
    global _current
    with _lock, reaching(options, str(table)):
        session = _current
        fits = (
            session is not None
            and batch is not None
            and session.options == options
            and session.pid == os.getpid()
            # Each attempt at a batch has an object of its own, and a producer.
            and (session.batch is None or session.batch is batch)
        )
        if session is None or not fits:
            if session is not None and session.pid == os.getpid():
                session.close()
            session = KafkaSession(options, batch)
            _current = session
        session.batch = batch
        try:
            yield session
        except KafkaException:
            session.close()
            raise
