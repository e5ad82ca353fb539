"""A copy into a table that holds rows: its files are held back, batch by batch, until the batch that completes it.

What is held is a note in the table's directory for each batch: `copy-<batch>.json` with the receipts of the files that
the batch staged. A batch that is repeated overwrites its note. The batch that completes the copy commits all files that
the notes name in place of the table's, and then forgets the notes; those it could not forget, for a crash in between,
go when the batch is repeated. Notes of batches before the one that began the copy belong to a copy that was given up.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from tailrace.destination import Batch
from tailrace.destination.delta.table_folder import TablePath
from tailrace.errors import TableError
from tailrace.system import failpoint

FileReceipt = dict[str, Any]
_NAME = re.compile(r"copy-(\d{20})\.json")


@dataclass(frozen=True)
class CopyNote:
    """What one batch of a copy staged, and when that was."""

    batch: Batch
    starts: bool
    at: float
    receipts: list[FileReceipt]


def hold(place: TablePath, batch: Batch, receipts: Sequence[FileReceipt], *, starts: bool) -> None:
    """Keep what a batch staged for the end of its copy. With `starts`, an earlier copy that did not end is given up."""
    failpoint.reach("delta.before_hold")
    note = {"pipeline": batch.pipeline, "starts": starts, "at": time.time(), "receipts": list(receipts)}
    place.note(_name(batch), json.dumps(note, ensure_ascii=False))
    failpoint.reach("delta.held")
    if starts:
        give_up(place, batch)


def held(place: TablePath, batch: Batch) -> list[CopyNote]:
    """The notes of the copy that this batch goes on with, in order; empty when none is held."""
    notes = [note for note in _notes(place) if note.batch.pipeline == batch.pipeline and note.batch.id < batch.id]
    begun = max((note.batch.id for note in notes if note.starts), default=None)
    return [note for note in notes if begun is not None and note.batch.id >= begun]


def give_up(place: TablePath, batch: Batch) -> None:
    """Forget what was held before this batch, for a copy that it replaces."""
    # Not those of later batches: they are not this runner's if there are any, but those of one that replaced it.
    given_up = [note for note in _notes(place) if note.batch.pipeline != batch.pipeline or note.batch.id < batch.id]
    place.forget([_name(note.batch) for note in given_up])


def last_held(place: TablePath) -> float | None:
    """When something was held last, in seconds since 1970; None when nothing is."""
    return max((note.at for note in _notes(place)), default=None)


def require_files(place: TablePath, table: str, notes: Sequence[CopyNote]) -> None:
    """Raises TableError when a file that is held is gone, as after a vacuum by somebody else."""
    paths = [unquote(file["path"]) for note in notes for receipt in note.receipts for file in receipt["files"]]
    if missing := place.missing(paths):
        raise TableError(
            f"{len(missing)} of the {len(paths)} files that were copied are no longer in {place.uri}",
            table=table,
            fix=f"tailrace resync FILE {table}, and let nobody else vacuum the table meanwhile",
        )


def _name(batch: Batch) -> str:
    return f"copy-{batch.id:020}.json"


def _notes(place: TablePath) -> list[CopyNote]:
    found: list[CopyNote] = []
    for name in place.notes():
        if (match := _NAME.fullmatch(name)) and (text := place.noted(name)) is not None:
            raw = json.loads(text)
            batch = Batch(raw["pipeline"], int(match[1]))
            found.append(CopyNote(batch, raw["starts"], raw["at"], raw["receipts"]))
    return found
