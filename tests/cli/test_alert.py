"""`tailrace alert test`: whether alerts get to people, without a source, a destination or a state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tailrace.testing.endpoint import Reply, WebhookEndpoint
from tests.support.invocation import invoke

CANARY = "c4nary-T0ken"


def write(folder: Path, alerts: str) -> Path:
    file = folder / "shop.yaml"
    source = "{type: postgres, dsn: 'postgresql://nobody@127.0.0.1:1/none'}"
    file.write_text(f"name: shop\nsource: {source}\ndestination: {{type: delta, path: ./lake}}\n{alerts}\n")
    return file


def test_the_endpoint_gets_one_alert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with WebhookEndpoint() as endpoint:
        monkeypatch.setenv("ALERT_URL", f"{endpoint.url}/{CANARY}")
        file = write(tmp_path, 'alerts: {webhook: {url: "${ALERT_URL}"}}')
        done = invoke("alert", "test", file)
        assert (done.exit_code, done.stdout) == (0, "the alert was sent\n")
        (request,) = endpoint.requests
    sent = json.loads(request.body)
    assert (sent["pipeline"], sent["alert"], sent["status"]) == ("shop", "test", "firing")
    assert sorted(tmp_path.iterdir()) == [file]


def test_an_endpoint_that_fails_is_exit_code_4_and_its_secret_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WebhookEndpoint() as endpoint:
        endpoint.script(Reply(403))
        monkeypatch.setenv("ALERT_URL", f"{endpoint.url}/{CANARY}")
        file = write(tmp_path, 'alerts: {webhook: {url: "${ALERT_URL}"}}')
        done = invoke("alert", "test", file)
    assert done.exit_code == 4
    assert f"http://localhost:{endpoint.port} answers with status 403" in done.output
    assert f"tailrace alert test {file}" in done.output
    assert CANARY not in done.output


def test_a_program_is_run(tmp_path: Path) -> None:
    got = tmp_path / "got"
    done = invoke("alert", "test", write(tmp_path, f"alerts: {{command: [sh, -c, 'cat > {got}']}}"), "--json")
    assert (done.exit_code, json.loads(done.stdout)) == (0, {"sent": True})
    assert json.loads(got.read_text())["text"] == "shop: a test; nothing is wrong"


def test_a_file_without_alerts_is_told_how_to_have_them(tmp_path: Path) -> None:
    done = invoke("alert", "test", write(tmp_path, ""))
    assert done.exit_code == 2
    assert "alerts: {webhook:" in done.output
