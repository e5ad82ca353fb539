"""What a journal needs of the place it is in: `LocalStorage` is a folder, `ObjectStorage` a prefix in a store.

A segment in a folder grows: appends are written to its end and synced. An object is put once and never changes: there
each append is a segment of its own, a *piece*. Both have the same bytes, so that everything else is the same code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from tailrace.errors import Finding
from tailrace.journal.segment import SegmentHeader

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class ObjectPlace:
    """A journal in an object store: the URL of a prefix, and the store's options, which never show in a repr."""

    url: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return self.url


JournalPlace = str | Path | ObjectPlace
"""Where a journal is: a folder, as a path or a file:// URL, or a prefix in an object store."""


@dataclass(frozen=True)
class Pace:
    """How often a storage should be asked for something, because each request costs time and money.

    Appends closer together than `append_seconds` should be joined into one, up to `append_bytes`; notes come at least
    `note_seconds` apart; retention and cursors are looked at every `upkeep_seconds`.
    """

    append_seconds: float = 0.0
    append_bytes: int = 0
    note_seconds: float = 0.0
    upkeep_seconds: float = 0.0


class SegmentBytes(Protocol):
    """The bytes of one segment, for reading."""

    size: int

    def read(self, length: int, offset: int) -> bytes:
        """Up to `length` bytes from `offset` on; fewer only at the end."""
        ...


class SegmentSink(Protocol):
    """The writer's way to new segments. Only the holder of the journal's lock has one."""

    is_fenced: bool
    """Whether another writer has taken over."""

    def create(self, name: str, content: Sequence[Buffer]) -> int | None:
        """Make a segment that begins with these bytes: durable on return, there as a whole or not at all.

        Returns None; or the size of what an earlier try of this writer, whose answer was lost, has stored under this
        name: then use the next one. Raises OwnedError when another writer has taken it.
        """
        ...

    def append(self, pieces: list[Buffer], offset: int) -> None:
        """Write at `offset`, the end of the newest segment. Durable on return."""
        ...

    def renew(self) -> None:
        """Keep the lock while there is nothing to write. Raises OwnedError when another writer has taken it."""
        ...

    def close(self) -> None:
        """Release what is open, and the lock. A repeat does nothing."""
        ...


class JournalStorage(ABC):
    """The files or objects of one journal. `str()` of it is what people are shown.

    Methods raise FileNotFoundError for a segment that is not there, OSError for a disk that fails, UnavailableError for
    an object store that does not answer.
    """

    grows: bool
    """Whether a segment can be appended to; otherwise each append is a segment of its own."""
    pace: Pace

    @abstractmethod
    def names(self) -> list[str]:
        """The names of all segments, oldest first. A listing: not for a hot path."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """The bytes of each segment, by name, oldest first."""

    @abstractmethod
    def open(self, name: str) -> AbstractContextManager[SegmentBytes]: ...

    @abstractmethod
    def read_range(self, name: str, offset: int, length: int) -> memoryview | None:
        """These bytes of a segment, in memory aligned to 8 bytes; None if it ends before them."""

    @abstractmethod
    def headers(self, names: Sequence[str]) -> dict[str, SegmentHeader | None]:
        """The headers of segments; None for one that is damaged. A segment that is no longer there is left out."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Delete one segment, durable on return. A missing one is no error."""

    @abstractmethod
    def sync(self, name: str) -> None:
        """Make sure that all bytes of a segment that can be read are durable."""

    @abstractmethod
    def set_aside(self, name: str, *, keeps: bool) -> None:
        """Copy a damaged segment to quarantine; unless the journal `keeps` it, move it there. A repeat is no error."""

    @abstractmethod
    def names_aside(self) -> list[str]:
        """The names of segments in quarantine."""

    @abstractmethod
    def load(self, name: str) -> bytes | None:
        """The content of a small file; None if there is none."""

    @abstractmethod
    def replace(self, name: str, content: bytes) -> None:
        """Replace a small file atomically; durable on return."""

    @abstractmethod
    def drop(self, name: str) -> None:
        """Delete a small file. A missing one is no error."""

    @abstractmethod
    def small_files(self, folder: str, suffix: str) -> list[str]:
        """The names of small files in a folder of the journal, each with the folder's name."""

    @abstractmethod
    def acquire(self) -> SegmentSink:
        """Take the writer's lock. Raises OwnedError while another process writes."""

    @abstractmethod
    def is_written(self) -> bool: ...

    @abstractmethod
    def removing(self) -> AbstractContextManager[None]:
        """Hold the lock during the block, then remove everything. If the block fails, everything stays."""


def open_storage(place: JournalPlace) -> JournalStorage:
    """The storage at a place. Touches nothing."""
    if isinstance(place, ObjectPlace):
        from tailrace.journal.object_storage import ObjectStorage

        return ObjectStorage(place)
    from tailrace.journal.local_storage import LocalStorage

    if isinstance(place, str) and place.startswith("file://"):
        place = unquote(urlsplit(place).path)
    return LocalStorage(Path(place))


def check_journal(place: JournalPlace) -> list[Finding]:
    """Findings about the place of a journal: whether an object store can keep two receivers apart.

    Leaves nothing there. Raises UnavailableError when the store does not answer, ConfigError when its options cannot
    be used.
    """
    if not isinstance(place, ObjectPlace):
        return []
    from tailrace.system.object_store import probe_conditional_put

    return [replace(probe_conditional_put(place.url, place.options), subject="journal")]
