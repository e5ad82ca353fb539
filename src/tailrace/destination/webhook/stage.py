"""What the tables of a batch bring to the queue, before the driver puts it there: files that executors write.

    staged/NAME.arrow                events of one table
    staged/BATCH/TABLE.json          which of those files a batch has for a table, in order

The driver takes the files of a batch together, so that events of several tables come in the order of their commits.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.change import LAST_ORDINAL, Position
from tailrace.destination import Batch
from tailrace.destination.webhook.event import QUEUE_SCHEMA
from tailrace.journal.segment import sync_directory

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


class Stage:
    """The folder beside the queue. Executors write to it, the driver takes from it; both see the same path."""

    def __init__(self, queue: Path) -> None:
        self._folder = queue / _FOLDER

    def write(self, batches: Iterable[pa.RecordBatch]) -> Piece:
        """Store events in a file of their own; durable when this returns."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{uuid.uuid4().hex}.arrow"
        events, commit = 0, 0
        with path.open("wb") as file:
            with pa.ipc.new_file(file, QUEUE_SCHEMA) as sink:
                for batch in batches:
                    if batch.num_rows:
                        sink.write_batch(batch)
                        events += batch.num_rows
                        commit = max(commit, pc.max(batch.column("commit")).as_py())
            file.flush()
            os.fsync(file.fileno())
        return Piece(path.name, events, path.stat().st_size, commit)

    def enter(self, batch: Batch, table: str, *, copied: list[Piece], log: list[Piece], completes: bool) -> None:
        """Say what a batch has for a table. Said again, the newer word counts."""
        folder = self._of(batch)
        folder.mkdir(parents=True, exist_ok=True)
        place = folder / f"{quote(table, safe='')}.json"
        said = {
            "table": table,
            "copied": [asdict(piece) for piece in copied],
            "log": [asdict(piece) for piece in log],
            "completes": completes,
        }
        partial = place.with_suffix(".new")
        with partial.open("w") as file:
            json.dump(said, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(place)
        sync_directory(folder)

    def gather(self, batch: Batch) -> Iterator[pa.Table]:
        """The events of a batch in the order of the queue: copied rows, the ends of copies, then the log."""
        said = [json.loads(file.read_text()) for file in sorted(self._of(batch).glob("*.json"))]
        for table in said:
            for piece in table["copied"]:
                yield from self._read(piece["file"])
        ends = [
            (table["table"], max(piece["commit"] for piece in table["copied"] if piece["events"]))
            for table in said
            if table["completes"] and any(piece["events"] for piece in table["copied"])
        ]
        if ends:
            yield markers([(table, Position(commit, LAST_ORDINAL)) for table, commit in ends])
        log = [events for table in said for piece in table["log"] for events in self._read(piece["file"])]
        if log:
            yield pa.concat_tables(log).sort_by(_LOG_ORDER)

    def discard(self, batch: Batch) -> None:
        """Remove what a batch had staged. A repeat does nothing."""
        folder = self._of(batch)
        for place in folder.glob("*.json"):
            said = json.loads(place.read_text())
            for piece in (*said["copied"], *said["log"]):
                (self._folder / piece["file"]).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)

    def clear(self) -> None:
        """Remove everything: what no batch took before a restart is staged again."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _of(self, batch: Batch) -> Path:
        return self._folder / f"{quote(batch.pipeline, safe='')}-{batch.id}"

    def _read(self, name: str) -> Iterator[pa.Table]:
        with pa.memory_map(str(self._folder / name)) as source:
            table = pa.ipc.open_file(source).read_all()
            for first in range(0, len(table), _GATHERED_ROWS):
                yield table.slice(first, _GATHERED_ROWS)


def as_copied(events: pa.RecordBatch) -> pa.RecordBatch:
    """Copied rows at the place where their snapshot ends: every change of the log behind it comes later."""
    ordinal = pa.array(np.full(events.num_rows, LAST_ORDINAL, np.int64))
    return events.set_column(events.schema.get_field_index("ordinal"), QUEUE_SCHEMA.field("ordinal"), ordinal)


def markers(ends: Sequence[tuple[str, Position]]) -> pa.Table:
    """Rows that say up to where everything of a table lies before them."""
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
