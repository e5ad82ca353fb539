"""What the sender is told, on its standard input: the keys of the file it needs, secrets included."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tailrace.destination.webhook.address import WebhookTarget
from tailrace.destination.webhook.option import WebhookOptions
from tailrace.destination.webhook.retry import RetrySchedule
from tailrace.destination.webhook.transport import Route, WebhookTls, open_transport, scheme_of
from tailrace.errors import Finding, TailraceError, UnavailableError


@dataclass(frozen=True)
class SenderOptions:
    """Plain values, so that they travel; nothing secret shows in the repr."""

    pipeline: str
    queue: str
    route: Route = field(repr=False)
    schedule: RetrySchedule = field(default_factory=RetrySchedule)
    format: str = "cloudevents"
    max_events: int = 100
    max_bytes: int = 1_000_000
    max_delay_seconds: float = 0.2
    lease: str = field(default="", repr=False)
    lease_seconds: float = 10.0
    interval_seconds: float = 1.0
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)
    service_id: str = ""
    node_id: str = ""

    @classmethod
    def of(cls, options: WebhookOptions, *, name: str) -> SenderOptions:
        """What the section of a file says, for the pipeline `name`."""
        tls, retry = options.tls, options.retry
        return cls(
            pipeline=name,
            queue=str(options.queue.path),
            route=Route(
                url=options.url.reveal(),
                timeout_seconds=options.timeout,
                tls=WebhookTls(_text(tls.ca), _text(tls.cert), _text(tls.key), tls.server_name),
                allow_private=options.allow_private,
            ),
            schedule=RetrySchedule(retry.policy, retry.min, retry.max, retry.limit),
            format=options.format,
            max_events=options.batch.max_events,
            max_bytes=options.batch.max_bytes,
            max_delay_seconds=options.batch.max_delay,
            lease=options.leader.lease.reveal(),
            lease_seconds=options.leader.seconds,
            interval_seconds=options.leader.interval,
            headers={header: value.reveal() for header, value in options.headers.items()},
            secrets=tuple(secret.reveal() for secret in options.secret),
            service_id=options.service_id,
            node_id=options.node_id,
        )

    @property
    def shown_url(self) -> str:
        """What may be shown of the endpoint."""
        return self.route.url if scheme_of(self.route.url) == "stdout" else WebhookTarget.of(self.route.url).shown

    def check(self) -> list[Finding]:
        """Look whether the endpoint may be spoken to. Nothing is sent."""
        try:
            open_transport(self.route).close()
            if scheme_of(self.route.url) != "stdout":
                WebhookTarget.of(self.route.url).addresses(allow_private=self.route.allow_private)
        except UnavailableError as error:
            return [Finding("warning", self.shown_url, error.message, error.fix)]
        except TailraceError as error:
            return [Finding("error", self.shown_url, error.message, error.fix)]
        return [Finding("ok", self.shown_url, f"events go there in the format {self.format}")]

    def to_json(self) -> str:
        """One line, for the sender's standard input and nothing else: it holds every secret."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SenderOptions:
        values: dict[str, Any] = json.loads(text)
        route = values["route"]
        return cls(
            **values
            | {
                "route": Route(**route | {"tls": WebhookTls(**route["tls"])}),
                "schedule": RetrySchedule(**values["schedule"]),
                "secrets": tuple(values["secrets"]),
            }
        )


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
