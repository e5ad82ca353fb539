"""A queue of webhook events, filled by hand."""

from __future__ import annotations

import datetime
from pathlib import Path

import pyarrow as pa

from tailrace.destination import Batch
from tailrace.destination.webhook.format.event import QUEUE_SCHEMA
from tailrace.destination.webhook.queue import FRAME_EVENTS, QueueReader, QueueWriter
from tailrace.model.change import START, Position

AT = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def events(*places: tuple[str, int, int], copied: bool = False) -> pa.Table:
    rows = [
        {
            "table": table,
            "commit": commit,
            "ordinal": ordinal,
            "copied": copied,
            "marker": False,
            "at": AT,
            "id": f"{table}:{commit}:{ordinal}",
            "event": "{}",
        }
        for table, commit, ordinal in places
    ]
    return pa.Table.from_pylist(rows, schema=QUEUE_SCHEMA)


def numbered(first: int, count: int) -> pa.Table:
    return events(*(("public.t", number, 0) for number in range(first, first + count)))


def batch(number: int, life: str = "shop/1") -> Batch:
    return Batch(life, number)


def opened(folder: Path, *, segment_bytes: int = 1 << 20, max_bytes: int = 1 << 30) -> QueueWriter:
    return QueueWriter(folder, segment_bytes=segment_bytes, max_bytes=max_bytes)


def ids(folder: Path, after: Position = START) -> list[str]:
    reader = QueueReader(folder)
    try:
        found: list[str] = []
        while frames := reader.read(after, FRAME_EVENTS):
            found += [value for _, table in frames for value in table.column("id").to_pylist()]
            after = frames[-1][0]
        return found
    finally:
        reader.close()
