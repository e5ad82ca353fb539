"""How an alert gets to people: a POST to an endpoint, or a program of theirs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, Protocol
from urllib.error import HTTPError, URLError

from tailrace.alert.option import AlertOptions, AlertWebhookOptions
from tailrace.errors import Finding, UnavailableError
from tailrace.system import environment


@dataclass(frozen=True)
class Alert:
    """What people are told. The same `id` may come twice when a delivery or the process was cut off."""

    id: str
    pipeline: str
    name: str
    status: str
    text: str
    since: str
    at: str
    tables: tuple[str, ...] = ()
    fix: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "pipeline": self.pipeline,
            "alert": self.name,
            "status": self.status,
            "text": self.text,
            "fix": self.fix,
            "tables": list(self.tables),
            "since": self.since,
            "at": self.at,
            "host": socket.gethostname(),
        }


class Delivery(Protocol):
    """Tells people of one alert."""

    def send(self, alert: Alert) -> None:
        """Returns once they are told. Raises UnavailableError, whose message holds no secret, if they may not be."""
        ...


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The headers may hold a secret, which no other host must get."""

    def redirect_request(self, *args: object, **rest: object) -> None:
        return None


class WebhookDelivery:
    """Posts the alert as JSON. The proxy that the environment names is used, redirects are not followed."""

    def __init__(self, options: AlertWebhookOptions, timeout: float) -> None:
        self._options = options
        self._timeout = timeout
        self._opener = urllib.request.build_opener(_NoRedirect())

    def send(self, alert: Alert) -> None:
        headers = {name: value.reveal() for name, value in self._options.headers.items()}
        request = urllib.request.Request(  # noqa: S310 - the options take http and https only
            self._options.url.reveal(),
            data=json.dumps(alert.to_dict(), ensure_ascii=False).encode(),
            headers={"Content-Type": "application/json", "User-Agent": "tailrace", **headers},
            method="POST",
        )
        try:
            self._opener.open(request, timeout=self._timeout).close()
        except HTTPError as error:
            error.close()
            raise self._failure(f"answers with status {error.code}") from None
        except (OSError, HTTPException, ValueError) as error:
            raise self._failure(_reason(error)) from None

    def _failure(self, what: str) -> UnavailableError:
        place = self._options.url.masked
        return UnavailableError(f"{place} {what}", fix="check `alerts.webhook`, then: tailrace alert test FILE")


def _reason(error: Exception) -> str:
    """Why there was no answer, in words that quote nothing of the exchange."""
    cause = error.reason if isinstance(error, URLError) else error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"has a certificate that is not accepted: {cause.verify_message}"
    if isinstance(cause, ConnectionRefusedError):
        return "refuses connections"
    if isinstance(cause, TimeoutError):
        return "does not answer in time"
    if isinstance(cause, socket.gaierror):
        return "has a name that is not known"
    return "cannot be reached" if isinstance(cause, OSError) else "does not answer in HTTP"


class CommandDelivery:
    """Runs a program with the alert as JSON on its standard input and, in short, in its environment."""

    def __init__(self, command: list[str], timeout: float) -> None:
        self._command = command
        self._timeout = timeout

    def send(self, alert: Alert) -> None:
        variables = {
            "TAILRACE_ALERT": alert.name,
            "TAILRACE_ALERT_PIPELINE": alert.pipeline,
            "TAILRACE_ALERT_STATUS": alert.status,
            "TAILRACE_ALERT_TEXT": alert.text.replace("\0", "\N{REPLACEMENT CHARACTER}"),
        }
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**environment.for_children(), **variables},
                start_new_session=True,  # a Ctrl-C is for the pipeline, and all that the program started can be ended
            )
        except (OSError, ValueError) as error:
            raise self._failure(f"cannot be started: {getattr(error, 'strerror', None) or 'a bad name'}") from None
        try:
            process.communicate(json.dumps(alert.to_dict(), ensure_ascii=False).encode() + b"\n", self._timeout)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise self._failure(f"did not end within {self._timeout:g} s") from None
        if process.returncode != 0:
            raise self._failure(f"ended with code {process.returncode}")

    def _failure(self, what: str) -> UnavailableError:
        fix = "check `alerts.command`, then: tailrace alert test FILE"
        return UnavailableError(f"the program {self._command[0]} {what}", fix=fix)


def open_delivery(options: AlertOptions) -> Delivery:
    if options.command is not None:
        return CommandDelivery(options.command, options.timeout)
    assert options.webhook is not None, "the options need one of the two"
    return WebhookDelivery(options.webhook, options.timeout)


def check(options: AlertOptions | None) -> list[Finding]:
    """What would keep alerts from being sent, as far as it can be told without sending one. Never an error: a pipeline
    goes on without alerts."""
    if options is None or options.command is None or shutil.which(options.command[0]) is not None:
        return []
    fix = "install it, or give its whole path in `alerts.command`"
    return [Finding("warning", "alerts", f"there is no program {options.command[0]} to run", fix)]
