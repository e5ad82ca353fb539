"""Queues to send from, and senders to send them."""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from tailrace.destination import Batch
from tailrace.destination.webhook.format.event import QUEUE_SCHEMA
from tailrace.destination.webhook.option import RetryOptions, WebhookOptions
from tailrace.destination.webhook.queue import QueueWriter
from tailrace.destination.webhook.sender.sender import Sender
from tailrace.destination.webhook.sender.status import STATUS
from tailrace.model.change import LAST_ORDINAL
from tailrace.option.value import OptionContext
from tailrace.system.child_process import read_status

AT = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
HASTE = RetryOptions(policy="exponential", min=0.001, max=0.01)


def row(table: str, commit: int, ordinal: int = 0, *, copied: bool = False, marker: bool = False) -> dict[str, Any]:
    """An event whose text is its id, table, commit and ordinal."""
    name = "" if marker else f"{table}:{commit}:{ordinal}"
    text = json.dumps({"id": name, "table": table, "commit": commit, "ordinal": ordinal})
    return {
        "table": table,
        "commit": commit,
        "ordinal": ordinal,
        "copied": copied,
        "marker": marker,
        "at": None if marker else AT,
        "id": name,
        "event": "" if marker else text,
    }


def copied(table: str, commit: int, count: int) -> list[dict[str, Any]]:
    """The rows of a copy, and the marker after them."""
    rows = [row(table, commit, LAST_ORDINAL, copied=True) for _ in range(count)]
    for number, each in enumerate(rows):
        each["id"] = f"{table}:copy {commit}:{number}"
        each["event"] = json.dumps({"id": each["id"], "table": table, "commit": commit, "ordinal": LAST_ORDINAL})
    return [*rows, row(table, commit, LAST_ORDINAL, copied=True, marker=True)]


def events(rows: Iterable[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=QUEUE_SCHEMA)


def numbered(first: int, count: int, tables: Sequence[str] = ("public.a", "public.b", "public.c")) -> pa.Table:
    """Events of some tables in turn, one commit each."""
    return events(row(tables[number % len(tables)], number) for number in range(first, first + count))


def fill(folder: Path, *batches: pa.Table) -> None:
    """Append batches to a queue."""
    with QueueWriter(folder, segment_bytes=1 << 20, max_bytes=1 << 30) as writer:
        first = writer._last.number + 1
        for number, batch in enumerate(batches, first):
            writer.append(Batch("shop/1", number), [batch])


def options(folder: Path, url: str, lease: Path | str, **others: Any) -> WebhookOptions:
    """Of a sender in a hurry. Keys of `batch` and `leader` may stand among the others."""
    keys: dict[str, Any] = {
        "retry": HASTE,
        "timeout": 30.0,
        "node_id": folder.name,
        "allow_private": True,
        "batch": {"max_events": 10, "max_delay": 0.01},
        "leader": {"lease": str(lease), "interval": 0.05, "seconds": 30.0},
    }
    for section, names in (("batch", ("max_events", "max_bytes", "max_delay")), ("leader", ("interval", "seconds"))):
        keys[section] |= {name: others.pop(name) for name in names if name in others}
    place = OptionContext("shop", folder, folder / "state")
    given = {"type": "webhook", "url": url, "queue": {"path": str(folder)}} | keys | others
    return WebhookOptions.model_validate(given, context=place)


def drain(chosen: WebhookOptions) -> None:
    """Send all there is."""
    Sender(chosen, "shop", lambda: False, until_empty=True).run()


@contextmanager
def sending(chosen: WebhookOptions) -> Iterator[None]:
    """A sender at work while the block runs."""
    stop = threading.Event()
    failures: list[BaseException] = []
    sender = Sender(chosen, "shop", stop.is_set)

    def run() -> None:
        try:
            sender.run()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]


def status(folder: Path) -> dict[str, Any]:
    return read_status(folder, STATUS)
