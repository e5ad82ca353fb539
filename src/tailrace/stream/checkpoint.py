"""Spark's record of a pipeline's batches, and whether it belongs to the pipeline's state."""

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
"""Spark's own file, with the query's id."""


@dataclass(frozen=True)
class Checkpoint:
    """The folder that Spark is given: it logs a batch's range in `offsets` before it begins, and in `commits` after."""

    folder: Path

    def require(self, store: StateStore) -> None:
        """Raises LostError unless folder and store are of one life of the pipeline; a new folder becomes so.

        With one of them lost, or the folder an older copy, batches would be counted anew, and the destination would
        take new ones for old ones or old ones for new ones.
        """
        mark, epoch = self.folder / _MARK, store.pipeline().epoch
        self._forget_empty()
        fix = "put it back from a backup, or begin again: tailrace reset FILE, then tailrace run FILE"
        belongs_to = mark.read_text() if mark.exists() else None
        if not (self.folder / "offsets").is_dir():
            if store.last_batch() is not None:
                raise LostError(f"batches were applied, but their checkpoint {self.folder} is gone", fix=fix)
        elif belongs_to not in (epoch, None):
            raise LostError(
                f"the checkpoint {self.folder} goes on from a state of the pipeline that the store does not have",
                fix=fix,
            )
        last, done = store.last_batch(), self.last_commit()
        if last is not None and (
            done is None or done[0] < last.id or (done[0] == last.id and _told(done[1]) != _told(last.offset))
        ):
            raise LostError(
                f"the checkpoint {self.folder} is older than the state: batch {last.id} is not in it", fix=fix
            )
        if belongs_to != epoch:
            atomic_file.make_folder(self.folder)
            atomic_file.replace_durably(mark, epoch.encode())

    def note_destination(self, name: str) -> str | None:
        """Where the batches so far went, if that is not `name`, which is written down. Called after `require`."""
        mark = self.folder / _DESTINATION
        # A path may hold bytes that are no text.
        before = os.fsdecode(mark.read_bytes()) if mark.exists() else None
        if before == name:
            return None
        atomic_file.replace_durably(mark, os.fsencode(name))
        return before

    def _forget_empty(self) -> None:
        # After a power cut Spark may find the name of an entry without its bytes. Nothing was done upon it: see `sync`.
        for pattern in (_OWN, "offsets/[0-9]*", "commits/[0-9]*"):
            for entry in self.folder.glob(pattern):
                if not entry.stat().st_size:
                    entry.with_name(f".{entry.name}.crc").unlink(missing_ok=True)
                    entry.unlink()

    def sync(self, log: Literal["offsets", "commits"], batch_id: int) -> None:
        """Put Spark's entry for a batch on disk, which Spark leaves to the operating system.

        After a power cut, a batch that the destination knows must be found with the range it had. A checkpoint that is
        not in the local file system looks after itself.
        """
        # Spark refuses a checkpoint without its own file, made with the folders before the first batch.
        own = (self.folder / _OWN, self.folder) if batch_id == 0 else ()
        for place in (self.folder / log / str(batch_id), self.folder / log, *own):
            with suppress(FileNotFoundError):
                atomic_file.sync(place)

    def last_commit(self) -> tuple[int, Offset] | None:
        """The last batch that is done, and the offset it ended at."""
        done = max((int(entry.name) for entry in (self.folder / "commits").glob("[0-9]*")), default=None)
        entry = self.folder / "offsets" / str(done)
        if done is None or not entry.is_file():
            return None
        # The version, what held for the whole batch, then a line for each source, of which there is one.
        *_, offset = entry.read_text().splitlines()
        return done, json.loads(offset)


def _told(offset: Mapping[str, Any]) -> bytes:
    """An offset as it is after Java had it, to which half a surrogate is a question mark."""
    return json.dumps(offset, sort_keys=True, ensure_ascii=False).encode("utf-8", "replace")
