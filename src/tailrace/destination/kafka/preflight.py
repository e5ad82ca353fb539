"""What is checked about the brokers before anything is written to them."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Producer, TopicCollection
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclOperation
from confluent_kafka.admin._topic import TopicDescription

from tailrace.destination.kafka.client import admin_of, place_name, reaching, settings_of
from tailrace.destination.kafka.name import metric_name, topic_of
from tailrace.destination.kafka.option import KafkaOptions
from tailrace.destination.preflight import LEAVE_OUT, ColumnProblem
from tailrace.destination.webhook.format.json_value import EventWriter
from tailrace.errors import Finding, TailraceError
from tailrace.model.schema import TableSchema

_NEEDED = (AclOperation.WRITE, AclOperation.READ, AclOperation.DESCRIBE)


def check(options: KafkaOptions, tables: Sequence[TableSchema]) -> list[Finding]:
    """Findings about the brokers and each table. Creates no topic."""
    subject = place_name(options)
    try:
        with reaching(options, None):
            topics = [topic_of(options.topic, table.table) for table in tables]
            admin = admin_of(options)
            there = _describe(options, admin, [options.progress_topic, *topics])
            _try_transactions(options)
    except TailraceError as error:
        return [Finding("error", subject, error.message, error.fix)]
    findings = [
        Finding("error", subject, message, fix)
        for message, fix in _topic_problems(options, options.progress_topic, there[options.progress_topic])
    ] or [Finding("ok", subject, f"has transactions; the progress is in topic {options.progress_topic}")]
    seen: dict[str, TableSchema] = {}
    for table, topic in zip(tables, topics, strict=True):
        name = str(table.table)
        problems = unkept_columns(table)
        if (twin := seen.setdefault(metric_name(topic), table)) is not table:
            problems.append(
                (
                    f"its topic {topic} is also that of {twin.table}",
                    "set destination.topic to a pattern with {schema} and {table}",
                )
            )
        problems += _topic_problems(options, topic, there[topic])
        findings += [Finding("error", name, message, fix, name) for message, fix in problems]
        if not problems and not table.key:
            findings.append(
                Finding("warning", name, f"has no key: events in topic {topic} have none either", table=name)
            )
        elif not problems:
            findings.append(Finding("ok", name, f"events go to topic {topic}", table=name))
    return findings


def unkept_columns(table: TableSchema) -> list[ColumnProblem]:
    """Columns that have no JSON form. Pure."""
    problems: list[ColumnProblem] = []
    for column in table.columns:
        try:
            EventWriter().value(pa.nulls(0, column.type))
        except TypeError as error:
            problems.append((f"column {column.name}: {error}", f"cast it upstream, or {LEAVE_OUT}"))
    return problems


def _describe(options: KafkaOptions, admin: AdminClient, topics: Sequence[str]) -> dict[str, TopicDescription | None]:
    """The topics that are there."""
    wanted = sorted(set(topics))
    coming = admin.describe_topics(
        TopicCollection(wanted), include_authorized_operations=True, request_timeout=options.timeout
    )
    found: dict[str, TopicDescription | None] = {}
    for topic in wanted:
        try:
            found[topic] = coming[topic].result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                admin.poll(0)  # so that it reports a refused login
                raise
            found[topic] = None
    return found


def _topic_problems(options: KafkaOptions, topic: str, there: TopicDescription | None) -> list[ColumnProblem]:
    if there is None:
        if options.create_topics:
            return []
        return [(f"there is no topic {topic}", "create it, or set destination.create_topics: true")]
    allowed = there.authorized_operations
    lacks = [right.name.title() for right in _NEEDED if allowed and right not in allowed]
    if lacks:
        return [(f"topic {topic} may not be used: no right to {', '.join(lacks)}", "allow it with kafka-acls --add")]
    return []


def _try_transactions(options: KafkaOptions) -> None:
    """Under another transactional id than a pipeline's, whose transactions would be ended."""
    producer = Producer(
        settings_of(options)
        | {
            "transactional.id": f"{options.transactional_id}-check",
            "transaction.timeout.ms": int(options.transaction_timeout * 1000),
        }
    )
    try:
        producer.init_transactions(options.timeout)
    finally:
        producer.close()
