"""The revisions of a served file: which pages changed in each, and old versions of pages, in a file next to it.

    page       for each page the revision that changed it last, and a digest to find changes made while no server ran
    old_page   a page as it was up to a revision, until the history is larger than its bound
    size       the size of the database in each revision that can still be given
    run        a tag for each run of a server that made revisions: a file and history that were put back from a copy
               make the same numbers again for other pages, but with another tag

The current pages are in the served file itself, so the history of a file that does not change takes no space. What
changed since a revision is always known; the bound limits only how long an old revision can be given page by page.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path

import apsw

from tailrace.sync.protobuf import PAGE_BYTES
from tailrace.sync.wal import WalState

_DIGEST_BYTES = 16
_LONGEST_NUMBER = 18
_SCHEMA = """
CREATE TABLE IF NOT EXISTS setting (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS page (number INTEGER PRIMARY KEY, revision INTEGER NOT NULL, digest BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS page_revision ON page (revision);
CREATE TABLE IF NOT EXISTS old_page (number INTEGER, upto INTEGER, data BLOB, PRIMARY KEY (number, upto)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS old_page_upto ON old_page (upto);
CREATE TABLE IF NOT EXISTS size (revision INTEGER PRIMARY KEY, pages INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS run (first INTEGER PRIMARY KEY, tag TEXT NOT NULL);
"""


def digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()


class PageHistory:
    """Used by one thread at a time. What `record` was given is durable when it returns."""

    def __init__(self, path: Path, bound_bytes: int) -> None:
        self._bound = bound_bytes
        self._connection = apsw.Connection(str(path))
        self._connection.set_busy_timeout(10_000)
        self._connection.execute("PRAGMA journal_mode = WAL")
        # If a revision could be lost in a power cut, its number would later stand for other pages.
        self._connection.execute("PRAGMA synchronous = FULL")
        with self._connection:
            self._connection.execute(_SCHEMA)
            if self._get("epoch") is None:
                self._set(epoch=uuid.uuid4().hex[:12], revision=0, floor=1, salt=b"", frames=0, checksum=b"", pages=0)
        self.epoch = str(self._get("epoch"))
        self.revision = self._number("revision")
        self.floor = self._number("floor")
        with self._connection:
            run = (self.revision + 1, uuid.uuid4().hex[:8])
            self._connection.execute("INSERT OR REPLACE INTO run VALUES (?, ?)", run)
        self.current = self.name(self.revision)

    def close(self) -> None:
        self._connection.close()

    @property
    def recorded(self) -> WalState:
        """The state of the log that the last revision contains."""
        salt, checksum = self._get("salt"), self._get("checksum")
        assert isinstance(salt, bytes)
        assert isinstance(checksum, bytes)
        return WalState(salt, self._number("frames"), checksum, self._number("pages"))

    def digests(self) -> dict[int, bytes]:
        return dict(self._connection.execute("SELECT number, digest FROM page"))

    def record(self, state: WalState, pages: Mapping[int, bytes], old: Iterable[tuple[int, bytes]] | None) -> bool:
        """Make a revision of the pages that differ from the last one; False if none does.

        `old` has these pages as they were; None if no one knows, and then older revisions can no longer be given.
        """
        with self._connection:
            known = self._known(pages)
            changed = {number: new for number, new in pages.items() if known.get(number) != new}
            is_new = bool(changed) or state.pages != self._number("pages") or not self.revision
            revision = self.revision + is_new
            self._connection.executemany(
                "INSERT OR REPLACE INTO page VALUES (?, ?, ?)",
                ((number, revision, new) for number, new in changed.items()),
            )
            floor = self.floor
            if is_new:
                if old is None:
                    self._connection.execute("DELETE FROM old_page; DELETE FROM size")
                    floor = revision
                else:
                    self._connection.executemany(
                        "INSERT OR IGNORE INTO old_page VALUES (?, ?, ?)",
                        (
                            (number, self.revision, data)
                            for number, data in old
                            if number in changed or number >= state.pages
                        ),
                    )
                self._connection.execute("DELETE FROM page WHERE number >= ?", (state.pages,))
                self._connection.execute("INSERT OR REPLACE INTO size VALUES (?, ?)", (revision, state.pages))
            self._set(
                revision=revision, floor=floor, salt=state.salt, frames=state.frames, checksum=state.checksum,
                pages=state.pages,
            )  # fmt: skip
        self.revision, self.floor = revision, floor
        self.current = self.name(revision)
        return is_new

    def prune(self, needed: int) -> None:
        """Delete old pages beyond the bound, but up to twice the bound none that the revision `needed` consists of."""
        (count,) = next(self._connection.execute("SELECT count(*) FROM old_page"))
        excess = count - self._bound // PAGE_BYTES
        if excess <= 0:
            return
        sql = "SELECT upto FROM old_page ORDER BY upto LIMIT 1 OFFSET ?"
        (last,) = next(self._connection.execute(sql, (excess - 1,)))
        floor = last + 1 if excess > self._bound // PAGE_BYTES else min(last + 1, needed)
        if floor <= self.floor:
            return
        with self._connection:
            self._connection.execute("DELETE FROM old_page WHERE upto < ?", (floor,))
            self._connection.execute("DELETE FROM size WHERE revision < ?", (floor,))
            self._set(floor=floor)
        self.floor = floor

    def name(self, revision: int) -> str:
        """The name of a revision, by which clients know it."""
        sql = "SELECT tag FROM run WHERE first <= ? ORDER BY first DESC LIMIT 1"
        (tag,) = next(self._connection.execute(sql, (revision,)), ("",))
        return f"{self.epoch}:{revision}:{tag}"

    def find(self, name: str) -> int | None:
        """The number of a revision; None for one that was made from other pages, or for no name at all."""
        _, _, rest = name.partition(":")
        text, _, _ = rest.partition(":")
        if not (text.isascii() and text.isdigit() and len(text) < _LONGEST_NUMBER):
            return None
        number = int(text)
        return number if number <= self.revision and self.name(number) == name else None

    def size_at(self, revision: int) -> int:
        (pages,) = next(self._connection.execute("SELECT pages FROM size WHERE revision = ?", (revision,)))
        return int(pages)

    def changed_since(self, revision: int, upto: int, pages: int) -> list[int]:
        """The pages below `pages` that may differ between two revisions, in order."""
        # A page that changed after `upto` may have changed before it as well.
        sql = (
            "SELECT number FROM page WHERE revision > ? AND number < ? UNION "
            "SELECT number FROM old_page WHERE upto >= ? AND number < ? ORDER BY 1"
        )
        return [number for (number,) in self._connection.execute(sql, (revision, pages, upto, pages))]

    def old_pages(self, revision: int, first: int, last: int) -> dict[int, bytes]:
        """Of the pages first..last, those that changed after `revision`, as they were in it."""
        sql = "SELECT number, min(upto), data FROM old_page WHERE number BETWEEN ? AND ? AND upto >= ? GROUP BY number"
        return {number: data for number, _, data in self._connection.execute(sql, (first, last, revision))}

    def _known(self, pages: Mapping[int, bytes]) -> dict[int, bytes]:
        if len(pages) > 1000:
            return self.digests()
        sql = "SELECT digest FROM page WHERE number = ?"
        found = ((number, next(self._connection.execute(sql, (number,)), None)) for number in pages)
        return {number: row[0] for number, row in found if row is not None}

    def _get(self, name: str) -> object:
        row = next(self._connection.execute("SELECT value FROM setting WHERE name = ?", (name,)), None)
        return None if row is None else row[0]

    def _number(self, name: str) -> int:
        value = self._get(name)
        assert isinstance(value, int)
        return value

    def _set(self, **values: object) -> None:
        self._connection.executemany("INSERT OR REPLACE INTO setting VALUES (?, ?)", list(values.items()))
