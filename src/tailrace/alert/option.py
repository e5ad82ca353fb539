"""The section `alerts` of a pipeline's file."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from tailrace.option.value import Duration, DurationOrOff, Off, Options, Secret, Size, none_if_off

AlertName = Literal["lag", "lag_bytes", "slot", "errored", "unavailable", "stopped"]

LEAST_REPEAT = 60.0
"""The same alert is not sent more often than this, in seconds."""

_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class AlertUrl(Secret):
    """Where alerts are posted. Only scheme, host and port may be shown: the rest of such a URL is often a secret."""

    __slots__ = ()

    @classmethod
    def read(cls, value: object) -> Secret:
        text = super().read(value).reveal().strip()
        try:
            parts = urlsplit(text)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_url = False
        if not is_url or not (text.isascii() and text.isprintable()) or " " in text:
            raise ValueError("must be an http:// or https:// URL")
        if "@" in parts.netloc:
            raise ValueError("must not hold a user or password; send them in `headers`")
        return cls(text)

    @property
    def masked(self) -> str:
        parts = urlsplit(self._text)
        return f"{parts.scheme}://{parts.netloc}"


def _headers(headers: dict[str, Secret]) -> dict[str, Secret]:
    for name, value in headers.items():
        if not _HEADER.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a header")
        if not (value.reveal().isascii() and value.reveal().isprintable()):
            raise ValueError(f"the value of {name} must be a line of ASCII")
    return headers


class AlertWebhookOptions(Options):
    """An HTTP endpoint. It gets each alert as a JSON object, by POST, and answers with a status of 200 to 299."""

    url: AlertUrl = Field(description="an http:// or https:// URL; take its secrets from ${VARIABLES}")
    headers: Annotated[dict[str, Secret], AfterValidator(_headers)] = Field(
        default={}, description="more headers, such as Authorization"
    )


class AlertCondition(Options):
    """When an alert is sent."""

    for_: Duration = Field(
        default=60.0, alias="for", description="how long it must hold, and not hold until the alert is resolved"
    )


class LagAlert(AlertCondition):
    """The destination, or what a webhook has delivered, is this far behind the source."""

    above: Duration = Field(default=300.0, gt=0, description="the age of the oldest change that waits")


class LagBytesAlert(AlertCondition):
    """So much of the upstream's log is not applied."""

    above: Size = Field(gt=0, description="bytes of the upstream's log")


class SlotAlert(AlertCondition):
    """The upstream may soon give the replication slot up, as it grows now, or has done so."""

    full_within: Duration = Field(default=21_600.0, gt=0, description="alert when the slot is full in less than this")


class ErroredAlert(AlertCondition):
    """A table is in error."""


class UnavailableAlert(AlertCondition):
    """Source, destination or store do not answer, or the journal is full; the pipeline waits."""

    for_: Duration = Field(default=300.0, alias="for", description="how long it must hold, and not hold after that")


class StoppedAlert(AlertCondition):
    """The run ended with an error. Sent at once; resolved when the pipeline has run for the time `for`."""


class AlertOptions(Options):
    """Where alerts go, and what they are about. Each condition can be `off`."""

    webhook: AlertWebhookOptions | None = Field(default=None, description="post each alert to an endpoint")
    command: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = Field(
        default=None, description="run a program for each alert, which it gets as JSON on its standard input"
    )
    timeout: Duration = Field(default=10.0, gt=0, le=300, description="how long the endpoint or the program may take")
    repeat: DurationOrOff = Field(default=None, description="send an alert again that still holds, after this time")
    lag: Annotated[LagAlert | None, BeforeValidator(none_if_off, json_schema_input_type=LagAlert | Off | None)] = Field(
        default_factory=LagAlert
    )
    lag_bytes: Annotated[
        LagBytesAlert | None, BeforeValidator(none_if_off, json_schema_input_type=LagBytesAlert | Off | None)
    ] = Field(default=None)
    slot: Annotated[SlotAlert | None, BeforeValidator(none_if_off, json_schema_input_type=SlotAlert | Off | None)] = (
        Field(default_factory=SlotAlert)
    )
    errored: Annotated[
        ErroredAlert | None, BeforeValidator(none_if_off, json_schema_input_type=ErroredAlert | Off | None)
    ] = Field(default_factory=ErroredAlert)
    unavailable: Annotated[
        UnavailableAlert | None, BeforeValidator(none_if_off, json_schema_input_type=UnavailableAlert | Off | None)
    ] = Field(default_factory=UnavailableAlert)
    stopped: Annotated[
        StoppedAlert | None, BeforeValidator(none_if_off, json_schema_input_type=StoppedAlert | Off | None)
    ] = Field(default_factory=StoppedAlert)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.webhook is None) == (self.command is None):
            raise ValueError("needs one of `webhook` and `command`")
        if self.repeat is not None and self.repeat < LEAST_REPEAT:
            raise ValueError(f"`repeat` must be {LEAST_REPEAT:.0f}s or longer, or off")
        return self

    @property
    def conditions(self) -> dict[AlertName, AlertCondition]:
        """Those that are not off, by name."""
        every: dict[AlertName, AlertCondition | None] = {
            "lag": self.lag,
            "lag_bytes": self.lag_bytes,
            "slot": self.slot,
            "errored": self.errored,
            "unavailable": self.unavailable,
            "stopped": self.stopped,
        }
        return {name: one for name, one in every.items() if one is not None}
