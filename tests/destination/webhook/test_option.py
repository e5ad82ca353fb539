"""The keys of a webhook destination."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tailrace.destination.webhook.destination import WebhookDestination
from tailrace.destination.webhook.option import WebhookOptions
from tailrace.errors import Finding
from tailrace.option.value import OptionContext

CANARY = "c4nary-Pa55"


@pytest.fixture
def place(tmp_path: Path) -> OptionContext:
    return OptionContext("shop", tmp_path, tmp_path / "state")


def read(place: OptionContext, **keys: Any) -> WebhookOptions:
    return WebhookOptions.model_validate({"type": "webhook", "url": "https://example.com/hook", **keys}, context=place)


def test_the_contract_of_the_file_is_understood(place: OptionContext, tmp_path: Path) -> None:
    options = read(
        place,
        format="rqlite",
        batch={"max_events": 100, "max_bytes": "2MB", "max_delay": "200ms"},
        retry={"policy": "exponential", "min": "1s", "max": "30s", "limit": "forever"},
        tls={"ca": "ca.pem", "cert": "cert.pem", "key": "key.pem"},
        leader={"lease": "shared"},
    )
    assert (options.batch.max_events, options.batch.max_bytes, options.batch.max_delay) == (100, 2_000_000, 0.2)
    assert (options.retry.policy, options.retry.min, options.retry.max, options.retry.limit) == (
        "exponential",
        1,
        30,
        None,
    )
    assert options.tls.ca == tmp_path / "ca.pem"
    assert options.leader.lease.reveal() == str(tmp_path / "shared")
    assert WebhookOptions.from_text(options.to_text("shop")) == (options, "shop")


def test_what_is_left_out_has_a_default(place: OptionContext) -> None:
    options = read(place)
    assert options.leader.lease.reveal() == str(place.state)
    assert options.queue.path == place.state / "queue"
    assert options.node_id == socket.gethostname()
    assert (options.timeout, options.leader.seconds, options.leader.interval) == (5, 10, 1)
    assert not options.allow_private


def test_a_lease_may_be_a_postgres_database(place: OptionContext) -> None:
    for dsn in ("postgresql://me:secret@db/state", "host=db dbname=state"):
        assert read(place, leader={"lease": dsn}).leader.lease.reveal() == dsn


def test_one_signing_secret_or_several_while_they_are_changed(place: OptionContext) -> None:
    for given in (["one"], ["one", "two"]):
        found = read(place, secret=given[0] if len(given) == 1 else given).secret
        assert [secret.reveal() for secret in found] == given


@pytest.mark.parametrize(
    "wrong",
    [
        {"url": "ftp://example.com/"},
        {"url": "https://"},
        {"url": f"https://example.com/{CANARY} x"},
        {"url": f"https://me:{CANARY}@example.com:port/"},
        {"url": ""},
        {"retry": {"min": "10s", "max": "5s"}},
        {"retry": {"limit": 0}},
        {"batch": {"max_events": 0}},
        {"batch": {"max_bytes": "10"}},
        {"url": "https://example.com/a\x01b"},
        {"tls": {"key": "key.pem"}},
        {"tls": {"insecure_skip_verify": True}},
        {"headers": {"Content-Length": "1"}},
        {"headers": {"webhook-id": CANARY}},
        {"headers": {"X-Token": f"{CANARY}\r\nX-Other: 1"}},
        {"headers": {"X Token": CANARY}},
        {"secret": f"whsec_{CANARY}!"},
        {"format": "xml"},
    ],
)
def test_what_cannot_work_is_refused_without_showing_it(place: OptionContext, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        read(place, **wrong)
    assert CANARY not in str(refused.value)


def test_secrets_show_nowhere_but_in_what_the_sender_is_given(place: OptionContext) -> None:
    options = read(
        place,
        url=f"https://me:{CANARY}@example.com/{CANARY}?key={CANARY}",
        headers={"Authorization": CANARY},
        secret=CANARY,
        leader={"lease": f"postgresql://me:{CANARY}@db/state"},
    )
    shown = [repr(options), str(options), options.model_dump_json(), options.url.masked]
    assert not [text for text in shown if CANARY in text]
    assert options.url.masked == "https://example.com"
    sent, _ = WebhookOptions.from_text(options.to_text("shop"))
    assert sent.headers["Authorization"].reveal() == CANARY


def check(place: OptionContext, **keys: Any) -> list[Finding]:
    return WebhookDestination.model_construct(**dict(read(place, **keys))).check(None)


def test_a_private_target_is_found_before_anything_is_sent(place: OptionContext) -> None:
    inside = check(place, url="http://127.0.0.1:9/")
    allowed = check(place, url="http://127.0.0.1:9/", allow_private=True)
    unknown = check(place, url="http://nowhere.invalid/")
    broken = check(place, tls={"ca": "missing.pem"})
    assert [finding[0].level for finding in (inside, allowed, unknown, broken)] == ["error", "ok", "warning", "error"]
    assert "allow_private" in (inside[0].fix or "")
    assert check(place, url="stdout")[0].level == "ok"
