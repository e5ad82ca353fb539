"""Copies of tables: the three ways a copy is written, and the notes of copies that wait for their end.

A copy that must not show before it is complete leaves a note for each of its batches: `copy-<batch>.json` with the
receipts of what the batch staged. A batch that is repeated overwrites its note. The batch that completes the copy
writes all that the notes name. Notes of batches before the one that began the copy belong to a copy that was given up.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from tailrace.destination import Batch, Destination, Staged, TableBatch, Written
from tailrace.destination.capability import Inspectable
from tailrace.errors import TableError, UnavailableError, problems
from tailrace.model.schema import TableName, TableSchema

HeldReceipt = dict[str, Any]
_NAME = re.compile(r"copy-(\d{20})\.json")


class Notes(Protocol):
    """Where the notes of one table are: a folder, or what stands for one in an object store."""

    def note(self, name: str, text: str) -> None: ...
    def notes(self) -> list[str]: ...
    def noted(self, name: str) -> str | None: ...
    def forget(self, names: Sequence[str]) -> None: ...


@dataclass(frozen=True)
class CopyNote:
    """What one batch of a copy staged, and when that was."""

    batch: Batch
    begins: bool
    at: float
    receipts: list[HeldReceipt]


def write_batch(destination: Destination, batch: TableBatch) -> Written:
    """Write one table's part of a batch in the destination's `copy_mode`. Called once per table and batch, possibly
    again for the same batch after a crash. Raises TableError for columns that the destination cannot keep."""
    require_columns(destination, batch.table)
    if destination.copy_mode == "own" or not batch.copies:
        return destination.write_changes(batch)
    stage = batch.stage
    assert stage is not None, "a copy has a stage"
    if destination.copy_mode == "stream":
        if batch.begins_copy and not _holds(destination, batch):
            destination.drop_table_for_copy(batch.table)
        written = destination.write_changes(batch)
        stage.discard(batch.staged)
        return written
    notes = stage.notes(batch.table.table)
    held = copy_notes(notes, batch.batch)
    if not batch.begins_copy and not held:
        raise TableError(
            f"the rows that earlier batches copied are no longer in {stage.folder}",
            table=str(batch.table.table),
            fix=f"tailrace resync FILE {batch.table.table}, and let no one else clean that folder",
        )
    if not batch.completes_copy:
        hold(notes, batch, [asdict(one) for one in batch.staged])
        if batch.begins_copy:
            stage.discard(Staged(**receipt) for note in give_up(notes, batch.batch) for receipt in note.receipts)
        return Written()
    rows = [] if batch.begins_copy else [Staged(**receipt) for note in held for receipt in note.receipts]
    batch = replace(batch, staged=[*rows, *batch.staged], replaces=True)
    written = destination.write_changes(batch)
    # The notes stay until the next copy begins: without them a repeat of this batch would look like a copy whose rows
    # were lost.
    stage.discard(batch.staged)
    return written


def _holds(destination: Destination, batch: TableBatch) -> bool:
    """Whether a destination that can be asked holds the batch already: a repeat must not begin the copy again."""
    if not isinstance(destination, Inspectable):
        return False
    last = destination.last_batch(batch.table.table, batch.pipeline)
    return last is not None and not last.is_other(batch.batch.last)


def require_columns(destination: Destination, table: TableSchema) -> None:
    """Raises TableError for columns that the destination cannot keep. Called before rows of the table are written."""
    name = str(table.table)
    for finding in problems(destination.check_columns(table)).values():
        again = f"then tailrace retry FILE {name}, or tailrace resync FILE {name} to copy it with its new columns"
        raise TableError(finding.message, table=name, fix=f"{finding.fix}; {again}" if finding.fix else again)


def hold(notes: Notes, batch: TableBatch, receipts: Sequence[HeldReceipt]) -> None:
    """Keep what a batch staged for the end of its copy."""
    note = {
        "pipeline": batch.pipeline,
        "starts": batch.begins_copy,
        "at": time.time(),
        "receipts": list(receipts),
    }
    notes.note(_name(batch.batch), json.dumps(note, ensure_ascii=False))


def copy_notes(notes: Notes, batch: Batch) -> list[CopyNote]:
    """The notes of the copy that this batch goes on with, in order; empty when none is held."""
    found = [note for note in _all(notes) if note.batch.pipeline == batch.pipeline and note.batch.id < batch.id]
    begun = max((note.batch.id for note in found if note.begins), default=None)
    return [note for note in found if begun is not None and note.batch.id >= begun]


def give_up(notes: Notes, batch: Batch) -> list[CopyNote]:
    """Delete the notes from before this batch, for a copy that it replaces or completes. Returns what they named."""
    # Keep the notes of later batches: if there are any, a runner that replaced this one wrote them.
    given_up = [note for note in _all(notes) if note.batch.pipeline != batch.pipeline or note.batch.id < batch.id]
    notes.forget([_name(note.batch) for note in given_up])
    return given_up


def last_held(notes: Notes) -> float | None:
    """When the newest note was written, in seconds since 1970; None when there is none."""
    return max((note.at for note in _all(notes)), default=None)


def require_unknown(batch: TableBatch, place: str, *, root: Path | None = None) -> None:
    """Raises TableError when a table is missing that earlier batches wrote: its disk may just not be mounted.

    Raises UnavailableError when even the folder of all tables, `root`, is missing.
    """
    if batch.is_known:
        table = batch.table.table
        if root is not None and not root.is_dir():
            raise missing_root(root, table)
        raise TableError(
            f"earlier batches wrote this table, but it is missing from {place}",
            table=str(table),
            fix=f"restore it, then tailrace retry FILE {table}; or tailrace resync FILE {table}",
        )


def missing_root(root: Path, table: TableName) -> UnavailableError:
    """The error for a folder that should hold all tables: its disk may not be mounted."""
    return UnavailableError(f"{root} is missing", table=str(table), fix="restore it; tailrace retries by itself")


def early_changes_error(table: TableName) -> TableError:
    """The error for changes that came while the rows they change are not visible yet: a bug in the source."""
    return TableError(
        "the source sent changes for this table before its copy was complete (a bug in the source)",
        table=str(table),
        fix=f"tailrace resync FILE {table}",
    )


def _name(batch: Batch) -> str:
    return f"copy-{batch.id:020}.json"


def _all(notes: Notes) -> list[CopyNote]:
    found: list[CopyNote] = []
    for name in notes.notes():
        if (match := _NAME.fullmatch(name)) and (text := notes.noted(name)) is not None:
            raw = json.loads(text)
            batch = Batch(raw["pipeline"], int(match[1]))
            found.append(CopyNote(batch, raw["starts"], raw["at"], raw["receipts"]))
    return found
