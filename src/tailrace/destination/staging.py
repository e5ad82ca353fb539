"""Copied rows on their way from the task that copies them to the batch that names them: one file per call.

They are Arrow files, written in parallel and without a lock at the destination. A file is deleted when its batch is
written; one whose batch never came, after a crash, is deleted once it is a day old.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from tailrace.errors import TableError, UnavailableError
from tailrace.model.change import Changes
from tailrace.model.collapse import fit
from tailrace.model.schema import TableName, TableSchema
from tailrace.system.atomic_file import make_folder, replace_durably, sync

ABANDONED_SECONDS = 86_400.0
_COLUMNS = ("op", "commit", "ordinal", "committed_at", "exact", "row")
_HELD = "held"


@dataclass(frozen=True)
class Staged:
    """Copied rows that are durable but not visible yet. The code that stored them chooses the text of `receipt`."""

    receipt: str
    rows: int
    bytes: int


@dataclass(frozen=True)
class Stage:
    """A folder of copied rows, on a path that every executor sees. `pipeline` is the pipeline's name.

    NAME.arrow                          rows that one call of `write` stored
    held/TABLE/copy-BATCH.json          receipts that wait for the end of their copy
    """

    folder: Path
    pipeline: str = ""

    def write(self, table: TableSchema, rows: Iterable[Changes]) -> Staged:
        """Store the rows durably. The receipt names the file and the version of its rows.

        Raises UnavailableError when the disk is full or fails.
        """
        file = self.folder / f"{uuid.uuid4().hex}.arrow"
        batches = ((fit(changes, table).batch.select(list(_COLUMNS))) for changes in rows)
        count = write_arrow(file, batches)
        receipt = {"file": file.name if count else None, "table": table.to_json()}
        return Staged(json.dumps(receipt, ensure_ascii=False), count, file.stat().st_size if count else 0)

    def read(self, staged: Sequence[Staged]) -> Iterator[Changes]:
        """The rows of the receipts, in their order. Raises TableError when a file is gone."""
        for one in staged:
            table = TableSchema.from_json(json.loads(one.receipt)["table"])
            if (file := self._file(one)) is None:
                continue
            try:
                source = pa.memory_map(str(file))
            except FileNotFoundError:
                raise TableError(
                    f"{one.rows} copied rows are no longer in {self.folder}",
                    table=str(table.table),
                    fix=f"tailrace resync FILE {table.table}, and let no one else clean that folder",
                ) from None
            with source, pa.ipc.open_file(source) as reader:
                for number in range(reader.num_record_batches):
                    batch = reader.get_batch(number)
                    yield Changes.build(
                        table,
                        batch.column("row"),
                        op=batch.column("op").to_numpy(),
                        commit=batch.column("commit").to_numpy(),
                        ordinal=batch.column("ordinal").to_numpy(),
                        committed_at=batch.column("committed_at"),
                        exact=batch.column("exact"),
                    )

    def discard(self, staged: Iterable[Staged]) -> None:
        """Delete the files of the receipts. A repeat does nothing, and so does a receipt that is not of this folder."""
        for one in staged:
            if (file := self._file(one)) is not None:
                file.unlink(missing_ok=True)

    def discard_abandoned(self) -> int:
        """Delete files whose batch will never come, and return how many. Files of held receipts stay."""
        oldest = time.time() - ABANDONED_SECONDS
        held: set[str] | None = None
        gone = 0
        for file in self.folder.glob("*.arrow"):
            try:
                if file.stat().st_mtime >= oldest:
                    continue
            except FileNotFoundError:
                continue  # its batch was written just now
            held = self._held_files() if held is None else held
            if file.name not in held:
                file.unlink(missing_ok=True)
                gone += 1
        return gone

    def notes(self, table: TableName) -> NoteFolder:
        """Where the receipts of a table's copy wait for its end."""
        # Not the table's name: it may be longer than a file name can be.
        return NoteFolder(self.folder / _HELD / hashlib.sha256(str(table).encode()).hexdigest())

    def _file(self, staged: Staged) -> Path | None:
        try:
            name = json.loads(staged.receipt).get("file")
        except (ValueError, AttributeError):
            return None  # a destination that stages rows by itself wrote it
        return self.folder / Path(name).name if isinstance(name, str) and name else None

    def _held_files(self) -> set[str]:
        notes = [json.loads(note.read_bytes()) for note in (self.folder / _HELD).glob("*/*.json")]
        receipts = [Staged(**raw) for note in notes for raw in note["receipts"]]
        return {file.name for one in receipts if (file := self._file(one)) is not None}


@dataclass(frozen=True)
class NoteFolder:
    """Small texts by name, each durable when `note` returns."""

    folder: Path

    def note(self, name: str, text: str) -> None:
        with writing_to(self.folder):
            make_folder(self.folder)
            replace_durably(self.folder / name, text.encode())

    def notes(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("*.json"))

    def noted(self, name: str) -> str | None:
        try:
            return (self.folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def forget(self, names: Sequence[str]) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)
        if names:
            sync(self.folder)


def write_arrow(file: Path, batches: Iterable[pa.RecordBatch]) -> int:
    """Store batches in a new file, durable when this returns. Returns the number of rows; without any, makes no file.

    Raises UnavailableError when the disk is full or fails, and then leaves no file.
    """
    count = 0
    opened: BinaryIO | None = None
    writer: Any = None
    try:
        # Only what is written here is the disk's fault: reading the batches may fail for reasons of its own.
        for batch in filter(len, batches):
            with writing_to(file.parent):
                if opened is None:
                    make_folder(file.parent)
                    opened = file.open("xb")
                    writer = pa.ipc.new_file(opened, batch.schema)
                writer.write_batch(batch)
            count += len(batch)
        if opened is not None:
            with writing_to(file.parent):
                writer.close()
                opened.flush()
                os.fsync(opened.fileno())
                sync(file.parent)
    except BaseException:
        file.unlink(missing_ok=True)
        raise
    finally:
        if opened is not None:
            # After an error this may fail again, with what is still to be written.
            with suppress(OSError):
                opened.close()
    return count


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Runs around writes to a folder: a full or failing disk raises UnavailableError."""
    try:
        yield
    except OSError as error:
        raise UnavailableError(
            f"cannot write to {folder}: {error.strerror or type(error).__name__}",
            fix=f"check that the disk of {folder} has space and that this user may write there; tailrace retries",
        ) from error
