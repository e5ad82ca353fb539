"""The folder of a table on a disk that this machine sees."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from tailrace.destination.delta.table_folder import OWN, VECTORS, PathStamp, TablePath, is_data
from tailrace.system import atomic_file, failpoint


class LocalFolder(TablePath):
    """Files are synced before they are visible, and folders where that is said."""

    is_local = True

    @classmethod
    def at(cls, base: str | Path, table: str = "") -> LocalFolder:
        return cls(str(base), str(base), table=table)

    def is_file(self) -> bool:
        return Path(self.base).is_file()

    def names(self, folder: str = "") -> list[str]:
        try:
            return [path.name for path in Path(self.base, folder).iterdir()]
        except FileNotFoundError:
            return []

    def names_below(self, folder: str) -> list[str]:
        return [name for _, _, files in os.walk(Path(self.base, folder)) for name in files]

    def entries(self, folder: str = "") -> dict[str, float]:
        return {name: written for name, (written, is_file) in self._look(folder).items() if is_file}

    def _look(self, folder: str) -> dict[str, tuple[float, bool]]:
        found: dict[str, tuple[float, bool]] = {}
        with suppress(FileNotFoundError), os.scandir(Path(self.base, folder)) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    found[entry.name] = entry.stat().st_mtime, entry.is_file()
        return found

    def data_files(self) -> dict[str, float]:
        found: dict[str, float] = {}
        folders = [""]
        while folders:
            folder = folders.pop()
            for name, (written, is_file) in self._look(folder).items():
                path = f"{folder}{name}"
                if is_file and is_data(path):
                    found[path] = written
                # Folders with such a name hold no data, but may hold many files.
                elif not is_file and (folder or name[:1] not in ("_", ".")):
                    folders.append(f"{path}/")
        return found

    def dead_bytes(self, alive: int) -> int:
        patterns = ("part-*.parquet", "*=*/**/part-*.parquet", f"{VECTORS}/*.bin")
        return sum(path.stat().st_size for pattern in patterns for path in Path(self.base).glob(pattern)) - alive

    def stamp(self, name: str) -> PathStamp | None:
        try:
            status = Path(self.base, name).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size

    def read(self, name: str) -> bytes | None:
        try:
            return Path(self.base, name).read_bytes()
        except FileNotFoundError:
            return None

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        with Path(self.base, name).open("rb") as file:
            file.seek(offset)
            return file.read(length)

    def open(self, name: str, size: int | None = None) -> str:
        return f"{self.base}/{name}"

    def missing(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if not Path(self.base, name).is_file()]

    def make(self, folder: str = "") -> None:
        atomic_file.make_folder(Path(self.base, folder))

    def put_new(self, name: str, body: bytes) -> PathStamp | None:
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
        return self.stamp(name)

    @contextmanager
    def creating(self, name: str) -> Iterator[IO[bytes]]:
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

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            Path(self.base, name).unlink(missing_ok=True)

    def sync(self, *folders: str) -> None:
        for folder in (self.base, *(f"{self.base}/{folder}" for folder in folders)):
            atomic_file.sync(folder)

    def sync_file(self, name: str) -> None:
        with suppress(FileNotFoundError):
            atomic_file.sync(f"{self.base}/{name}")

    def note(self, name: str, text: str) -> None:
        folder = Path(self.base, OWN)
        atomic_file.make_folder(folder)
        draft = folder / f"{name}.{uuid.uuid4().hex}"
        with draft.open("xb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        draft.replace(folder / name)
        atomic_file.sync(folder)

    def forget(self, names: Sequence[str]) -> None:
        if names:
            super().forget(names)
