"""A dashboard over real state stores, served as in production, and a client that sends what it is told to."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa

from tailrace.cli.dashboard import open_dashboard
from tailrace.config.pipeline import load
from tailrace.errors import Finding
from tailrace.model.change import Position, end_of
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.state import BatchRecord, RunRecord, SourceStatus, StateStore, TableUpdate
from tailrace.state.activity import Sample
from tailrace.state.record import ChangeCounts
from tailrace.state.report import AlertRecord
from tailrace.state.state_machine import WAY
from tailrace.testing.wait import wait_until

VALUE = b"c4nary-Va1ue"
"""The bytes of a row, in a dead letter."""
ORDERS, PAYMENTS, EVENTS, ITEMS = "public.orders", "public.payments", "audit.events", "public.order_items"
AMOUNT = "amount has 31 digits, and the lake has decimal(28,2)"


def write_file(folder: Path, name: str = "shop", *, store: str = "") -> Path:
    """A pipeline's file whose source needs a variable that is not set: the dashboard does without."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.yaml"
    file.write_text(
        f"name: {name}\nsource: {{type: postgres, dsn: '${{UNSET}}'}}\ndestination: {{type: delta, path: ./lake}}\n"
        f"state: {name}-state\n{store}"
    )
    return file


def open_store(file: Path) -> StateStore:
    return load(file, connects=False).store_address.open()


def columns(*more: tuple[str, pa.DataType, str, int]) -> tuple[Column, ...]:
    key = Column("id", pa.int64(), False, "bigint", 1)
    return (key, *(Column(name, type_, True, upstream, number) for name, type_, upstream, number in more))


def fill(store: StateStore, *, now: datetime | None = None) -> None:
    """Four tables: one follows, one is in error with a dead letter, one is paused, one is being copied."""
    at = now or datetime.now(UTC)
    for upstream_id, name in (("1", ORDERS), ("2", PAYMENTS), ("3", EVENTS), ("4", ITEMS)):
        store.add_table(upstream_id, name)
    text, money = pa.string(), pa.decimal128(18, 2)
    first = columns(("amount", money, "numeric(18,2)", 2), ("state", text, "text", 3))
    second = columns(("amount", money, "numeric(28,2)", 2), ("status", text, "text", 3), ("note", text, "text", 4))
    for version, begin in ((first, Position(1, 0)), (second, Position(500, 0))):
        store.put_schema(TableSchema(TableName.parse(ORDERS), version, ("id",), upstream_id="1"), begin)
    position, counts = str(end_of(1000)), ChangeCounts(10, 7, 5, 2)
    ready = [
        TableUpdate(each, WAY[1:], 10, 10, 1, 1, 14, position, at - timedelta(seconds=2), counts=counts)
        for each in ("1", "2", "3")
    ]
    copying = TableUpdate("4", WAY[1:2], rows_copied=100, rows_total=1000, counts=ChangeCounts(100))
    phases = {"read": 0.1, "decode": 0.1, "write": 0.7, "commit": 0.1}
    batch = BatchRecord(0, {"lsn": 1}, position, 40, 4000, 1.0, at - timedelta(seconds=9), phases)
    store.apply_batch(batch, [*ready, copying])
    store.put_source_status(
        SourceStatus("stream", position, 84_000_000, str(end_of(1500)), str(end_of(900)), position, at=at)
    )
    for index in range(30):
        ago = timedelta(seconds=10 * (30 - index))
        counts, kept = ChangeCounts(0, 50), 2_000 + 100 * index
        store.put_sample(Sample(at - ago, 10.0, counts, 500, 1.5, 84_000_000, kept, 8_000_000, "extended"))
    where = str(Position(1001, 3))
    again = f"tailrace resync FILE {PAYMENTS}"
    store.put_dead_letter("2", PAYMENTS, where, kind="UnfitError", reason=AMOUNT, fix=again, raw=VALUE)
    fix = f"fix the value upstream and run `{again}`, or skip it: tailrace skip FILE {PAYMENTS}"
    store.fail_table("2", AMOUNT, fix=fix, resume=where, attempts=3, code="unfit")
    store.pause_table("3")
    store.finish_request(store.ask("pause", EVENTS).id, "paused")
    store.put_run(RunRecord(at - timedelta(hours=3)))
    fix = "ALTER TABLE public.log ADD PRIMARY KEY (id)"
    store.put_notices([Finding("warning", "public.log", "it has no key", fix)])
    store.put_alerts([AlertRecord("errored", True, at, at, AMOUNT, (PAYMENTS,))])


def fill_many(store: StateStore, count: int) -> list[TableUpdate]:
    """So many tables that follow; gives what a batch does that changes all of them."""
    for index in range(count):
        store.add_table(str(index), f"tenant_{index % 40:02}.measurements_{index}")
    store.apply_batch(BatchRecord(0, {"lsn": 0}, str(end_of(1))), [TableUpdate(str(i), WAY[1:]) for i in range(count)])
    counts = ChangeCounts(0, 3, 2, 1)
    return [TableUpdate(str(i), changes_applied=6, counts=counts, position=str(end_of(2))) for i in range(count)]


@dataclass(frozen=True)
class Reply:
    """What the server answered."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]


@dataclass(frozen=True)
class Client:
    """Sends requests as they are given: no path is tidied, no header added but Host."""

    port: int
    host: str = "127.0.0.1"

    def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] = {},
        *,
        named: str | None = None,
    ) -> Reply:
        with closing(http.client.HTTPConnection(self.host, self.port, timeout=60)) as connection:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            if named != "":
                connection.putheader("Host", named or f"{self.host}:{self.port}")
            for name, value in headers.items():
                connection.putheader(name, value)
            if body is not None and "Content-Length" not in headers:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, found, response.read())

    def get(self, path: str, **headers: str) -> Reply:
        return self.send("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})

    def post(self, path: str, value: object = {}, **headers: str) -> Reply:
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        return self.send("POST", path, json.dumps(value).encode(), {"Content-Type": "application/json"} | named)

    def pipeline(self, name: str = "shop", rest: str = "") -> Any:
        reply = self.get(f"/api/v1/pipelines/{name}{rest}")
        assert reply.status == 200, reply.body
        return reply.json

    def table(self, name: str, pipeline: str = "shop") -> Any:
        return self.pipeline(pipeline, f"/tables/{quote(name, safe='')}")

    def act(self, action: str, table: str, value: object = {}, pipeline: str = "shop") -> Reply:
        return self.post(f"/api/v1/pipelines/{pipeline}/tables/{quote(table, safe='')}/{action}", value)


@contextmanager
def serving(
    files: Sequence[Path], *, listen: str = "127.0.0.1:0", token_env: str | None = None, names: Sequence[str] = ()
) -> Iterator[Client]:
    """The dashboard of these files, in a thread of this process."""
    with open_dashboard(files, listen, token_env, names) as dashboard:
        stop, started = threading.Event(), threading.Event()
        thread = threading.Thread(target=dashboard.serve, args=(stop, started.set))
        thread.start()
        try:
            wait_until(started.is_set)
            yield Client(int(dashboard.url.rstrip("/").rpartition(":")[2]))
        finally:
            stop.set()
            thread.join()
