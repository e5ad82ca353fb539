"""The folder of a table: `<root>/<schema>/<table>`, for any name a database allows."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
from deltalake.exceptions import DeltaError
from deltalake.fs import DeltaStorageHandler
from pyarrow import fs as arrow_fs

from tailrace.destination.lake.folder_name import encode
from tailrace.errors import PreflightError
from tailrace.model.schema import TableName
from tailrace.system import atomic_file, failpoint, object_store

LOG = "_delta_log"
OWN = "_tailrace"
"""The folder in a table's directory for tailrace's own notes. Readers of Delta and vacuums ignore it."""
VECTORS = "_dv"
"""The folder of deletion vectors: vacuums of others leave a folder alone that begins with an underscore."""

FileStamp = tuple[int, ...]
"""What changes when a file or folder does: compared, never read."""


class _ByteSink:
    """A file of delta-rs to write to. Arrow hands over its own buffers, of which delta-rs takes only bytes."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> Any:
        return self._file.write(bytes(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _Store(DeltaStorageHandler):
    def open_output_stream(self, path: str, metadata: dict[str, str] | None = None) -> pa.PythonFile:
        return pa.PythonFile(_ByteSink(self._handler.open_output_stream(path, metadata)), mode="w")


def _open_store(uri: str, options: Mapping[str, str]) -> DeltaStorageHandler:
    try:
        return _Store(uri, dict(options))
    except (DeltaError, OSError) as error:
        # Its text may quote the options, and with them keys to the store.
        raise PreflightError(
            f"delta-rs knows no store for {uri}", fix="correct path and storage_options of the destination"
        ) from error


def _written(info: arrow_fs.FileInfo) -> float:
    return (info.mtime_ns or 0) / 1e9


@dataclass(frozen=True)
class TablePath:
    """A table's directory: what delta-rs opens (`uri`) and where its files are (`base` on `files`)."""

    uri: str
    base: str
    files: arrow_fs.FileSystem
    is_local: bool
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    table: str = ""

    @classmethod
    def of(cls, root: str, table: TableName, options: Mapping[str, str]) -> TablePath:
        """`options` are delta-rs's storage options, for an object store."""
        tail = f"{encode(table.schema)}/{encode(table.name)}"
        if "://" in root and not root.startswith("file://"):
            uri = f"{root.rstrip('/')}/{tail}"
            return cls(uri, "", arrow_fs.PyFileSystem(_open_store(uri, options)), False, options, str(table))
        base = str(Path(root.removeprefix("file://")).absolute() / tail)
        return cls(base, base, arrow_fs.LocalFileSystem(), True, options, str(table))

    def make(self, folder: str = "") -> None:
        if self.is_local:
            atomic_file.make_folder(Path(self.base, folder))

    def is_file(self) -> bool:
        return self.is_local and Path(self.base).is_file()

    def names(self, folder: str = "") -> list[str]:
        """The entries of the directory itself, or of a folder in it; empty when it does not exist."""
        selector = arrow_fs.FileSelector(self._in(folder), allow_not_found=True)
        return [info.base_name for info in self.files.get_file_info(selector)]

    def stamp(self, *names: str) -> FileStamp | None:
        """A value that changes when one of these files or folders does; None when one is not there."""
        found: list[int] = []
        if self.is_local:
            for name in names:
                try:
                    status = Path(self.base, name).stat()
                except (FileNotFoundError, NotADirectoryError):
                    return None
                found += [status.st_ino, status.st_mtime_ns, status.st_size]
            return tuple(found)
        for info in self.files.get_file_info([self._in(name) for name in names]):
            if not info.is_file:
                return None
            found += [info.mtime_ns or 0, info.size or 0]
        return tuple(found)

    def read(self, name: str) -> bytes | None:
        """All bytes of a file; None when it is not there."""
        try:
            with self.files.open_input_stream(self._in(name)) as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            return None

    def put_new(self, name: str, body: bytes) -> None:
        """Make a file whole, durable and at once visible. Raises FileExistsError when it is there already."""
        if not self.is_local:
            object_store.put_new(self.uri, self.options, name, body)
            return
        path = Path(self.base, name)
        draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            with draft.open("xb") as file:
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            atomic_file.move_new(draft, path)
            failpoint.reach("delta.before_sync")
        finally:
            draft.unlink(missing_ok=True)
        atomic_file.sync(path.parent)

    def names_below(self, folder: str) -> list[str]:
        """The names of all files in a folder of the directory and in those within it."""
        selector = arrow_fs.FileSelector(self._in(folder), recursive=True)
        return [info.base_name for info in self.files.get_file_info(selector) if info.is_file]

    def entries(self, folder: str = "") -> dict[str, float]:
        """The files in the directory itself, or in a folder of it, and when each was written, in seconds since 1970."""
        selector = arrow_fs.FileSelector(self._in(folder), allow_not_found=True)
        return {info.base_name: _written(info) for info in self.files.get_file_info(selector) if info.is_file}

    def data_files(self) -> dict[str, float]:
        """All Parquet files of the table, by their path in the directory, and when each was written."""
        found: dict[str, float] = {}
        top = self.files.get_file_info(arrow_fs.FileSelector(self._in(""), allow_not_found=True))
        for info in top:
            # Folders with such a name hold no data, but may hold many files.
            inner = info.base_name[:1] not in ("_", ".") and not info.is_file
            selector = arrow_fs.FileSelector(info.path, recursive=True)
            for one in self.files.get_file_info(selector) if inner else [info]:
                if one.is_file and one.base_name.endswith(".parquet") and one.base_name[:1] not in ("_", "."):
                    found[one.path.removeprefix(f"{self.base}/") if self.base else one.path] = _written(one)
        return found

    def dead_bytes(self, alive: int) -> int:
        """How many bytes the table's files take beyond its current version; 0 where finding out is expensive."""
        if not self.is_local:
            return 0
        patterns = ("part-*.parquet", "*=*/**/part-*.parquet", f"{VECTORS}/*.bin")
        return sum(path.stat().st_size for pattern in patterns for path in Path(self.base).glob(pattern)) - alive

    def open(self, name: str) -> Any:
        """A file of the table, for reading at random."""
        if self.is_local:
            return f"{self.base}/{name}"
        return self.files.open_input_file(name)

    @contextmanager
    def creating(self, name: str) -> Iterator[IO[bytes] | Any]:
        """A new file, durable when the block ends; an error inside the block leaves no file."""
        if not self.is_local:
            with self.files.open_output_stream(name) as stream:
                yield stream
            return
        path = Path(self.base, name)
        # From the file's folder up to the one below the table's, which `sync` makes durable.
        folders = [parent for parent in path.parents if parent.is_relative_to(self.base) and parent != Path(self.base)]
        for folder in reversed(folders):
            folder.mkdir(exist_ok=True)
        try:
            with path.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            for folder in folders:
                atomic_file.sync(folder)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def note(self, name: str, text: str) -> None:
        """Store a small text under this name, durably and atomically. It replaces an earlier one."""
        if not self.is_local:
            with self.files.open_output_stream(f"{OWN}/{name}") as stream:
                stream.write(text.encode())
            return
        folder = Path(self.base, OWN)
        atomic_file.make_folder(folder)
        draft = folder / f"{name}.{uuid.uuid4().hex}"
        with draft.open("xb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        draft.replace(folder / name)
        atomic_file.sync(folder)

    def notes(self) -> list[str]:
        """The names of all notes."""
        selector = arrow_fs.FileSelector(self._own(), allow_not_found=True)
        return sorted(info.base_name for info in self.files.get_file_info(selector) if info.is_file)

    def noted(self, name: str) -> str | None:
        """The text kept under a name; None when there is none."""
        found = self.read(f"{OWN}/{name}")
        return None if found is None else found.decode()

    def forget(self, names: Sequence[str]) -> None:
        """Drop notes durably; nothing happens for one that is not there."""
        self.delete([f"{OWN}/{name}" for name in names])
        if names and self.is_local:
            atomic_file.sync(self._own())

    def delete(self, names: Sequence[str]) -> None:
        """Delete files of the table; nothing happens for one that is not there."""
        for name in names:
            with suppress(FileNotFoundError):
                self.files.delete_file(self._in(name))

    def _own(self) -> str:
        return self._in(OWN)

    def _in(self, name: str) -> str:
        """A path in the directory, as `files` names it."""
        return f"{self.base}/{name}".rstrip("/") if self.base else name

    def missing(self, names: Sequence[str]) -> list[str]:
        """Those of the table's files that are not there."""
        found = self.files.get_file_info([self._in(name) for name in names])
        return [name for name, info in zip(names, found, strict=True) if not info.is_file]

    def sync(self, *folders: str) -> None:
        """Make the directory's entries durable, and those of the named folders in it."""
        if self.is_local:
            for folder in (self.base, *(f"{self.base}/{folder}" for folder in folders)):
                atomic_file.sync(folder)

    def sync_file(self, name: str) -> None:
        """Make a file's bytes durable, if it is there."""
        if self.is_local:
            with suppress(FileNotFoundError):
                atomic_file.sync(f"{self.base}/{name}")

    def remove(self) -> None:
        if self.is_local:
            shutil.rmtree(self.base, ignore_errors=not Path(self.base).exists())
        else:
            self.files.delete_dir_contents(self.base, missing_dir_ok=True)
