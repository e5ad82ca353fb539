"""Which WAL files there are, asked of the object store itself: the cheap way to wait for the next one.

SlateDB's own look for the end of the WAL takes eleven requests. Whether the next file is there takes one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from typing import NamedTuple

from tailrace.source.slatedb.object_store import SlateDbDatabase
from tailrace.source.slatedb.wal import find_tail

LOOK_SECONDS = 10.0
"""How often SlateDB itself is asked while no file appears: only that shows whether the next file was deleted."""
_STEPS = 8
"""How many new files are asked for one by one before SlateDB is asked where the WAL ends."""


class WalObject(NamedTuple):
    """A WAL file as the store lists it."""

    number: int
    bytes: int
    modified: datetime | None = None


class WalObjects:
    """The WAL files of a database as objects."""

    def __init__(self, database: SlateDbDatabase) -> None:
        self._store = database.wal_store or database.store
        self._folder = f"{database.path.strip('/')}/wal/"

    def has(self, number: int) -> bool:
        """Whether there is a file with this number: one request. True also where only SlateDB can answer."""
        return self._store.has(self._path(number))

    def list(self, start: int, end: int | None = None) -> Iterator[WalObject]:
        """The files of these numbers, `end` excluded, in their order. One request for each thousand or so."""
        found = []
        for path, size, modified in self._store.list(self._folder, self._path(start - 1) if start > 0 else None):
            stem, _, ending = path.rsplit("/", 1)[-1].partition(".")
            if ending == "sst" and stem.isdigit():
                found.append(WalObject(int(stem), size, modified))
        return (one for one in sorted(found) if one.number >= start and (end is None or one.number < end))

    def _path(self, number: int) -> str:
        return f"{self._folder}{number:020}.sst"


class WalTail:
    """Finds the end of the WAL, again and again, for one reader."""

    def __init__(self, database: SlateDbDatabase) -> None:
        self._database = database
        self._objects = WalObjects(database)
        self._known = -1
        self._looked = 0.0

    def find(self, after: int) -> int:
        """The number of the last file, from `after` on. One request while there is no new one.

        Raises CollectedError when the one after `after` was deleted, at the latest after ten seconds.
        """
        if after == self._known and time.monotonic() - self._looked < LOOK_SECONDS:
            for number in range(after + 1, after + 1 + _STEPS):
                if not self._objects.has(number):
                    self._known = number - 1
                    return number - 1
        tail = find_tail(self._database, after)
        self._known, self._looked = tail, time.monotonic()
        return tail
