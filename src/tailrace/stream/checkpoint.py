"""Spark's checkpoint of a pipeline, and the check that it belongs to the pipeline's state."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tailrace.errors import LostError
from tailrace.source.follower import Offset
from tailrace.state import StateStore
from tailrace.system import atomic_file

_MARK = "epoch"
_DESTINATION = "destination"
_OWN = "metadata"
"""A file of Spark's own, with the query's id."""


@dataclass(frozen=True)
class Checkpoint:
    """Spark's checkpoint folder. Spark logs a batch's range in `offsets` before it runs, and in `commits` after it."""

    folder: Path

    def require(self, store: StateStore) -> None:
        """Raise LostError unless folder and store belong together; a new folder is marked as the store's.

        If one of them was lost, or the folder is an older copy, batch ids would start again from an earlier number.
        The destination would then take new batches for repeats, or repeats for new batches.
        """
        mark, epoch = self.folder / _MARK, store.pipeline().epoch
        self._remove_empty()
        fix = "restore it from a backup, or start again: tailrace reset FILE, then tailrace run FILE"
        belongs_to = mark.read_text() if mark.exists() else None
        if not (self.folder / "offsets").is_dir():
            if store.last_batch() is not None:
                raise LostError(f"batches were applied, but their checkpoint {self.folder} is missing", fix=fix)
        elif belongs_to not in (epoch, None):
            raise LostError(
                f"the checkpoint {self.folder} belongs to another state of the pipeline than the one in the store",
                fix=fix,
            )
        last, done = store.last_batch(), self.last_commit()
        if last is not None and (
            done is None or done[0] < last.id or (done[0] == last.id and _as_stored(done[1]) != _as_stored(last.offset))
        ):
            raise LostError(f"the checkpoint {self.folder} is older than the state: it lacks batch {last.id}", fix=fix)
        if belongs_to != epoch:
            atomic_file.make_folder(self.folder)
            atomic_file.replace_durably(mark, epoch.encode())

    def note_destination(self, name: str) -> str | None:
        """Store the destination's name; return the previous one if it differs. Called after `require`."""
        mark = self.folder / _DESTINATION
        # A path may contain bytes that are not valid text.
        before = os.fsdecode(mark.read_bytes()) if mark.exists() else None
        if before == name:
            return None
        atomic_file.replace_durably(mark, os.fsencode(name))
        return before

    def _remove_empty(self) -> None:
        # After a power cut an entry may exist without its bytes, which Spark cannot read. Its batch was not started or
        # not reported, because `sync` runs before that, so the entry can be removed.
        for pattern in (_OWN, "offsets/[0-9]*", "commits/[0-9]*"):
            for entry in self.folder.glob(pattern):
                if not entry.stat().st_size:
                    entry.with_name(f".{entry.name}.crc").unlink(missing_ok=True)
                    entry.unlink()

    def sync(self, log: Literal["offsets", "commits"], batch_id: int) -> None:
        """Sync Spark's entry for a batch to disk; Spark itself does not.

        After a power cut, a batch that the destination has must still have the same range here. A checkpoint that is
        not on a local file system is left alone: such storage is durable by itself.
        """
        # Spark refuses a checkpoint without its metadata file, which it creates, like the folders, before batch 0.
        own = (self.folder / _OWN, self.folder) if batch_id == 0 else ()
        for place in (self.folder / log / str(batch_id), self.folder / log, *own):
            with suppress(FileNotFoundError):
                atomic_file.sync(place)

    def last_commit(self) -> tuple[int, Offset] | None:
        """The last committed batch, and its end offset."""
        done = max((int(entry.name) for entry in (self.folder / "commits").glob("[0-9]*")), default=None)
        entry = self.folder / "offsets" / str(done)
        if done is None or not entry.is_file():
            return None
        # The file has a version, metadata of the batch, then one line per source; there is one source.
        *_, offset = entry.read_text().splitlines()
        return done, json.loads(offset)


def _as_stored(offset: Mapping[str, Any]) -> bytes:
    """An offset as Java stores it: an unpaired surrogate becomes a question mark."""
    return json.dumps(offset, sort_keys=True, ensure_ascii=False).encode("utf-8", "replace")
