"""`KafkaDestination`: one transaction for every table and batch, with the progress in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import ClassVar, Literal

from tailrace.destination import CopyMode, Destination, Stage, Staged, TableBatch, Written, plan_columns
from tailrace.destination.chunking import whole
from tailrace.destination.kafka import preflight
from tailrace.destination.kafka.client import KafkaTopic, place_name, reaching
from tailrace.destination.kafka.left_out import filled
from tailrace.destination.kafka.name import topic_of
from tailrace.destination.kafka.option import KafkaOptions
from tailrace.destination.kafka.progress import read_progress
from tailrace.destination.kafka.reader import read_rows
from tailrace.destination.kafka.record import EVERY_ROW, records_of, restart_value
from tailrace.destination.kafka.session import KafkaSession, session_of
from tailrace.destination.preflight import as_errors
from tailrace.errors import Finding
from tailrace.model.change import Changes, Op
from tailrace.model.last_batch import LastBatch
from tailrace.model.schema import TableName, TableSchema
from tailrace.model.table_rows import TableRows

CHUNK_BYTES = 8 << 20
"""Changes are encoded this many at a time, so that most rows find the values they left out among them."""


class KafkaDestination(KafkaOptions, Destination):
    """Topics of a cluster. Its repr shows no secret; clients open inside methods.

    One lane writes: a transactional id has one producer at a time. A delete is followed by a tombstone. A truncate, and
    the record with which a copy begins again, has the key `{}` and is in every partition.
    """

    type: Literal["kafka"] = "kafka"
    copy_mode: ClassVar[CopyMode] = "stream"
    lanes: ClassVar[int | None] = 1

    @property
    def name(self) -> str:
        return f"{place_name(self)} {self.topic}"

    def check(self, tables: Sequence[TableSchema] | None) -> list[Finding]:
        """Check brokers, topics and transactions. Creates no topic."""
        return preflight.check(self, tables or ())

    def check_columns(self, table: TableSchema) -> list[Finding]:
        return as_errors(table, preflight.unkept_columns(table))

    def write_rows(self, table: TableSchema, rows: Iterable[Changes], stage: Stage) -> Staged:
        if not self.copied_rows:
            # Read them even so: some sources record the rows they return, to find deleted ones later.
            deque(rows, maxlen=0)
            rows = ()
        return stage.write(table, rows)

    def write_changes(self, batch: TableBatch) -> Written:
        """Send every change, uncollapsed, and the progress in one transaction. Also raises OwnedError when another
        producer took over the transactional id."""
        table = batch.table.table
        with session_of(self, batch.batch, table) as session:
            progress = session.progress
            if batch.is_repeat(progress.mark(batch.pipeline, table)):
                return Written(repeated=True)
            plan = plan_columns(progress.columns(batch.pipeline, table), batch.table)
            chunks = chain(batch.copied(), self._log(batch))
            first = next(chunks, None)
            if first is None and not batch.copies and not plan.changes:
                return Written()
            is_known = batch.is_known and not batch.begins_copy
            topic = session.require_topic(batch.table, topic_of(self.topic, table), is_known=is_known)
            written = Written()
            with session.transaction():
                for chunk in chain([first] if first is not None else [], chunks):
                    written += self._send(session, topic, chunk, _name_of(batch.pipeline))
                session.flush(topic, table)
                session.note(progress.noting(batch.pipeline, plan.table, batch.mark), table)
            return written

    def drop_table_for_copy(self, table: TableSchema) -> None:
        """Tell readers that the table begins again, and forget its batches. Nothing is said in an empty topic."""
        with session_of(self, None, table.table) as session:
            forgotten = session.progress.forgetting(table.table)
            topic = session.find_topic(topic_of(self.topic, table.table))
            if topic is None or not (forgotten or session.has_records(topic)):
                return
            with session.transaction():
                key = EVERY_ROW if table.key else None
                session.send_everywhere(topic, key, restart_value(table), table=table.table)
                session.note(forgotten, table.table)

    def last_batch(self, table: TableName, pipeline: str) -> LastBatch | None:
        with reaching(self, str(table)):
            mark = read_progress(self).mark(pipeline, table)
        return None if mark is None else LastBatch.parse(mark)

    def read_table(self, table: TableSchema) -> TableRows | None:
        with reaching(self, str(table.table)):
            return read_rows(self, table) if table.key else None

    def _log(self, batch: TableBatch) -> Iterator[Changes]:
        for chunk in whole(batch.changes(), least_bytes=CHUNK_BYTES):
            yield filled(chunk, batch.refetch) if self.unchanged == "fetch" else chunk

    def _send(self, session: KafkaSession, topic: KafkaTopic, chunk: Changes, source: str) -> Written:
        table, op = chunk.table.table, chunk.numpy("op")
        for part in records_of(chunk, source):
            if part.everywhere:
                session.send_everywhere(topic, part.keys[0], part.values[0] or b"", table=table)
            else:
                session.send(topic, part.keys, part.values, part.headers, table=table)
        deletes = int((op == Op.DELETE).sum()) if chunk.table.key else 0
        return Written(int((op != Op.READ).sum()), len(chunk) - deletes, deletes)


def _name_of(pipeline: str) -> str:
    """The name of a pipeline without its epoch."""
    return pipeline.rpartition("/")[0] or pipeline
