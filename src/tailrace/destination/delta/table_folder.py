"""The folder of a table: `<root>/<schema>/<table>`, for any name a database allows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import IO, Any, ClassVar

from tailrace.destination.lake.folder_name import encode
from tailrace.model.schema import TableName

LOG = "_delta_log"
OWN = "_tailrace"
"""The folder in a table's directory for tailrace's own notes. Readers of Delta and vacuums ignore it."""
VECTORS = "_dv"
"""The folder of deletion vectors: vacuums of others leave a folder alone that begins with an underscore."""

PathStamp = tuple[int | str, ...]
"""What changes when a file or folder does: compared, never read."""


def folder_of(table: TableName) -> str:
    """Where a table is below the root of the lake."""
    return f"{encode(table.schema)}/{encode(table.name)}"


@dataclass(frozen=True)
class TablePath(ABC):
    """A table's directory: what delta-rs opens (`uri`, with `options`), and the files in it, by their path there.

    `base` is the folder on a local disk, empty for an object store.
    """

    is_local: ClassVar[bool]
    uri: str
    base: str = ""
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    table: str = ""

    # -- reading

    @abstractmethod
    def is_file(self) -> bool:
        """Whether a file is where the directory should be."""

    @abstractmethod
    def names(self, folder: str = "") -> list[str]:
        """The entries of the directory itself, or of a folder in it; empty when it does not exist."""

    @abstractmethod
    def names_below(self, folder: str) -> list[str]:
        """The names of all files in a folder of the directory and in those within it."""

    @abstractmethod
    def entries(self, folder: str = "") -> dict[str, float]:
        """The files in the directory itself, or in a folder of it, and when each was written, in seconds since 1970."""

    @abstractmethod
    def data_files(self) -> dict[str, float]:
        """All Parquet files of the table, by their path in the directory, and when each was written."""

    @abstractmethod
    def dead_bytes(self, alive: int) -> int:
        """How many bytes the table's files take beyond its current version; 0 where finding out is expensive."""

    @abstractmethod
    def stamp(self, name: str) -> PathStamp | None:
        """A value that changes when a file or folder does; None when it is not there."""

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """All bytes of a file; None when it is not there."""

    def read_stamped(self, name: str) -> tuple[bytes, PathStamp | None] | None:
        """All bytes of a file that never changes, and its stamp; None when it is not there."""
        body = self.read(name)
        return None if body is None else (body, self.stamp(name))

    @abstractmethod
    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """Bytes of a file; fewer where it ends before. Raises FileNotFoundError when it is not there."""

    @abstractmethod
    def open(self, name: str, size: int | None = None) -> Any:
        """A file of the table, for reading at random. A `size` that is known spares a request for it."""

    @abstractmethod
    def missing(self, names: Sequence[str]) -> list[str]:
        """Those of the table's files that are not there."""

    # -- writing

    @abstractmethod
    def make(self, folder: str = "") -> None:
        """Create the directory, or a folder in it, where that is necessary."""

    @abstractmethod
    def put_new(self, name: str, body: bytes) -> PathStamp | None:
        """Make a file whole, durable and at once visible. Raises FileExistsError when it is there already.

        Returns its stamp, where that is known without looking again.
        """

    @abstractmethod
    def creating(self, name: str) -> AbstractContextManager[IO[bytes] | Any]:
        """A new file, durable when the block ends; an error inside the block leaves no file."""

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """Delete files of the table; nothing happens for one that is not there."""

    @abstractmethod
    def sync(self, *folders: str) -> None:
        """Make the directory's entries durable, and those of the named folders in it."""

    @abstractmethod
    def sync_file(self, name: str) -> None:
        """Make a file's bytes durable, if it is there."""

    # -- notes

    @abstractmethod
    def note(self, name: str, text: str) -> None:
        """Store a small text under this name, durably and atomically. It replaces an earlier one."""

    def notes(self) -> list[str]:
        """The names of all notes."""
        return sorted(self.entries(OWN))

    def noted(self, name: str) -> str | None:
        """The text kept under a name; None when there is none."""
        found = self.read(f"{OWN}/{name}")
        return None if found is None else found.decode()

    def forget(self, names: Sequence[str]) -> None:
        """Drop notes durably; nothing happens for one that is not there."""
        self.delete([f"{OWN}/{name}" for name in names])
        if names:
            self.sync(OWN)


def is_data(path: str) -> bool:
    """Whether a path in the table's directory may be that of a data file."""
    folder, _, name = path.rpartition("/")
    return name.endswith(".parquet") and name[:1] not in ("_", ".") and folder[:1] not in ("_", ".")
