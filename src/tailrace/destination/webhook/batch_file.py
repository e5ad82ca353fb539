"""What the tables of a batch bring to the queue, before the driver puts it there: files that executors write.

    staged/NAME.arrow                events of one table
    staged/BATCH/TABLE.json          which of those files a batch has for a table, in order

The driver takes the files of a batch together, so that events of several tables come in the order of their commits.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.destination import Batch
from tailrace.destination.staging import write_arrow, writing_to
from tailrace.destination.webhook.format.event import QUEUE_SCHEMA
from tailrace.model.change import LAST_ORDINAL, START, Position, end_of
from tailrace.system.atomic_file import make_private_folder, replace_durably

_FOLDER = "staged"
_GATHERED_ROWS = 100_000
_LOG_ORDER = [("commit", "ascending"), ("ordinal", "ascending")]


@dataclass(frozen=True)
class Piece:
    """A file of events. `commit` is the highest among them."""

    file: str
    events: int
    bytes: int
    commit: int

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, "events": self.events, "bytes": self.bytes, "commit": self.commit}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Piece:
        return cls(raw["file"], raw["events"], raw["bytes"], raw["commit"])


class EventStage:
    """The folder next to the queue. Executors write to it, the driver takes from it; both see the same path."""

    def __init__(self, queue: Path) -> None:
        self._folder = queue / _FOLDER

    def write(self, batches: Iterable[pa.RecordBatch]) -> Piece:
        """Store events in a file of their own; durable when this returns. Raises UnavailableError on a full disk."""
        path = self._folder / f"{uuid.uuid4().hex}.arrow"
        commit = 0

        def noted() -> Iterator[pa.RecordBatch]:
            nonlocal commit
            for batch in filter(len, batches):
                commit = max(commit, pc.max(batch.column("commit")).as_py())
                yield batch

        events = write_arrow(path, noted())
        return Piece(path.name if events else "", events, path.stat().st_size if events else 0, commit)

    def enter(self, batch: Batch, table: str, *, copied: list[Piece], log: list[Piece], completes: bool) -> None:
        """Record the files a batch holds for a table. A second call replaces the first. Raises as `write` does."""
        folder = self._of(batch)
        entry = {
            "table": table,
            "copied": [piece.to_json() for piece in copied],
            "log": [piece.to_json() for piece in log],
            "completes": completes,
        }
        with writing_to(self._folder):
            make_private_folder(folder)
            # Not the table's name: it may be longer than a file name can be.
            name = hashlib.sha256(table.encode()).hexdigest()
            replace_durably(folder / f"{name}.json", json.dumps(entry).encode())

    def tables(self, batch: Batch) -> Set[str]:
        """The tables that the batch has events for."""
        return {entry["table"] for entry in self._entries(batch)}

    def gather(self, batch: Batch, tables: Set[str]) -> Iterator[pa.Table]:
        """The events of these tables in the order of the queue: copied rows, the ends of copies, then the log."""
        entries = [entry for entry in self._entries(batch) if entry["table"] in tables]
        for entry in entries:
            for piece in entry["copied"]:
                yield from self._read(piece["file"])
        if ends := [(entry["table"], _end(entry["copied"])) for entry in entries if entry["completes"]]:
            yield markers(ends)
        log = [events for entry in entries for piece in entry["log"] for events in self._read(piece["file"])]
        if log:
            yield pa.concat_tables(log).sort_by(_LOG_ORDER)

    def clear(self) -> None:
        """Delete everything: what no batch used is staged again."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _entries(self, batch: Batch) -> list[dict[str, Any]]:
        entries = [json.loads(file.read_text()) for file in self._of(batch).glob("*.json")]
        return sorted(entries, key=lambda entry: entry["table"])

    def _of(self, batch: Batch) -> Path:
        return self._folder / f"{quote(batch.pipeline, safe='')}-{batch.id}"

    def _read(self, name: str) -> Iterator[pa.Table]:
        if not name:
            return
        with pa.memory_map(str(self._folder / name)) as source:
            table = pa.ipc.open_file(source).read_all()
            for first in range(0, len(table), _GATHERED_ROWS):
                yield table.slice(first, _GATHERED_ROWS)


def _end(copied: list[dict[str, Any]]) -> Position:
    """Where the snapshot of a copy ends. The rows carry it; without rows it is only known that the table was copied."""
    commits = [piece["commit"] for piece in copied if piece["events"]]
    return end_of(max(commits)) if commits else START


def as_copied(events: pa.RecordBatch) -> pa.RecordBatch:
    """Copied rows at the place where their snapshot ends: every change of the log after it comes later."""
    ordinal = pa.array(np.full(events.num_rows, LAST_ORDINAL, np.int64))
    return events.set_column(events.schema.get_field_index("ordinal"), QUEUE_SCHEMA.field("ordinal"), ordinal)


def markers(ends: Sequence[tuple[str, Position]]) -> pa.Table:
    """Marker rows: each names a position up to which everything of its table comes before it in the queue."""
    rows = [
        {
            "table": table,
            "commit": position.commit,
            "ordinal": position.ordinal,
            "copied": True,
            "marker": True,
            "at": None,
            "id": "",
            "event": "",
        }
        for table, position in ends
    ]
    return pa.Table.from_pylist(rows, schema=QUEUE_SCHEMA)
