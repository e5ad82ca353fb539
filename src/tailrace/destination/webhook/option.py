"""The keys of `destination:` with `type: webhook`."""

from __future__ import annotations

import base64
import pickle
import re
import socket
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, WithJsonSchema, model_validator

from tailrace.destination.webhook.address import WebhookTarget
from tailrace.destination.webhook.signature import key_of
from tailrace.errors import ConfigError
from tailrace.option.value import (
    Dsn,
    Duration,
    FilePath,
    OptionContext,
    Options,
    Secret,
    Size,
    TypedOptions,
    resolve_path,
)
from tailrace.state.store import is_folder

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VARIABLE = re.compile(r"\$\{\w+")
_RESERVED = frozenset({"host", "content-length", "content-type", "transfer-encoding", "connection", "user-agent"})


class WebhookUrl(Secret):
    """Where events are posted. Only scheme, host and port may be shown: the rest of a URL is often a secret."""

    __slots__ = ()

    @classmethod
    def read(cls, value: object) -> Secret:
        url = super().read(value)
        text = url.reveal().strip()
        # Commands that connect to nothing read the file with its variables unset.
        if text != "stdout" and not _VARIABLE.search(text):
            WebhookTarget.of(text)
        return cls(text)

    @property
    def masked(self) -> str:
        return (
            self._text if self._text == "stdout" or _VARIABLE.search(self._text) else WebhookTarget.of(self._text).shown
        )


def _queue_path(value: object, info: ValidationInfo) -> object:
    return OptionContext.of(info).state / "queue" if value is None else value


def _lease(value: object, info: ValidationInfo) -> object:
    if value is None:
        return Dsn(str(OptionContext.of(info).state))
    if isinstance(value, str) and value.strip() and is_folder(value):
        return Dsn(str(resolve_path(Path(value), info)))
    return value


def _limit(value: object) -> object:
    return None if value == "forever" else value


def _headers(headers: dict[str, Secret]) -> dict[str, Secret]:
    for name, value in headers.items():
        if not _TOKEN.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a header")
        if name.lower() in _RESERVED or name.lower().startswith("webhook-"):
            raise ValueError(f"{name} is a header that tailrace sets itself")
        if not (value.reveal().isascii() and value.reveal().isprintable()):
            raise ValueError(f"the value of {name} must be a line of ASCII")
    return headers


def _keys(secrets: list[Secret]) -> list[Secret]:
    for secret in secrets:
        try:
            key_of(secret.reveal())
        except ConfigError as error:
            raise ValueError(error.message) from None
    return secrets


def _as_list(value: object) -> object:
    return value if isinstance(value, list | tuple) else [value]


class EventBatchOptions(Options):
    """How many events one request holds."""

    max_events: int = Field(default=100, ge=1, le=100_000, description="the most events in one request")
    max_bytes: Size = Field(
        default=1_000_000, ge=1000, le=100_000_000, description="the largest request, unless a single event is larger"
    )
    max_delay: Duration = Field(default=0.2, le=60, description="how long an event waits for others to join it")


class RetryOptions(Options):
    """When a request that failed is made again."""

    policy: Literal["linear", "exponential"] = Field(default="exponential", description="how pauses grow")
    min: Duration = Field(default=1.0, gt=0, description="the first pause, and the shortest")
    max: Duration = Field(default=30.0, gt=0, description="the longest pause")
    limit: Annotated[
        int | None,
        BeforeValidator(_limit),
        WithJsonSchema({"anyOf": [{"const": "forever"}, {"type": "integer", "minimum": 1}]}),
    ] = Field(default=None, ge=1, description="drop a request after so many attempts, or forever: never")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min > self.max:
            raise ValueError("`min` is longer than `max`")
        return self


class WebhookTlsOptions(Options):
    """Which certificate authorities to trust, and our own certificate. Checking the server cannot be switched off."""

    ca: FilePath | None = Field(default=None, description="authorities to trust, in PEM; default: the system's")
    cert: FilePath | None = Field(default=None, description="our certificate, for endpoints that ask for one")
    key: FilePath | None = Field(default=None, description="its key; default: in the same file")
    server_name: str | None = Field(default=None, description="the name the endpoint's certificate is for")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.key and not self.cert:
            raise ValueError("`key` needs `cert`")
        return self


class LeaderOptions(Options):
    """Which of several nodes sends."""

    lease: Annotated[Dsn, BeforeValidator(_lease, json_schema_input_type=str)] = Field(
        default=None,
        validate_default=True,
        description="a folder for nodes on one machine, a Postgres DSN across machines; default: `state`",
    )
    seconds: Duration = Field(default=10.0, ge=0.5, description="how long a leader that is silent stays leader")
    interval: Duration = Field(default=1.0, gt=0, description="how often the leader stores what was delivered")


class QueueOptions(Options):
    """Events that wait, on disk."""

    path: Annotated[FilePath, BeforeValidator(_queue_path, json_schema_input_type=str)] = Field(
        default=None,
        validate_default=True,
        description="default: the folder `queue` in `state`; on a cluster a folder that every executor sees",
    )
    max_bytes: Size = Field(default=10_000_000_000, description="above this the pipeline waits for the endpoint")
    segment_bytes: Size = Field(default=64_000_000, ge=1_000_000, description="how large a file of the queue grows")


class WebhookOptions(TypedOptions):
    """Events posted to an HTTP endpoint, in order, from a durable queue."""

    type: Literal["webhook"]
    url: WebhookUrl = Field(description="an http:// or https:// URL, or stdout; take its secrets from ${VARIABLES}")
    format: Literal["rqlite", "cloudevents", "debezium"] = Field(
        default="cloudevents", description="what a body looks like"
    )
    copied_rows: bool = Field(
        default=True, description="send the rows of a copy as events; false: only what changes from then on"
    )
    events: bool = Field(
        default=False,
        description="also send where transactions begin and commit, and the columns of tables; not with rqlite",
    )
    batch: EventBatchOptions = Field(default_factory=EventBatchOptions)
    retry: RetryOptions = Field(default_factory=RetryOptions)
    timeout: Duration = Field(default=5.0, gt=0, description="how long one request may take, answer included")
    tls: WebhookTlsOptions = Field(default_factory=WebhookTlsOptions)
    leader: LeaderOptions = Field(default_factory=dict, validate_default=True)
    headers: Annotated[dict[str, Secret], AfterValidator(_headers)] = Field(
        default={}, description="more headers for each request, such as Authorization"
    )
    secret: Annotated[
        list[Secret], BeforeValidator(_as_list, json_schema_input_type=str | list[str]), AfterValidator(_keys)
    ] = Field(
        default=[], description="keys to sign requests with, after Standard Webhooks; several while they are changed"
    )
    allow_private: bool = Field(default=False, description="also send to loopback, private and link-local addresses")
    service_id: str = Field(default="", description="the name of the sending service, in bodies of the format rqlite")
    node_id: str = Field(default_factory=socket.gethostname, min_length=1, description="default: the host's name")
    queue: QueueOptions = Field(default_factory=dict, validate_default=True)

    @model_validator(mode="after")
    def _check_events(self) -> Self:
        if self.events and self.format == "rqlite":
            raise ValueError("the format rqlite has no events but changes: use cloudevents or debezium with `events`")
        return self

    def to_text(self, pipeline: str) -> str:
        """One line, for the sender's standard input and nothing else: it holds every secret."""
        return base64.b64encode(pickle.dumps((self, pipeline))).decode()

    @staticmethod
    def from_text(text: str) -> tuple[WebhookOptions, str]:
        """The options, and the name of the pipeline."""
        options, pipeline = pickle.loads(base64.b64decode(text))  # noqa: S301 - written by the driver
        assert isinstance(options, WebhookOptions)
        return options, pipeline
