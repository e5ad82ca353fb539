"""The keys of a webhook destination."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tailrace.destination.webhook.option import WebhookOptions
from tailrace.destination.webhook.setting import SenderOptions
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
    sender = SenderOptions.of(options, name="shop")
    assert (sender.max_events, sender.max_bytes, sender.max_delay_seconds) == (100, 2_000_000, 0.2)
    assert sender.schedule.limit is None
    assert (sender.schedule.policy, sender.schedule.min_seconds, sender.schedule.max_seconds) == ("exponential", 1, 30)
    assert sender.route.tls.ca == str(tmp_path / "ca.pem")
    assert sender.lease == str(tmp_path / "shared")
    assert SenderOptions.from_json(sender.to_json()) == sender


def test_what_is_left_out_has_a_default(place: OptionContext) -> None:
    sender = SenderOptions.of(read(place), name="shop")
    assert sender.lease == str(place.state)
    assert sender.queue == str(place.state / "queue")
    assert sender.node_id == socket.gethostname()
    assert (sender.route.timeout_seconds, sender.lease_seconds, sender.interval_seconds) == (5, 10, 1)
    assert not sender.route.allow_private


def test_a_lease_may_be_a_postgres_database(place: OptionContext) -> None:
    for dsn in ("postgresql://me:secret@db/state", "host=db dbname=state"):
        assert SenderOptions.of(read(place, leader={"lease": dsn}), name="shop").lease == dsn


def test_one_signing_secret_or_several_while_they_are_changed(place: OptionContext) -> None:
    assert SenderOptions.of(read(place, secret="one"), name="shop").secrets == ("one",)
    assert SenderOptions.of(read(place, secret=["one", "two"]), name="shop").secrets == ("one", "two")


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


def test_secrets_show_nowhere_but_in_what_the_sender_is_told(place: OptionContext) -> None:
    options = read(
        place,
        url=f"https://me:{CANARY}@example.com/{CANARY}?key={CANARY}",
        headers={"Authorization": CANARY},
        secret=CANARY,
        leader={"lease": f"postgresql://me:{CANARY}@db/state"},
    )
    sender = SenderOptions.of(options, name="shop")
    shown = [repr(options), str(options), options.model_dump_json(), repr(sender), sender.shown_url]
    assert not [text for text in shown if CANARY in text]
    assert sender.shown_url == "https://example.com"
    assert json.loads(sender.to_json())["headers"] == {"Authorization": CANARY}


def test_a_private_target_is_found_before_anything_is_sent(place: OptionContext) -> None:
    inside = SenderOptions.of(read(place, url="http://127.0.0.1:9/"), name="shop").check()
    allowed = SenderOptions.of(read(place, url="http://127.0.0.1:9/", allow_private=True), name="shop").check()
    unknown = SenderOptions.of(read(place, url="http://nowhere.invalid/"), name="shop").check()
    broken = SenderOptions.of(read(place, tls={"ca": "missing.pem"}), name="shop").check()
    assert [finding[0].level for finding in (inside, allowed, unknown, broken)] == ["error", "ok", "warning", "error"]
    assert "allow_private" in (inside[0].fix or "")
    assert SenderOptions.of(read(place, url="stdout"), name="shop").check()[0].level == "ok"
