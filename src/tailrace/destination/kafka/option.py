"""The keys of `destination:` with `type: kafka`."""

from __future__ import annotations

import string
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, model_validator

from tailrace.option.value import Duration, FilePath, OptionContext, Options, Secret, Size, TypedOptions

_FIELDS = {"pipeline", "schema", "table"}
_OWN = ("bootstrap.servers", "transactional.id", "enable.idempotence", "isolation.level", "partitioner", "group.id")


def _pattern(text: str, info: ValidationInfo) -> str:
    try:
        fields = [(name, spec, kind) for _, name, spec, kind in string.Formatter().parse(text) if name is not None]
    except ValueError:
        raise ValueError("has an unpaired brace") from None
    if any(name not in _FIELDS or spec or kind for name, spec, kind in fields):
        raise ValueError("can only refer to {pipeline}, {schema} and {table}")
    if not text.strip():
        raise ValueError("must not be empty")
    return text.replace("{pipeline}", OptionContext.of(info).name) if "{pipeline}" in text else text


def _named(before: str) -> BeforeValidator:
    def default(value: object, info: ValidationInfo) -> object:
        return before + OptionContext.of(info).name if value is None else value

    return BeforeValidator(default, json_schema_input_type=str)


def _settings(settings: dict[str, Secret]) -> dict[str, Secret]:
    if taken := sorted(settings.keys() & set(_OWN)):
        raise ValueError(f"{taken[0]} is a setting that tailrace makes itself")
    return settings


class KafkaTlsOptions(Options):
    """Which certificate authorities to trust, and our own certificate. Checking the broker cannot be switched off."""

    ca: FilePath | None = Field(default=None, description="authorities to trust, in PEM; default: the system's")
    cert: FilePath | None = Field(default=None, description="our certificate, for brokers that ask for one")
    key: FilePath | None = Field(default=None, description="its key")
    key_password: Secret | None = Field(default=None, description="the password of the key")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.key) != bool(self.cert):
            raise ValueError("`key` and `cert` need each other")
        return self


class KafkaSaslOptions(Options):
    """A user name and its password."""

    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = Field(
        default="SCRAM-SHA-512", description="how the password is proved; PLAIN sends it, so use it with `tls` only"
    )
    username: str = Field(min_length=1, description="the user")
    password: Secret = Field(description="from the environment: ${KAFKA_PASSWORD}")


class KafkaOptions(TypedOptions):
    """Topics of Kafka 2.5 or later: each change as a record in Debezium's envelope, in transactions."""

    type: Literal["kafka"]
    servers: str = Field(min_length=1, description="brokers to begin with: host:port, several with commas")
    topic: Annotated[str, AfterValidator(_pattern)] = Field(
        default="{pipeline}.{schema}.{table}",
        validate_default=True,
        description="the topic of a table; {pipeline}, {schema} and {table} are names",
    )
    create_topics: bool = Field(default=True, description="create topics that are missing")
    partitions: int = Field(default=1, ge=1, le=10_000, description="of topics that tailrace creates")
    replication: int = Field(
        default=-1, ge=-1, le=100, description="replicas of topics that tailrace creates; -1: the brokers' default"
    )
    topic_settings: dict[str, str] = Field(
        default={}, description="settings of topics that tailrace creates, such as retention.ms"
    )
    unchanged: Literal["fetch", "placeholder"] = Field(
        default="fetch",
        description="what stands for a value that the upstream left out because it did not change: the value, for which"
        " the upstream is asked where the batch does not have it, or Debezium's placeholder",
    )
    copied_rows: bool = Field(
        default=True, description="send the rows of a copy as events; false: only what changes from then on"
    )
    progress_topic: Annotated[str, _named("_tailrace.")] = Field(
        default=None,
        validate_default=True,
        description="where the pipeline keeps its progress; default: _tailrace. and the pipeline's name",
    )
    transactional_id: Annotated[str, _named("tailrace-")] = Field(
        default=None,
        validate_default=True,
        description="whose transactions these are; default: tailrace- and the pipeline's name",
    )
    transaction_timeout: Duration = Field(
        default=300.0, ge=10, description="brokers end a transaction that takes longer; at most their own limit"
    )
    max_message_bytes: Size = Field(
        default=1_000_000,
        ge=1000,
        le=1_000_000_000,
        description="the largest record; at most max.message.bytes of the topic",
    )
    compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = Field(
        default="lz4", description="how records are compressed"
    )
    timeout: Duration = Field(
        default=30.0, ge=1, description="how long to wait for brokers before the batch is retried"
    )
    tls: KafkaTlsOptions | None = Field(
        default=None, description="encrypt connections; {} trusts the system's authorities"
    )
    sasl: KafkaSaslOptions | None = Field(default=None, description="log in with a user name and a password")
    settings: Annotated[dict[str, Secret], AfterValidator(_settings)] = Field(
        default={}, description="more settings of librdkafka"
    )

    def needed_extra(self) -> str | None:
        return "kafka"
