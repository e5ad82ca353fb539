"""`tailrace dashboard` and `tailrace run --dashboard` as commands."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tailrace.config.pipeline import load
from tailrace.testing.wait import wait_until
from tests.support.dashboard import Client, fill, open_store, serving, write_file
from tests.support.invocation import invoke
from tests.support.runner import command


@contextmanager
def started(*arguments: str, environment: Mapping[str, str] = {}) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_says_where_it_listens_and_ends_with_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    file = write_file(tmp_path)
    with open_store(file) as store:
        fill(store)
    with started("dashboard", str(file), "--listen", "127.0.0.1:0", "--json") as process:
        url = json.loads(first_line(process))["url"]
        client = Client(int(url.rstrip("/").rpartition(":")[2]))
        assert len(client.pipeline("shop", "/tables")["tables"]) == 4
        # A connection that stays open does not keep it from ending.
        with socket.create_connection(("127.0.0.1", client.port)):
            process.send_signal(number)
            assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_it_speaks_plainly_without_json(tmp_path: Path) -> None:
    with started("dashboard", str(write_file(tmp_path)), "--listen", "127.0.0.1:0") as process:
        assert first_line(process).startswith("serving the dashboard at http://127.0.0.1:")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--listen", "0.0.0.0:0"], 2, "--token-env"),
        (["--listen", "8470"], 2, "--listen must be host:port"),
        (["--token-env", "NOT_SET_HERE"], 2, "NOT_SET_HERE is not set"),
        (["--key", "server.key"], 2, "--key is given without --cert"),
        (["--host", "https://dash.example"], 2, "without https:// and port"),
        (["--host", "dash.example:443"], 2, "without https:// and port"),
    ],
)
def test_what_is_wrong_is_an_error_with_its_fix(tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
    result = invoke("dashboard", write_file(tmp_path), *arguments)
    assert (result.exit_code, said in result.output) == (code, True), result.output


def test_a_file_that_is_wrong_is_an_error_at_the_start(tmp_path: Path) -> None:
    good, bad = write_file(tmp_path), tmp_path / "bad.yaml"
    bad.write_text("name: bad\n")
    result = invoke("dashboard", good, bad, "--listen", "127.0.0.1:0")
    assert (result.exit_code, "bad.yaml" in result.output) == (2, True)


def test_a_port_in_use_ends_a_run_before_it_begins(tmp_path: Path) -> None:
    file = write_file(tmp_path)
    file.write_text(file.read_text().replace("${UNSET}", "postgresql://shop@127.0.0.1:1/shop"))
    with serving([write_file(tmp_path / "other", "other")]) as client:
        result = invoke("run", file, "--dashboard", "--listen", f"127.0.0.1:{client.port}")
    assert (result.exit_code, "cannot listen on 127.0.0.1" in result.output) == (4, True)
    assert not load(file, connects=False).state.exists()


def test_options_of_the_dashboard_are_refused_without_it(tmp_path: Path) -> None:
    file = write_file(tmp_path)
    file.write_text(file.read_text().replace("${UNSET}", "postgresql://shop@127.0.0.1:1/shop"))
    result = invoke("run", file, "--listen", "127.0.0.1:0")
    assert (result.exit_code, "add --dashboard" in result.output) == (2, True)


def test_help_loads_neither_the_server_nor_its_packages() -> None:
    packages = {"starlette", "uvicorn", "prometheus_client"}
    code = f"import sys; from tailrace.cli import app; print({packages} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_failing_dashboard_ends_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tailrace.cli.dashboard import serving_dashboard
    from tailrace.dashboard import serve

    reached = []

    async def fail(*arguments: object) -> None:
        reached.append(arguments)
        raise RuntimeError("broken")

    monkeypatch.setattr(serve.Dashboard, "_serve", fail)
    with serving_dashboard(write_file(tmp_path), "127.0.0.1:0", None, ()):
        wait_until(lambda: bool(reached))
    assert len(reached) == 1
