"""What stands in the topics, and how errors of Kafka are reported, with a real broker."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tailrace.destination import Batch, TableBatch
from tailrace.destination.copy import write_batch
from tailrace.destination.kafka.client import reaching
from tailrace.destination.kafka.destination import KafkaDestination
from tailrace.destination.kafka.session import KafkaSession
from tailrace.destination.staging import Stage
from tailrace.errors import OwnedError, TableError, UnavailableError
from tailrace.model.schema import TableName, TableSchema
from tailrace.testing.destination import ITEMS, LOG, TRUNCATE, changes_of, delete, insert, moved, read, update
from tests.support.destination_writing import write
from tests.support.kafka_broker import KafkaBroker, SeenRecord, kafka_destination


def topic_of(destination: KafkaDestination, table: TableSchema = ITEMS) -> str:
    return destination.topic.format(schema=table.table.schema, table=table.table.name)


def seen(broker: KafkaBroker, destination: KafkaDestination, table: TableSchema = ITEMS) -> list[SeenRecord]:
    return broker.records(topic_of(destination, table))


def short(record: SeenRecord) -> tuple[Any, ...]:
    """Its key, operation and the row after it."""
    value = json.loads(record.value) if record.value is not None else {}
    return json.loads(record.key or "null"), value.get("op"), value.get("after")


def row(key: int, name: str, price: int) -> dict[str, Any]:
    return {"id": key, "name": name, "price": price}


def test_each_change_is_an_envelope_of_debezium_and_a_delete_leaves_a_tombstone(kafka: KafkaBroker) -> None:
    destination = kafka_destination(kafka)
    write(destination, 0, insert(id=1, name="a", price=1), update(id=1, name="b", price=2), delete(id=1))
    records = seen(kafka, destination)
    assert [short(record) for record in records] == [
        ({"id": 1}, "c", row(1, "a", 1)),
        ({"id": 1}, "u", row(1, "b", 2)),
        ({"id": 1}, "d", None),
        ({"id": 1}, None, None),
    ]
    assert [record.value for record in records][-1] is None
    assert json.loads(records[2].value or "") == {
        "before": {"id": 1},
        "after": None,
        "source": {
            "connector": "tailrace",
            "name": "p",
            "schema": "shop",
            "table": "items",
            "schema_version": 1,
            "position": "00000000000000040000000000000000",
            "txId": None,
            "ts_ms": 1704067200000,
            "snapshot": "false",
        },
        "op": "d",
        "ts_ms": 1704067200000,
    }


def test_a_changed_key_is_a_delete_a_tombstone_and_a_create_that_name_each_other(kafka: KafkaBroker) -> None:
    destination = kafka_destination(kafka)
    write(destination, 0, insert(id=1, name="a", price=1))
    write(destination, 1, delete(id=1), moved(id=2, name="a", price=1))
    records = seen(kafka, destination)[1:]
    assert [short(record)[:2] for record in records] == [({"id": 1}, "d"), ({"id": 1}, None), ({"id": 2}, "c")]
    assert [record.headers for record in records] == [
        {"__debezium.newkey": '{"id":2}'},
        {"__debezium.newkey": '{"id":2}'},
        {"__debezium.oldkey": '{"id":1}'},
    ]


def test_a_truncate_is_in_every_partition_and_a_table_without_a_key_has_none_in_its_records(
    kafka: KafkaBroker,
) -> None:
    destination = kafka_destination(kafka, partitions=3)
    write(destination, 0, insert(id=1, name="a", price=1), TRUNCATE, insert(id=2, name="b", price=2))
    truncates = [record for record in seen(kafka, destination) if short(record)[1] == "t"]
    assert [(record.key, record.partition) for record in truncates] == [("{}", 0), ("{}", 1), ("{}", 2)]
    write(destination, 0, insert(line="a"), TRUNCATE, delete(line="a"), table=LOG)
    assert sorted(short(record)[:2] for record in seen(kafka, destination, LOG)) == [
        (None, "c"),
        (None, "d"),
        (None, "t"),
    ]


def test_a_batch_of_a_copy_that_is_repeated_adds_no_record(kafka: KafkaBroker, tmp_path: Path) -> None:
    destination, stage = kafka_destination(kafka), Stage(tmp_path, "p")

    def copy(number: int, key: int, *, begins: bool) -> None:
        staged = [destination.write_rows(ITEMS, changes_of(ITEMS, read(id=key, name="x", price=0)), stage)]
        write_batch(destination, TableBatch(ITEMS, Batch("p", number), staged=staged, begins_copy=begins, stage=stage))

    for number, key in ((1, 1), (1, 1), (2, 2), (2, 2)):
        copy(number, key, begins=number == 1)
    assert [short(record)[:2] for record in seen(kafka, destination)] == [({"id": 1}, "r"), ({"id": 2}, "r")]
    # A later copy says that the table begins again.
    for _ in range(2):
        copy(3, 3, begins=True)
    assert [short(record)[:2] for record in seen(kafka, destination)][2:] == [({}, "t"), ({"id": 3}, "r")]


def test_values_that_were_left_out_come_from_the_batch_or_upstream_or_stay_a_placeholder(kafka: KafkaBroker) -> None:
    destination = kafka_destination(kafka)

    def upstream(table: TableSchema, keys: Any) -> Any:
        assert keys.to_pylist() == [{"id": 7}]
        return pa.Table.from_pylist([{"id": 7, "name": "now", "price": 0}], table.arrow)

    write(
        destination,
        0,
        *(insert(id=1, name="toast", price=1), update(id=1, price=2), update(id=7, price=3)),
        *(delete(id=1), moved(id=2, price=5)),
        refetch=upstream,
    )
    afters = [after for _, op, after in map(short, seen(kafka, destination)) if op in ("c", "u")]
    assert afters == [row(1, "toast", 1), row(1, "toast", 2), row(7, "now", 3), row(2, "toast", 5)]
    plain = kafka_destination(kafka, unchanged="placeholder")
    write(plain, 0, update(id=1, price=2))
    assert short(seen(kafka, plain)[0])[2] == row(1, "__debezium_unavailable_value", 2)


def test_a_producer_that_was_replaced_can_commit_nothing(kafka: KafkaBroker) -> None:
    destination = kafka_destination(kafka)
    write(destination, 0, insert(id=1, name="a", price=1))
    stale = KafkaSession(destination, Batch("p", 1))
    topic = stale.require_topic(ITEMS, topic_of(destination), is_known=True)
    script = (
        "import sys, pickle; from tests.support.destination_writing import write;"
        "from tailrace.testing.destination import insert;"
        "write(pickle.load(sys.stdin.buffer), 1, insert(id=2, name='b', price=2))"
    )

    def commit() -> None:
        with reaching(destination, "shop.items"), stale.transaction():
            stale.send(topic, [b"{}"], [b"stale"], [None], table=ITEMS.table)
            subprocess.run([sys.executable, "-c", script], input=pickle.dumps(destination), check=True)

    with pytest.raises(OwnedError, match="another run writes") as caught:
        commit()
    assert "transactional_id" in (caught.value.fix or "")
    assert [short(record)[0] for record in seen(kafka, destination)] == [{"id": 1}, {"id": 2}]


def test_a_record_that_is_too_large_stops_its_table_and_leaves_nothing(kafka: KafkaBroker) -> None:
    for more in ({"max_message_bytes": 2000}, {"topic_settings": {"max.message.bytes": "2000"}, "compression": "none"}):
        destination = kafka_destination(kafka, **more)
        with pytest.raises(TableError, match="too large") as caught:
            write(destination, 0, insert(id=1, name="a", price=1), insert(id=2, name="x" * 5000, price=2))
        assert caught.value.table == "shop.items"
        assert "max_message_bytes" in (caught.value.fix or "")
        assert seen(kafka, destination) == []
        write(destination, 0, insert(id=1, name="a", price=1))
        assert len(seen(kafka, destination)) == 1


def test_brokers_that_are_away_are_waited_for_and_nothing_counts_as_written() -> None:
    destination = KafkaDestination(
        servers="127.0.0.1:1", topic="{table}", progress_topic="p", transactional_id="t", timeout=1
    )
    for _ in range(2):
        with pytest.raises(UnavailableError, match="does not answer") as caught:
            write(destination, 0, insert(id=1, name="a", price=1))
        assert "retries by itself" in (caught.value.fix or "")
    [finding] = destination.check([ITEMS])
    assert (finding.level, finding.subject) == ("error", "kafka 127.0.0.1:1")


def test_a_user_logs_in_with_a_password_that_nothing_shows(tmp_path: Path) -> None:
    with KafkaBroker(tmp_path, password="right-secret") as broker:
        login = {"mechanism": "PLAIN", "username": "tailrace", "password": "right-secret"}
        destination = kafka_destination(broker, sasl=login)
        assert [finding.level for finding in destination.check([ITEMS])] == ["ok", "ok"]
        write(destination, 0, insert(id=1, name="a", price=1))
        assert "right-secret" not in f"{destination!r} {destination.name}"
        stranger = kafka_destination(broker, timeout=4, sasl={**login, "password": "wrong-secret"})
        with pytest.raises(UnavailableError, match="refuses the login") as caught:
            write(stranger, 0, insert(id=1, name="a", price=1))
        [finding] = stranger.check([ITEMS])
        assert (finding.level, finding.message) == ("error", caught.value.message)
        assert "secret" not in f"{caught.value} {stranger!r}".replace("Secret", "")


def test_a_missing_topic_is_created_once_and_one_that_was_written_is_missed(kafka: KafkaBroker) -> None:
    destination = kafka_destination(kafka, create_topics=False)
    with pytest.raises(TableError, match="there is no topic"):
        write(destination, 0, insert(id=1, name="a", price=1))
    assert [finding.level for finding in destination.check([ITEMS])] == ["error", "error"]
    destination = kafka_destination(kafka, topic_settings={"retention.ms": "1000000"})
    with pytest.raises(TableError, match="is missing") as caught:
        write(destination, 0, insert(id=1, name="a", price=1), is_known=True)
    assert caught.value.fix == "tailrace resync FILE shop.items"


def test_check_names_tables_that_would_share_a_topic(kafka: KafkaBroker) -> None:
    other = TableSchema(TableName("shop", "items"), ITEMS.columns, ("id",))
    tables = [ITEMS, TableSchema(TableName("old", "items"), other.columns, ("id",)), LOG]
    found = kafka_destination(kafka, topic="{table}").check(tables)
    assert [(each.level, each.table) for each in found] == [
        ("ok", None),
        ("ok", "shop.items"),
        ("error", "old.items"),
        ("warning", "shop.log"),
    ]
    assert all(before.subject != after.subject for before, after in pairwise(found))
