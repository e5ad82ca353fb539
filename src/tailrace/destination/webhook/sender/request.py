"""One request until it is delivered: body, headers, attempts and the pauses between them."""

from __future__ import annotations

import hashlib
import logging
import random
import time
from collections.abc import Callable

import pyarrow as pa

from tailrace.destination.webhook.format.event import format_of
from tailrace.destination.webhook.option import WebhookOptions
from tailrace.destination.webhook.retry import asked_pause, is_delivered, is_over, pause_seconds
from tailrace.destination.webhook.sender.status import Report
from tailrace.destination.webhook.signature import sign
from tailrace.destination.webhook.transport import Answer, open_transport
from tailrace.errors import PreflightError, TailraceError, UnavailableError
from tailrace.model.change import Position
from tailrace.system.backoff import wait
from tailrace.system.failpoint import reach

_log = logging.getLogger(__name__)


class EventDelivery:
    """Takes the events of one request after the other to the endpoint. Used by one thread; `abort` by any."""

    def __init__(self, options: WebhookOptions, report: Report) -> None:
        self._options = options
        self._report = report
        self._format = format_of(options.format)
        self._transport = open_transport(options)

    def deliver(self, events: pa.Table, may_go_on: Callable[[], bool]) -> bool:
        """Post the events until the endpoint accepts them, or they are dropped as configured.

        `may_go_on` is called right before each attempt and often between attempts; False ends the request. The events
        may or may not be delivered then, and have to be sent again.
        """
        options = self._options
        body = self._format.body(events, service_id=options.service_id, node_id=options.node_id)
        message = _message_id(events)
        attempts = 0
        while may_go_on():
            reach("sender.before_post")
            try:
                answer = self._transport.post(body, self._headers(message, body))
            except (UnavailableError, PreflightError) as error:
                failure: TailraceError = error
                asked = None
                # An address that is not allowed was not tried: that is no reason to drop anything.
                attempts += isinstance(error, UnavailableError)
            else:
                if is_delivered(answer.status):
                    self._report.delivered(len(events))
                    return True
                failure, asked = self._refused(answer), asked_pause(answer.retry_after)
                attempts += 1
            self._report.attempted(attempts, failure)
            if is_over(options.retry, attempts):
                # If the last attempt was cut short because we must stop, the next sender makes it.
                if not may_go_on():
                    return False
                self._drop(events, attempts)
                return True
            # The randomness of pauses need not be secret.
            pause = pause_seconds(options.retry, max(attempts, 1), random.random(), asked)  # noqa: S311
            if not wait(pause, lambda: not may_go_on()):
                return False
        return False

    def abort(self) -> None:
        """Give up the current request."""
        self._transport.abort()

    def close(self) -> None:
        self._transport.close()

    def _headers(self, message: str, body: bytes) -> dict[str, str]:
        options = self._options
        given = {name: value.reveal() for name, value in options.headers.items()}
        headers = {"Content-Type": self._format.content_type, **given}
        if options.secret:
            headers |= sign([key.reveal() for key in options.secret], message, int(time.time()), body)
        return headers

    def _refused(self, answer: Answer) -> UnavailableError:
        why = {
            3: "redirects are not followed",
            4: "it rejects the request",
            5: "it cannot accept the request now",
        }.get(answer.status // 100, "only 2xx means delivered")
        return UnavailableError(
            f"{self._options.url.masked} answered {answer.status}: {why}",
            fix="fix the endpoint or `destination.url`; queued events are sent once it answers 2xx",
        )

    def _drop(self, events: pa.Table, attempts: int) -> None:
        _log.warning(
            "%d events are dropped after %d attempts, as set by destination.retry.limit:", len(events), attempts
        )
        for row in events.select(["table", "commit", "ordinal", "id"]).to_pylist():
            position = Position(row["commit"], row["ordinal"])
            _log.warning("dropped: table %s at %s, event %s", row["table"], position, row["id"])
        self._report.dropped(len(events))


def _message_id(events: pa.Table) -> str:
    """The same for the same events, and for no others: receivers drop a message whose id they have seen."""
    ids = hashlib.sha256("\n".join(events.column("id").to_pylist()).encode()).hexdigest()
    return f"msg_{ids[:32]}"
