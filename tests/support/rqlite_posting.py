"""Posting to a receiver the way rqlite does, and reading what its journal holds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import urllib3

from tailrace.journal import Journal
from tailrace.model.change import START
from tailrace.source.rqlite.receiver import STATUS, RqliteReceiverOptions
from tailrace.system.child_process import read_status
from tailrace.system.failpoint import VARIABLE
from tailrace.testing.wait import wait_until

RECORDED = Path(__file__).parents[1] / "source" / "rqlite" / "recorded"

Entry = dict[str, Any]


def insert(number: int, table: str = "t", **values: object) -> dict[str, Any]:
    """The event of a new row."""
    return {"op": "INSERT", "table": table, "new_row_id": number, "after": {"id": number, **values}}


def update(number: int, before: object, after: object, table: str = "t") -> dict[str, Any]:
    """The event of a row whose column `v` changes."""
    return {
        "op": "UPDATE",
        "table": table,
        "new_row_id": number,
        "old_row_id": number,
        "before": {"id": number, "v": before},
        "after": {"id": number, "v": after},
    }


def entry(index: int, *events: dict[str, Any], at: int = 1_794_766_424_567) -> Entry:
    return {"index": index, "commit_timestamp": at, "events": list(events)}


def body(entries: Sequence[Entry], *, service: str | None = None, node: str = "n1") -> bytes:
    named = {} if service is None else {"service_id": service}
    return json.dumps({**named, "node_id": node, "payload": list(entries)}).encode()


def recorded() -> list[bytes]:
    """The bodies that real nodes posted, in order; those of the first file have no service."""
    return [
        json.loads(line)["body"].encode()
        for file in sorted(RECORDED.glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]


def lines(journal: Path, service: str = "rqlite") -> list[dict[str, Any]]:
    """Every event the journal of a service holds, checked against the frames it lies in."""
    reader = Journal.open_reader(journal / service)
    try:
        found: list[dict[str, Any]] = []
        for ref in reader.frames(START, reader.mark()):
            frame = reader.read(ref)
            held = [json.loads(line) for line in bytes(frame.payload).splitlines()]
            assert frame.complete
            assert frame.count == len(held) == sum(one["rows"] for one in json.loads(ref.meta)["tables"].values())
            assert frame.first == (held[0]["index"], held[0]["ordinal"])
            assert frame.last == (held[-1]["index"], held[-1]["ordinal"] + 1)
            found += held
        places = [(one["index"], one["ordinal"]) for one in found]
        assert places == sorted(set(places))
        return found
    finally:
        reader.close()


def make_options(journal: Path, **changed: Any) -> RqliteReceiverOptions:
    made = RqliteReceiverOptions(
        journal=str(journal),
        segment_bytes=1_000_000,
        max_bytes=100_000_000,
        listen="127.0.0.1:0",
        path="/cdc",
        max_body=1_000_000,
    )
    return replace(made, **changed)


class Running:
    """A receiver process."""

    def __init__(self, options: RqliteReceiverOptions, failpoints: str = "") -> None:
        self.journal = Path(options.journal)
        self.journal.mkdir(parents=True, exist_ok=True)
        self.pool = urllib3.PoolManager(retries=False, timeout=30)
        self.log = self.journal / "receiver.log"
        began = time.time()
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tailrace.source.rqlite"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,
                env={**os.environ, VARIABLE: failpoints},
            )
        assert self.process.stdin is not None
        self.process.stdin.write(options.to_json() + "\n")
        self.process.stdin.flush()

        def ready() -> bool:
            status = self.status()
            return self.process.poll() is not None or (status.get("at", 0) > began and bool(status["receiving"]))

        wait_until(ready)
        assert self.process.poll() is None, self.log.read_text()
        scheme = "https" if options.cert else "http"
        self.root = f"{scheme}://{self.status()['listen']}"

    def status(self) -> dict[str, Any]:
        return read_status(self.journal, STATUS)

    def post(self, content: bytes, **given: Any) -> int:
        return self.answer(content, **given).status

    def answer(self, content: bytes, *, path: str = "/cdc", **given: Any) -> urllib3.BaseHTTPResponse:
        headers = {"Content-Type": "application/json", **given.pop("headers", {})}
        return self.pool.request("POST", self.root + path, body=content, headers=headers, **given)

    def get(self, path: str, **given: Any) -> urllib3.BaseHTTPResponse:
        return self.pool.request("GET", self.root + path, **given)

    def stop(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        code = self.process.wait()
        self.pool.clear()
        return code

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.pool.clear()


@contextmanager
def running(options: RqliteReceiverOptions, failpoints: str = "") -> Iterator[Running]:
    """A receiver process for as long as the context lasts."""
    receiver = Running(options, failpoints)
    try:
        yield receiver
    finally:
        if receiver.process.poll() is None:
            receiver.stop()
        elif receiver.process.stdin is not None:
            receiver.process.stdin.close()
        receiver.pool.clear()
