"""The Kafka destination passes the suite for destinations that are streamed to, with a real broker."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pytest

from tailrace.destination import Batch, Destination, TableBatch, Written, plan_columns
from tailrace.destination.copy import write_batch
from tailrace.destination.kafka.destination import KafkaDestination
from tailrace.destination.kafka.progress import read_progress
from tailrace.destination.kafka.reader import last_events, rows_of
from tailrace.errors import TableError
from tailrace.model.change import Changes
from tailrace.model.schema import TableSchema
from tailrace.testing.destination import ITEMS, StreamedCopyContract, changes_of, delete, insert, moved, update
from tests.support.kafka_broker import KafkaBroker, kafka_destination

_OPS = {"c": "insert", "u": "update", "d": "delete", "r": "read", "t": "truncate"}


class TestKafka(StreamedCopyContract):
    @pytest.fixture
    def destination(self, kafka: KafkaBroker) -> Destination:
        return kafka_destination(kafka)

    def read(self, destination: Destination, table: TableSchema) -> list[dict[str, Any]]:
        assert isinstance(destination, KafkaDestination)
        if table.key:
            rows = destination.read_table(table)
            assert rows is not None
            return [row for batch in rows.rows for row in batch.to_pylist()]
        events = last_events(destination, table.table, keyed=False)
        progress = read_progress(destination)
        kept = plan_columns(progress.last_columns(table.table), table).table
        return [
            {**row, "_tailrace_op": _OPS[event["op"]], "_tailrace_position": event["source"]["position"]}
            for row, event in zip(rows_of(events, kept, progress).to_pylist(), events, strict=True)
        ]

    def deliver(
        self,
        destination: Destination,
        number: int,
        table: TableSchema,
        chunks: Iterable[Changes],
        end: int | None = 1,
        **more: Any,
    ) -> Written:
        """The upstream is asked for values that were left out: a topic has no rows to look up. It has those that the
        topic has before the batch."""

        def refetch(now: TableSchema, keys: pa.Table) -> pa.Table:
            rows = [{name: row[name] for name in now.arrow.names} for row in self.read(destination, now)]
            wanted = keys.to_pylist()
            return pa.Table.from_pylist(
                [row for row in rows if {name: row[name] for name in now.key} in wanted], now.arrow
            )

        return super().deliver(destination, number, table, chunks, end, **{"refetch": refetch, **more})

    def test_a_changed_key_carries_along_what_was_left_out(self, destination: Destination) -> None:
        self.write(destination, 0, insert(id=1, name="one", price=1), insert(id=2, name="two", price=2))
        swap = [(1, 9), (2, 1), (9, 2)]
        steps = [half for old, new in swap for half in (delete(id=old), moved(id=new, price=new))]
        upstream = pa.Table.from_pylist(
            [{"id": 1, "name": "two", "price": 1}, {"id": 2, "name": "one", "price": 2}], ITEMS.arrow
        )
        self.write(destination, 1, *steps, refetch=lambda table, keys: upstream)
        assert self.rows(destination) == [{"id": 1, "name": "two", "price": 1}, {"id": 2, "name": "one", "price": 2}]

    def test_without_a_way_to_fetch_it_the_table_stops_and_stays_as_it_was(self, destination: Destination) -> None:
        self.write(destination, 0, insert(id=1, name="a", price=1))
        batch = TableBatch(ITEMS, Batch("contract", 1, 1), changes_of(ITEMS, update(id=7, price=5)), stage=self.stage)
        with pytest.raises(TableError) as caught:
            write_batch(destination, batch)
        assert caught.value.fix
        assert self.rows(destination) == [{"id": 1, "name": "a", "price": 1}]


class TestKafkaWithPartitions(TestKafka):
    @pytest.fixture
    def destination(self, kafka: KafkaBroker) -> Destination:
        return kafka_destination(kafka, partitions=3)
