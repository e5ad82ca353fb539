"""The folder of a changelog: on a disk, or in an object store. Files are written whole and durably."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import obstore

from tailrace.errors import UnavailableError
from tailrace.system import object_store
from tailrace.system.atomic_file import make_folder, move_new, replace_durably, sync


class ChangelogFolder(ABC):
    """Names have slashes, as in an object store."""

    @abstractmethod
    def put(self, name: str, body: bytes | memoryview) -> None:
        """Write a file, in place of an earlier one."""

    @abstractmethod
    def put_new(self, name: str, body: bytes) -> None:
        """Write a file where there is none. Raises FileExistsError."""

    @abstractmethod
    def get(self, name: str) -> bytes | None:
        """A file's content; None when there is none."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is such a file."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """The names of the files in a folder itself, in order."""

    @abstractmethod
    def folders(self, folder: str) -> list[str]:
        """The names of the folders in a folder."""


def open_folder(path: str, options: Mapping[str, str]) -> ChangelogFolder:
    """`options` are storage options, for an object store."""
    if "://" in path and not path.startswith("file://"):
        return _ObjectFolder(path.rstrip("/"), options)
    return _LocalFolder(Path(path.removeprefix("file://")))


@dataclass(frozen=True)
class _LocalFolder(ChangelogFolder):
    root: Path

    def put(self, name: str, body: bytes | memoryview) -> None:
        file = self.root / name
        make_folder(file.parent)
        replace_durably(file, bytes(body))

    def put_new(self, name: str, body: bytes) -> None:
        file = self.root / name
        make_folder(file.parent)
        draft = file.with_name(f".{file.name}.new")
        replace_durably(draft, body)
        try:
            move_new(draft, file)
        finally:
            draft.unlink(missing_ok=True)
        sync(file.parent)

    def get(self, name: str) -> bytes | None:
        try:
            return (self.root / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def has(self, name: str) -> bool:
        return (self.root / name).is_file()

    def names(self, folder: str) -> list[str]:
        with suppress(FileNotFoundError, NotADirectoryError):
            return sorted(one.name for one in (self.root / folder).iterdir() if one.is_file() and one.name[0] != ".")
        return []

    def folders(self, folder: str) -> list[str]:
        with suppress(FileNotFoundError, NotADirectoryError):
            return sorted(one.name for one in (self.root / folder).iterdir() if one.is_dir())
        return []


@dataclass(frozen=True)
class _ObjectFolder(ChangelogFolder):
    uri: str
    options: Mapping[str, str] = field(repr=False, compare=False)

    @property
    def _store(self) -> Any:
        return object_store.open_store(self.uri, self.options)

    def put(self, name: str, body: bytes | memoryview) -> None:
        with object_store.reached(self.uri):
            obstore.put(self._store, name, bytes(body))

    def put_new(self, name: str, body: bytes) -> None:
        try:
            object_store.put_new(self.uri, self.options, name, body)
        except FileExistsError:
            raise
        except OSError as error:
            raise UnavailableError(f"cannot write to {self.uri}", fix="check the store; tailrace retries") from error

    def get(self, name: str) -> bytes | None:
        try:
            with object_store.reached(self.uri, may_lack=True):
                return bytes(obstore.get(self._store, name).bytes())
        except FileNotFoundError:
            return None

    def has(self, name: str) -> bool:
        try:
            with object_store.reached(self.uri, may_lack=True):
                obstore.head(self._store, name)
        except FileNotFoundError:
            return False
        return True

    def names(self, folder: str) -> list[str]:
        with object_store.reached(self.uri):
            found = obstore.list_with_delimiter(self._store, folder)
        return sorted(one["path"].rsplit("/", 1)[-1] for one in found["objects"])

    def folders(self, folder: str) -> list[str]:
        with object_store.reached(self.uri):
            found = obstore.list_with_delimiter(self._store, folder)
        return sorted(one.rstrip("/").rsplit("/", 1)[-1] for one in found["common_prefixes"])
