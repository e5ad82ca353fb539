"""Alerts that real endpoints and real programs get, or do not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tailrace.alert.delivery import Alert, check, open_delivery
from tailrace.alert.option import AlertOptions
from tailrace.errors import UnavailableError
from tailrace.system import environment
from tailrace.testing.endpoint import Reply, WebhookEndpoint
from tailrace.testing.wait import wait_until

CANARY = "c4nary-5ecret"
ALERT = Alert("shop/lag/1", "shop", "lag", "firing", "shop: behind", "2026-11-19T00:00:00+00:00", "now", ("public.a",))


def webhook(url: str, timeout: str = "10s") -> AlertOptions:
    headers = {"Authorization": f"Bearer {CANARY}"}
    return AlertOptions.model_validate({"webhook": {"url": f"{url}/{CANARY}", "headers": headers}, "timeout": timeout})


def program(*lines: str, timeout: str = "30s") -> AlertOptions:
    return AlertOptions.model_validate({"command": [sys.executable, "-c", "\n".join(lines)], "timeout": timeout})


def test_an_endpoint_gets_the_alert_as_json() -> None:
    with WebhookEndpoint() as endpoint:
        open_delivery(webhook(endpoint.url)).send(ALERT)
        (request,) = endpoint.requests
    assert request.path == f"/hook/{CANARY}"
    assert request.headers["authorization"] == f"Bearer {CANARY}"
    sent = json.loads(request.body)
    assert sent.pop("host")
    assert sent == {
        "id": "shop/lag/1",
        "pipeline": "shop",
        "alert": "lag",
        "status": "firing",
        "text": "shop: behind",
        "fix": None,
        "tables": ["public.a"],
        "since": "2026-11-19T00:00:00+00:00",
        "at": "now",
    }


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply(500), "answers with status 500"),
        (Reply(302, {"Location": "/elsewhere"}), "answers with status 302"),
        (Reply(cut=True), "cannot be reached"),
        (Reply(hold_seconds=5), "does not answer in time"),
    ],
)
def test_an_endpoint_that_fails_is_named_without_its_secrets(reply: Reply, said: str) -> None:
    with WebhookEndpoint() as endpoint:
        endpoint.script(reply)
        with pytest.raises(UnavailableError, match=said) as caught:
            open_delivery(webhook(endpoint.url, timeout="500ms")).send(ALERT)
        assert len(endpoint.requests) == 1
        assert f"http://localhost:{endpoint.port}" in str(caught.value)
        assert CANARY not in str(caught.value)


def test_an_endpoint_that_is_not_there_refuses() -> None:
    with WebhookEndpoint() as endpoint:
        url = endpoint.url
    with pytest.raises(UnavailableError, match="refuses connections"):
        open_delivery(webhook(url)).send(ALERT)


def test_a_program_gets_the_alert_and_none_of_the_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALERT_CANARY", CANARY)
    environment.hide(["ALERT_CANARY"])
    got = tmp_path / "got"
    write = f"open({str(got)!r}, 'w').write(json.dumps([json.load(sys.stdin), dict(os.environ)]))"
    open_delivery(program("import json, os, sys", write)).send(ALERT)
    sent, variables = json.loads(got.read_text())
    assert (sent["alert"], sent["status"], sent["tables"]) == ("lag", "firing", ["public.a"])
    assert variables["TAILRACE_ALERT"] == "lag"
    assert variables["TAILRACE_ALERT_STATUS"] == "firing"
    assert variables["TAILRACE_ALERT_TEXT"] == "shop: behind"
    assert CANARY not in got.read_text()


def test_a_program_that_fails_is_reported_with_its_code() -> None:
    with pytest.raises(UnavailableError, match="ended with code 7"):
        open_delivery(program("raise SystemExit(7)")).send(ALERT)


def test_a_program_that_does_not_read_is_no_failure() -> None:
    open_delivery(program("pass")).send(ALERT)


def test_a_program_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    lines = (
        "import pathlib, subprocess, sys, time",
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])",
        f"pathlib.Path({str(pid)!r}).write_text(str(child.pid))",
        "time.sleep(600)",
    )
    with pytest.raises(UnavailableError, match="did not end within"):
        open_delivery(program(*lines, timeout="5s")).send(ALERT)
    child = Path(f"/proc/{pid.read_text()}/stat")
    wait_until(lambda: not child.exists() or child.read_text().split()[2] == "Z")


def test_a_program_that_is_missing_is_a_warning_of_check() -> None:
    options = AlertOptions.model_validate({"command": ["no-such-program"]})
    assert [(each.level, "no-such-program" in each.message) for each in check(options)] == [("warning", True)]
    assert check(program("pass")) == check(None) == []
    with pytest.raises(UnavailableError, match="cannot be started: No such file"):
        open_delivery(options).send(ALERT)
