"""A server process for each test, and its URL."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import urllib3

SCHEMA = """
CREATE TABLE note (id INTEGER PRIMARY KEY, text TEXT, stars INTEGER);
CREATE TABLE person (mail TEXT PRIMARY KEY, name TEXT UNIQUE);
"""


def count_connections(port: int) -> int:
    """How many clients are connected to a port of this machine."""
    found = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(1 for fields in found if fields[1].endswith(f":{port:04X}") and fields[3] == "01")


class ServerProcess:
    """`tailrace serve-sync` on one port, which can be killed and started again."""

    def __init__(self, file: Path, *options: str, environment: dict[str, str] | None = None) -> None:
        self.file, self._options, self._environment = file, options, environment
        self._address = "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        tailrace = str(Path(sys.executable).with_name("tailrace"))
        command = [tailrace, "serve-sync", str(self.file), "--json", "--listen"]
        self._process = subprocess.Popen(
            [*command, self._address, *self._options], stdout=subprocess.PIPE, text=True, env=self._environment
        )
        assert self._process.stdout is not None
        self.url = json.loads(self._process.stdout.readline())["url"]
        self._address = self.url.partition("//")[2]

    def run(self, *statements: str) -> dict[str, Any]:
        """The answer to a batch of these statements."""
        steps = [{"stmt": {"sql": sql, "args": [], "want_rows": True}} for sql in statements]
        body = json.dumps({"baton": None, "requests": [{"type": "batch", "batch": {"steps": steps}}]}).encode()
        answer = urllib3.request("POST", f"{self.url}/v2/pipeline", body=body, retries=False, timeout=300)
        assert answer.status == 200
        result: dict[str, Any] = json.loads(answer.data)["results"][0]["response"]["result"]
        return result

    def open_connections(self) -> int:
        """How many clients are connected to the server."""
        return count_connections(int(self._address.rpartition(":")[2]))

    def peak_bytes(self) -> int:
        """The most memory that the server had so far."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

    def kill(self) -> None:
        self._process.kill()
        self._end()

    def stop(self) -> int:
        self._process.terminate()
        return self._end()

    def _end(self) -> int:
        code = self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    started: list[ServerProcess] = []

    def start(*options: str, environment: dict[str, str] | None = None) -> ServerProcess:
        started.append(ServerProcess(tmp_path / "served.db", *options, environment=environment))
        return started[-1]

    yield start
    for server in started:
        server.kill()
