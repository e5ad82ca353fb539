"""The log of a changelog: one entry for each batch, and the versions of tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Literal
from urllib.parse import quote, unquote

from tailrace.changelog.folder import ChangelogFolder
from tailrace.errors import LostError
from tailrace.model.schema import TableName, TableSchema

FORMAT = 1
LOG = "_tailrace/log"
TABLES = "_tailrace/tables"


@dataclass(frozen=True)
class ChangeFile:
    """A file of an entry. `version` is that of its table, by which its columns are found."""

    path: str
    table: str
    version: int
    rows: int
    kind: Literal["copy", "log"]


@dataclass(frozen=True)
class ChangelogEntry:
    """A batch in a changelog.

    pipeline, mark   what wrote it, as a destination stores it to know the batch again
    begins           tables whose copy begins: their earlier rows are gone before these files
    first, last      positions of the first and last change of the upstream's log in it, as texts; None without any
    last_at          the time of the last commit in it, or of writing where the upstream gives none
    """

    number: int
    pipeline: str
    mark: str
    written_at: str
    last_at: str
    files: list[ChangeFile] = field(default_factory=list)
    begins: list[str] = field(default_factory=list)
    first: str | None = None
    last: str | None = None

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    def to_json(self) -> bytes:
        return json.dumps({"format": FORMAT, **asdict(self)}, ensure_ascii=False, indent=1).encode()

    @classmethod
    def from_json(cls, body: bytes) -> ChangelogEntry:
        raw = json.loads(body)
        if raw.pop("format") != FORMAT:
            raise LostError("the changelog was written by a newer tailrace", fix="update tailrace here")
        return cls(**{**raw, "files": [ChangeFile(**file) for file in raw["files"]]})


_VERSION_BITS = 16


def entry_of_version(version: int) -> int:
    """The number of the entry that brought a version of a table; there may be several of one entry."""
    return version >> _VERSION_BITS


def name_of(number: int) -> str:
    return f"{number:020}.json"


class ChangelogLog:
    """The entries of one changelog, as one process sees them. Keeps no handle open."""

    def __init__(self, folder: ChangelogFolder) -> None:
        self.folder = folder
        self._last = 0
        self._newest: dict[TableName, tuple[int, TableSchema]] = {}

    def last(self) -> int:
        """The number of the newest entry, 0 before the first. Cheap once it was asked."""
        if not self._last:
            names = self.folder.names(LOG)
            self._last = int(names[-1].removesuffix(".json")) if names else 0
            return self._last
        while self.folder.has(f"{LOG}/{name_of(self._last + 1)}"):
            self._last += 1
        return self._last

    def entry(self, number: int) -> ChangelogEntry:
        """Raises LostError when it is not there: entries are never deleted."""
        return _entry(self.folder, number)

    def add(self, entry: ChangelogEntry) -> None:
        """Commit a batch. Raises FileExistsError when its number is taken."""
        self.folder.put_new(f"{LOG}/{name_of(entry.number)}", entry.to_json())
        self._last = entry.number

    def find_time(self, at: datetime) -> int:
        """The number of the first entry that may hold a change committed at this time or later."""
        low, high = 1, self.last() + 1
        while low < high:
            middle = (low + high) // 2
            if datetime.fromisoformat(self.entry(middle).last_at) < at:
                low = middle + 1
            else:
                high = middle
        return low

    # -- versions of tables -------------------------------------------------------------------------------

    def versions(self, table: TableName) -> Mapping[int, TableSchema]:
        """The versions of a table, those that came later with a higher number."""
        folder = _table_folder(table)
        numbers = [int(name.removesuffix(".json")) for name in self.folder.names(folder)]
        return {number: _version(self.folder, table, number) for number in numbers}

    def version(self, table: TableName, version: int) -> TableSchema:
        return _version(self.folder, table, version)

    def version_for(self, table: TableSchema, number: int) -> int:
        """The version of a table with these columns. A new one is stored, from this entry on."""
        name = table.table
        if name not in self._newest:
            known = self.versions(name)
            self._newest[name] = (max(known), known[max(known)]) if known else (0, table)
        found, newest = self._newest[name]
        if found and newest == table:
            return found
        if entry_of_version(found) > number:
            raise LostError("the log of the changelog was put back to an earlier copy", fix="put its last copy back")
        # A batch that is done again finds those that it stored before.
        stored = [one for one, columns in self.versions(name).items() if columns == table]
        version = next((one for one in stored if entry_of_version(one) == number), 0)
        if not version:
            version = max(number << _VERSION_BITS, found + 1)
            self.folder.put(f"{_table_folder(name)}/{name_of(version)}", table.to_json().encode())
        self._newest[name] = version, table
        return version

    def tables(self) -> Iterator[TableName]:
        for name in self.folder.folders(TABLES):
            yield TableName.parse(unquote(name))


def _table_folder(table: TableName) -> str:
    return f"{TABLES}/{quote(str(table), safe='')}"


@lru_cache(maxsize=512)
def _entry(folder: ChangelogFolder, number: int) -> ChangelogEntry:
    body = folder.get(f"{LOG}/{name_of(number)}")
    if body is None:
        raise LostError(f"entry {number} of the changelog is missing", fix="restore the folder from a backup")
    return ChangelogEntry.from_json(body)


@lru_cache(maxsize=4096)
def _version(folder: ChangelogFolder, table: TableName, number: int) -> TableSchema:
    body = folder.get(f"{_table_folder(table)}/{name_of(number)}")
    if body is None:
        raise LostError(f"a version of {table} is missing from the changelog", fix="restore the folder from a backup")
    return TableSchema.from_json(body)


def paths(entry: ChangelogEntry, table: str) -> Sequence[ChangeFile]:
    return [file for file in entry.files if file.table == table]
