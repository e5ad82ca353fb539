"""Where a consumer stores how far it has polled. A pipeline does not need this: Spark stores its offsets."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from tailrace.errors import ConfigError, DamagedError, TailraceError, UnavailableError
from tailrace.source.follower import Offset
from tailrace.system.atomic_file import creating, make_private_folder


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
    """Watermarks of one source in a file that is replaced atomically, with a checksum."""

    path: Path

    def load(self, of: str) -> Offset | None:
        if not self.path.exists():
            return None
        fix = "restore the file; or delete it, or set on_bad_watermark to permissive: every table is copied again then"
        return _decode(self.path.read_bytes(), of, str(self.path), fix)

    def save(self, of: str, offset: Offset) -> None:
        with creating(self.path) as file:
            file.write(_encode(of, offset))


class RocksDbWatermarks:
    """Watermarks of any number of sources in a RocksDB database, which one process at a time can open.

    It is opened with the first call, and by `close`, or at the end of a `with` block, it is closed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._database: Any = None

    def load(self, of: str) -> Offset | None:
        raw: bytes | None = self._run(lambda database: database.get(of.encode()))
        fix = f"restore {self.path}, or set on_bad_watermark to permissive: every table is copied again then"
        return None if raw is None else _decode(raw, of, str(self.path), fix)

    def save(self, of: str, offset: Offset) -> None:
        durable = _binding().WriteOptions()
        durable.sync = True
        self._run(lambda database: database.put(of.encode(), _encode(of, offset), write_opt=durable))

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _run(self, work: Any) -> Any:
        rocksdb = _binding()
        try:
            if self._database is None:
                make_private_folder(self.path)
                options = rocksdb.Options(raw_mode=True)  # else it would pickle what is stored
                options.set_keep_log_file_num(2)
                self._database = rocksdb.Rdict(str(self.path), options)
            return work(self._database)
        except Exception as error:
            # The package raises nothing more specific; the text begins with RocksDB's own status.
            raise self._translate(error) from error

    def _translate(self, error: Exception) -> TailraceError:
        if isinstance(error, TailraceError):
            return error
        text = str(error)
        if text.startswith("Corruption"):
            return DamagedError(
                f"the watermarks in {self.path} cannot be read: {text}",
                fix="restore the folder, or delete it: every table is copied again then",
            )
        return UnavailableError(
            f"the watermarks in {self.path} cannot be opened: {text}",
            fix="close the other process that has the folder open, or correct its path or permissions",
        )


def _binding() -> Any:
    try:
        return import_module("rocksdict")
    except ImportError as error:
        raise ConfigError(
            "watermarks in RocksDB need the package rocksdict", fix="pip install 'tailrace[rocksdb]'"
        ) from error


def _encode(of: str, offset: Offset) -> bytes:
    text = json.dumps(offset)
    return json.dumps({"of": of, "check": zlib.crc32(text.encode()), "offset": text}).encode()


def _decode(raw: bytes, of: str, where: str, fix: str) -> Offset:
    try:
        stored = json.loads(raw)
        text, check, owner = stored["offset"], stored["check"], stored["of"]
        offset = json.loads(text) if zlib.crc32(text.encode()) == check else None
    except (ValueError, KeyError, TypeError, AttributeError):
        offset = None
    if not isinstance(offset, dict):
        raise DamagedError(f"the stored watermark {where} cannot be read: it does not match its checksum", fix=fix)
    if owner != of:
        raise DamagedError(f"the stored watermark {where} belongs to the source {owner}, not to {of}", fix=fix)
    return offset
