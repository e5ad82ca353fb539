"""Polling without Spark: one process that reads changes as they arrive, and commits once they are applied.

with PollConsumer(source, FileWatermarks(Path("shop.watermark"))) as consumer:
    while True:
        for changes in consumer.poll():
            apply(changes)
        consumer.commit()
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from tailrace.errors import DamagedError, TailraceError
from tailrace.model.change import Changes
from tailrace.source.follower import Follower, Limit, Offset, TableDirectives
from tailrace.source.poll.offset import PollOffset
from tailrace.source.poll.source import PollSource
from tailrace.source.schema_file import follow_alone
from tailrace.system.atomic_file import creating

# Where a consumer stores how far it has polled. A pipeline does not need this: Spark stores its offsets.


class WatermarkStore(Protocol):
    """The watermarks of all tables of one source, saved after the changes up to them were applied, never before."""

    def load(self, of: str) -> Offset | None:
        """The last saved watermarks of the source of this name; None if there are none.

        Raises DamagedError for watermarks that cannot be read or belong to another source.
        """
        ...

    def save(self, of: str, offset: Offset) -> None:
        """Replace the saved watermarks. Durable when this returns, if the store is durable."""
        ...


class MemoryWatermarks:
    """Watermarks in memory: the next process copies every table again."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def load(self, of: str) -> Offset | None:
        return json.loads(self._texts[of]) if of in self._texts else None

    def save(self, of: str, offset: Offset) -> None:
        self._texts[of] = json.dumps(offset)


@dataclass(frozen=True)
class FileWatermarks:
    """Watermarks in a file that is replaced atomically, with a checksum."""

    path: Path

    def load(self, of: str) -> Offset | None:
        if not self.path.exists():
            return None
        try:
            raw = json.loads(self.path.read_text())
            text, check, owner = raw["offset"], raw["check"], raw["of"]
            offset = json.loads(text) if zlib.crc32(text.encode()) == check else None
        except (ValueError, KeyError, TypeError, AttributeError):
            offset = None
        if offset is None:
            raise self._unfit("cannot be read: it does not match its checksum")
        if owner != of:
            raise self._unfit(f"belongs to the source {owner}, not to {of}")
        assert isinstance(offset, dict)
        return offset

    def _unfit(self, what: str) -> DamagedError:
        fix = "restore the file; or delete it, or set on_bad_watermark to permissive: every table is copied again then"
        return DamagedError(f"the stored watermark {self.path} {what}", fix=fix)

    def save(self, of: str, offset: Offset) -> None:
        text = json.dumps(offset)
        with creating(self.path) as file:
            file.write(json.dumps({"of": of, "check": zlib.crc32(text.encode()), "offset": text}).encode())


log = logging.getLogger(__name__)

LIMIT = Limit(rows=1_000_000, bytes=1 << 30)


class PollConsumer:
    """Delivers every change at least once. For one thread: two consumers would overwrite each other's watermarks."""

    def __init__(self, source: PollSource, store: WatermarkStore, limit: Limit = LIMIT) -> None:
        self._source = source
        self._store = store
        self._limit = limit
        self._follower: Follower | None = None
        self._offset: Offset = {}
        self._planned: Offset | None = None
        self._given = False

    def __enter__(self) -> Self:
        """Continue after the stored watermark. Raises DamagedError if it is unusable, unless the source rewinds it."""
        self._offset = self._load()
        self._follower = follow_alone(self._source)
        return self

    def __exit__(self, *_: object) -> None:
        if self._follower is not None:
            self._follower.stop()
            self._follower = None

    def _load(self) -> Offset:
        start: Offset | None = None
        try:
            start = self._store.load(self._source.context.name)
        except DamagedError as error:
            if self._source.options.on_bad_watermark == "strict":
                raise
            log.warning("every table is copied again: %s", error.message)
        return start if start is not None else PollOffset().to_json()

    def poll(self) -> Iterator[Changes]:
        """New rows and changes of the tables that are due; rows of a copy have the operation `read`. Empty when none is
        due.

        Until `commit` is called, every call returns the same, except for rows that changed meanwhile. Raises TableError
        for a table that cannot continue, UnavailableError while the database does not answer. Both can be retried,
        which checks the tables again.
        """
        assert self._follower is not None
        self._given = False
        if self._planned is None:
            end = self._follower.latest(self._offset, self._limit, TableDirectives())
            if end == self._offset:
                return
            self._planned = end
        try:
            for split in self._follower.plan(self._offset, self._planned):
                yield from self._source.read(split)
        except TailraceError:
            self._planned = None
            raise
        self._given = True

    def commit(self) -> None:
        """Confirm that everything `poll` returned is applied: advances the watermark, if there was anything new.

        Raises RuntimeError when `poll` was not read to its end: the rest would be lost.
        """
        if self._planned is None:
            return
        if not self._given:
            raise RuntimeError("poll() was not read to its end; read it again, then commit")
        self._store.save(self._source.context.name, self._planned)
        self._offset, self._planned = self._planned, None
        self._source.release(self._offset)
