"""Spark's checkpoint of a pipeline, and the check that it belongs to the pipeline's state."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tailrace.errors import DamagedError, LostError
from tailrace.model.last_batch import LastBatch
from tailrace.source.follower import Offset
from tailrace.state import StateStore
from tailrace.state.planned import START_OF_STREAM
from tailrace.system import atomic_file, crc_file

_MARK = "epoch"
_DESTINATION = "destination"
_OWN = "metadata"
"""A file of Spark's own, with the query's id."""
_UNFINISHED = "offsets.new"
_COMMITTED = 'v1\n{"nextBatchWatermarkMs":0}'
"""What Spark logs of a batch that is committed."""
_RESET = "tailrace reset FILE, then tailrace run FILE"
_AGAIN = f"restore the `state` folder as a whole from a backup, or start again: {_RESET}"


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """Spark's checkpoint folder. Spark logs a batch's range in `offsets` before it runs, and in `commits` after it.

    A store that several machines share also has what Spark planned, from before each batch is applied: there the folder
    is a copy, which a driver with an empty disk builds again.
    """

    folder: Path

    def require(self, store: StateStore) -> None:
        """Raise LostError unless folder and store belong together; a new folder is marked as the store's.

        If one of them was lost, or the folder is an older copy, batch ids would start again from an earlier number.
        The destination would then take new batches for repeats, or repeats for new batches. Raises DamagedError for
        a folder whose entries are not those that Spark wrote.

        A folder that is missing, or older than a store that has what was planned, is built again from the store.
        """
        mark, epoch = self.folder / _MARK, store.pipeline().epoch
        self._remove_empty()
        self._require_sound()
        rebuilt = self._rebuild(store) if store.shared else False
        fix = f"restore the one that belongs to the state, or start again: {_RESET}"
        belongs_to = self._belongs_to() if not rebuilt else None
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
        self._require_applied(store.applied_batch(), done[0] if done is not None else -1, fix)
        if belongs_to != epoch:
            atomic_file.make_private_folder(self.folder)
            atomic_file.replace_durably(mark, epoch.encode())

    def _belongs_to(self) -> str | None:
        mark = self.folder / _MARK
        return os.fsdecode(mark.read_bytes()) if mark.exists() else None

    def _rebuild(self, store: StateStore) -> bool:
        """Write the entries that the store has, unless the folder has them; return whether that was done.

        A batch is planned after the one before it was committed, so the last planned batch is the only one that may
        have to be repeated. A folder that is newer than the store, or of another life of the pipeline, is left alone.
        """
        planned, last = _entries(store), store.last_batch()
        if not planned:
            return False
        newest, known = max(planned), self._newest("offsets")
        committed = newest if last is not None and last.id >= newest else newest - 1
        if known is not None:
            commits = self._newest("commits")
            done = -1 if commits is None else commits
            if done > newest or self._belongs_to() not in (store.pipeline().epoch, None):
                return False
            entry = self.folder / "offsets" / str(newest)
            if entry.is_file() and _line(entry) == _line_of(planned[newest], entry) and done >= committed:
                return False
            _log.warning("the checkpoint %s is older than the state, and is built again from it", self.folder)
        if committed >= 0 and committed not in planned:
            return False
        # Without `offsets` the folder counts as missing, so after a crash all of this is done again.
        for log in ("offsets", "commits", _UNFINISHED):
            shutil.rmtree(self.folder / log, ignore_errors=True)
        (self.folder / _MARK).unlink(missing_ok=True)
        for folder in (self.folder, self.folder / "commits", self.folder / _UNFINISHED):
            atomic_file.make_private_folder(folder)
        if not (self.folder / _OWN).exists():
            _put(self.folder / _OWN, json.dumps({"id": str(uuid.uuid4())}))
        if committed >= 0:
            _put(self.folder / "commits" / str(committed), _COMMITTED)
        for batch_id, text in planned.items():
            _put(self.folder / _UNFINISHED / str(batch_id), text)
        (self.folder / _UNFINISHED).rename(self.folder / "offsets")
        atomic_file.sync(self.folder)
        return True

    def entries(self, batch_id: int) -> dict[int, str]:
        """What Spark logged of the batch and of the one before it, for the store."""
        found = {number: self.folder / "offsets" / str(number) for number in (batch_id - 1, batch_id)}
        return {number: entry.read_text("utf-8") for number, entry in found.items() if entry.is_file()}

    def _require_applied(self, applied: LastBatch | None, done: int, fix: str) -> None:
        """The state records a batch as applied before Spark logs its commit, and Spark repeats only the last one."""
        if applied is None:
            return
        if done > applied.id:
            raise LostError(
                f"the state is older than its checkpoint {self.folder}: it knows of batches up to {applied.id},"
                f" and batch {done} is committed",
                fix=f"restore the state that belongs to the checkpoint, or start again: {_RESET}",
            )
        end = self.end_of(applied.id)
        if done < applied.id - 1 or (None not in (end, applied.end) and end != applied.end) or end is None:
            raise LostError(
                f"the checkpoint {self.folder} is older than the state: it lacks batch {applied.id}", fix=fix
            )

    def note_destination(self, name: str, store: StateStore) -> str | None:
        """Store the destination's name; return the previous one if it differs. Called after `require`."""
        mark = self.folder / _DESTINATION
        # A path may contain bytes that are not valid text.
        before = os.fsdecode(mark.read_bytes()) if mark.exists() else None
        if store.shared:
            before = store.destination() or before
            store.put_destination(name)
        if not mark.exists() or before != name:
            atomic_file.replace_durably(mark, os.fsencode(name))
        return before if before != name else None

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
        """The last committed batch, and its end offset. Raises DamagedError when that cannot be read."""
        done = self._newest("commits")
        if done is None or not (self.folder / "offsets" / str(done)).is_file():
            return None
        return done, _offset(self.folder / "offsets" / str(done))

    def planned(self) -> Offset | None:
        """The end offset of a batch that is planned and not committed, which Spark does first; None: there is none."""
        planned = self._newest("offsets")
        if planned is None or planned == self._newest("commits"):
            return None
        return _offset(self.folder / "offsets" / str(planned))

    def last_planned(self) -> LastBatch | None:
        """The last batch that Spark planned: it repeats that one if it is not committed, and no other."""
        planned = self._newest("offsets")
        return LastBatch(planned, self.end_of(planned)) if planned is not None else None

    def end_of(self, batch_id: int) -> int | None:
        """A number that identifies the offset at which a batch ends; None where the checkpoint is not a local folder.

        If the batch is repeated, it ends at the same one.
        """
        entry = self.folder / "offsets" / str(batch_id)
        if not entry.is_file():
            return None
        digest = hashlib.sha256(_line(entry).encode()).digest()
        return int.from_bytes(digest[:8]) >> 1  # destinations store signed numbers

    def _newest(self, log: Literal["offsets", "commits"]) -> int | None:
        return max((int(entry.name) for entry in (self.folder / log).glob("[0-9]*")), default=None)

    def _require_sound(self) -> None:
        """Raise DamagedError for what Spark could not read either, and for what differs from its checksum."""
        entries = [self.folder / _OWN]
        for log in ("offsets", "commits"):
            if (newest := self._newest(log)) is not None:
                entries.append(self.folder / log / str(newest))
        # Spark plans from the end of the last committed batch.
        if (done := self._newest("commits")) is not None:
            entries.append(self.folder / "offsets" / str(done))
        for entry in entries:
            if entry.is_file():
                _require_sound(entry)


def _damaged(entry: Path, why: str) -> DamagedError:
    return DamagedError(f"the checkpoint is damaged: {entry} {why}", fix=_AGAIN)


def _entries(store: StateStore) -> dict[int, str]:
    return {batch_id: text for batch_id, text in store.planned_batches().items() if batch_id != START_OF_STREAM}


def _put(entry: Path, text: str) -> None:
    # A checksum of an entry that was there before would not match.
    entry.with_name(f".{entry.name}.crc").unlink(missing_ok=True)
    atomic_file.replace_durably(entry, text.encode())


def _line(entry: Path) -> str:
    return _line_of(entry.read_text("utf-8"), entry)


def _line_of(text: str, entry: Path) -> str:
    """The offset in an entry: a version, metadata of the batch, then one line per source; there is one source."""
    try:
        version, _, line = text.rstrip("\n").split("\n")
    except ValueError:
        raise _damaged(entry, "holds no offset") from None
    if not version.startswith("v"):
        raise _damaged(entry, "holds no offset")
    return line


def _offset(entry: Path) -> Offset:
    try:
        offset = json.loads(_line(entry))
    except ValueError:
        raise _damaged(entry, "holds no offset") from None
    if not isinstance(offset, dict):
        raise _damaged(entry, "holds no offset")
    return offset


def _require_sound(entry: Path) -> None:
    content = entry.read_bytes()
    checksums = entry.with_name(f".{entry.name}.crc")
    if checksums.is_file() and not crc_file.fits(content, checksums.read_bytes()):
        raise _damaged(entry, "does not match its checksum")
    if entry.parent.name == "offsets":
        _offset(entry)
        return
    lines = content.split(b"\n")
    try:
        # Entries of a log begin with a version, such as `v1`.
        json.loads(lines[1] if entry.parent.name == "commits" else lines[0])
    except (ValueError, IndexError):
        raise _damaged(entry, "is not what Spark wrote") from None


def _as_stored(offset: Mapping[str, Any]) -> bytes:
    """An offset as Java stores it: an unpaired surrogate becomes a question mark."""
    return json.dumps(offset, sort_keys=True, ensure_ascii=False).encode("utf-8", "replace")
