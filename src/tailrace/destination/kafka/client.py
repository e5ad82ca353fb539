"""Connections to the brokers: their settings, and what Kafka's errors mean here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient

from tailrace.destination.kafka.option import KafkaOptions
from tailrace.errors import OwnedError, PreflightError, TableError, TailraceError, UnavailableError

FENCED = {KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED}
_LOGIN = {KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError._SSL}
_SILENCE = {KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN}
_DENIED = {
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "Write and Describe of the transactional id {id}",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "IdempotentWrite of the cluster",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "Read of the group {id}",
}
_TOO_LARGE = {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG_SIZE}
UNKNOWN_TOPIC = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}


def place_name(options: KafkaOptions) -> str:
    return f"kafka {options.servers}"


def settings_of(options: KafkaOptions) -> dict[str, Any]:
    """What every connection needs. It holds secrets."""
    given = {
        "bootstrap.servers": options.servers,
        "client.id": "tailrace",
        # Refused connections would be printed to stderr, several times a second.
        "log_level": 0,
        "socket.timeout.ms": int(options.timeout * 1000),
        "reconnect.backoff.max.ms": 2000,
        "error_cb": partial(_note, options.servers),
    }
    if options.tls is not None:
        tls = {
            "ssl.ca.location": options.tls.ca,
            "ssl.certificate.location": options.tls.cert,
            "ssl.key.location": options.tls.key,
        }
        given |= {name: str(path) for name, path in tls.items() if path is not None}
        if options.tls.key_password is not None:
            given["ssl.key.password"] = options.tls.key_password.reveal()
    if options.sasl is not None:
        given["sasl.mechanism"] = options.sasl.mechanism
        given["sasl.username"] = options.sasl.username
        given["sasl.password"] = options.sasl.password.reveal()
    encrypted = "SSL" if options.tls is not None else "PLAINTEXT"
    given["security.protocol"] = f"SASL_{encrypted}" if options.sasl is not None else encrypted
    return given | {name: value.reveal() for name, value in options.settings.items()}


def admin_of(options: KafkaOptions) -> AdminClient:
    return AdminClient(settings_of(options))


_refused: dict[str, KafkaError] = {}
"""Logins that were refused, by brokers: who waits for an answer only learns that there is none."""


def _note(servers: str, error: KafkaError) -> None:
    if error.code() in _LOGIN:
        _refused[servers] = error


class KafkaTopic(NamedTuple):
    name: str
    partitions: int


def find_topic(options: KafkaOptions, topic: str, admin: AdminClient | None = None) -> KafkaTopic | None:
    """A topic if it is there. Raises KafkaException."""
    # The client must outlive its answer.
    admin = admin or admin_of(options)
    try:
        described = admin.describe_topics(TopicCollection([topic]), request_timeout=options.timeout)
        return KafkaTopic(topic, len(described[topic].result().partitions))
    except KafkaException as error:
        if error.args[0].code() in UNKNOWN_TOPIC:
            return None
        admin.poll(0)  # so that it reports a refused login
        raise


@contextmanager
def reaching(options: KafkaOptions, table: str | None) -> Iterator[None]:
    """Within the block, errors of Kafka become errors of tailrace."""
    _refused.pop(options.servers, None)
    try:
        yield
    except KafkaException as error:
        found = error.args[0]
        if not isinstance(found, KafkaError):
            raise
        if found.code() in _SILENCE:
            found = _refused.get(options.servers, found)
        raise as_error(found, options, table) from error


def as_error(error: KafkaError, options: KafkaOptions, table: str | None, topic: str = "") -> TailraceError:
    """What an error of Kafka means for the pipeline."""
    place, code = place_name(options), error.code()
    if code in FENCED:
        return OwnedError(
            f"another run writes with the transactional id {options.transactional_id} at {place}",
            fix="stop the other run; or give each pipeline a destination.transactional_id of its own",
        )
    if code in _TOO_LARGE:
        where = f"topic {topic}" if topic else "the topic"
        limits = "max.message.bytes and destination.max_message_bytes"
        return TableError(
            f"a change is too large for {where}: more than {options.max_message_bytes} bytes, or than the topic allows",
            table=table,
            fix=f"raise its {limits}, then tailrace retry FILE {table}",
        )
    if code in _LOGIN:
        return UnavailableError(
            f"{place} refuses the login: {error.name()}",
            table=table,
            fix="check destination.sasl and destination.tls, and the user there; tailrace retries by itself",
        )
    if code == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        return TableError(
            f"{place} does not allow to write topic {topic}".rstrip(),
            table=table,
            fix="allow Write, Describe and Create of the topic, and Read of the progress topic, with kafka-acls",
        )
    if code in _DENIED:
        right = _DENIED[code].format(id=options.transactional_id)
        return PreflightError(f"{place} does not allow it: {error.name()}", fix=f"allow {right}, with kafka-acls")
    if code == KafkaError.INVALID_TRANSACTION_TIMEOUT:
        return PreflightError(
            f"{place} does not allow transactions of {options.transaction_timeout:g} seconds",
            fix="lower destination.transaction_timeout, or raise transaction.max.timeout.ms of the brokers",
        )
    if code == KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT or code == KafkaError._UNSUPPORTED_FEATURE:
        return PreflightError(f"{place} has no transactions", fix="use Kafka 2.5 or later")
    if code in UNKNOWN_TOPIC and table is not None:
        return missing_topic(options, table, topic)
    return UnavailableError(
        f"{place} does not answer as it should: {error.name()}",
        table=table,
        fix="start the brokers or check destination.servers; tailrace retries by itself",
    )


def missing_topic(options: KafkaOptions, table: str, topic: str) -> TableError:
    """The error for a topic that was there."""
    return TableError(
        f"earlier batches wrote this table, but its topic {topic} is missing at {place_name(options)}",
        table=table,
        fix=f"tailrace resync FILE {table}",
    )
