"""The folder of a table in an object store, with as few requests as possible: each one takes time and costs money.

Files are read and written by obstore. delta-rs's own file system asks twice before it reads a file, and uploads even
the smallest one in three steps.
"""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import obstore
import pyarrow as pa

from tailrace.destination.delta.table_folder import OWN, PathStamp, TablePath, is_data
from tailrace.system.object_store import open_store, plain_errors, put_new

SMALL_BYTES = 4 << 20
"""A file of at most this size is put and read as a whole: one request, where its footer and columns would be three."""
KEPT_BYTES = 64 << 20
"""How much memory a process uses for small files: the next batch often needs what this one wrote."""
_PART_BYTES = 8 << 20
_PARALLEL = 16


class ObjectFolder(TablePath):
    """Objects are durable and visible once they are put. There are no folders."""

    is_local = False

    @property
    def _store(self) -> Any:
        return open_store(self.uri, self.options)

    def is_file(self) -> bool:
        return False

    def names(self, folder: str = "") -> list[str]:
        with plain_errors():
            found = obstore.list_with_delimiter(self._store, folder or None)
        paths = [*found["common_prefixes"], *(one["path"] for one in found["objects"])]
        return [path.rpartition("/")[2] for path in paths]

    def names_below(self, folder: str) -> list[str]:
        return [path.rpartition("/")[2] for path in self._below(folder)]

    def entries(self, folder: str = "") -> dict[str, float]:
        with plain_errors():
            found = obstore.list_with_delimiter(self._store, folder or None)["objects"]
        return {one["path"].rpartition("/")[2]: one["last_modified"].timestamp() for one in found}

    def data_files(self) -> dict[str, float]:
        return {path: written for path, written in self._below("").items() if is_data(path)}

    def _below(self, folder: str) -> dict[str, float]:
        with plain_errors():
            pages = obstore.list(self._store, folder or None)
            return {one["path"]: one["last_modified"].timestamp() for page in pages for one in page}

    def dead_bytes(self, alive: int) -> int:
        return 0

    def stamp(self, name: str) -> PathStamp | None:
        try:
            with plain_errors():
                found = obstore.head(self._store, name)
        except FileNotFoundError:
            return None
        return _stamp_of(found)

    def read(self, name: str) -> bytes | None:
        found = self.read_stamped(name)
        return None if found is None else found[0]

    def read_stamped(self, name: str) -> tuple[bytes, PathStamp | None] | None:
        try:
            with plain_errors():
                got = obstore.get(self._store, name)
                return bytes(got.bytes()), _stamp_of(got.meta)
        except FileNotFoundError:
            return None

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        with plain_errors():
            return bytes(obstore.get_range(self._store, name, start=offset, length=length))

    def open(self, name: str, size: int | None = None) -> pa.NativeFile:
        if size is None:
            with plain_errors():
                size = obstore.head(self._store, name)["size"]
        if size <= SMALL_BYTES:
            if (body := _kept.get(self.uri, name)) is None:
                with plain_errors():
                    body = bytes(obstore.get(self._store, name).bytes())
                _kept.put(self.uri, name, body)
            return pa.BufferReader(body)
        return pa.PythonFile(_Ranges(self, name, size), mode="r")

    def missing(self, names: Sequence[str]) -> list[str]:
        if not names:
            return []
        with ThreadPoolExecutor(min(_PARALLEL, len(names))) as pool:
            stamps = pool.map(self.stamp, names)
            return [name for name, stamp in zip(names, stamps, strict=True) if stamp is None]

    def make(self, folder: str = "") -> None:
        pass

    def put_new(self, name: str, body: bytes) -> PathStamp | None:
        return _stamp(put_new(self.uri, self.options, name, body))

    @contextmanager
    def creating(self, name: str) -> Iterator[_Upload]:
        upload = _Upload(self._store, name)
        yield upload
        if (body := upload.finish()) is not None:
            _kept.put(self.uri, name, body)

    def delete(self, names: Sequence[str]) -> None:
        if names:
            with plain_errors():
                obstore.delete(self._store, list(names))

    def sync(self, *folders: str) -> None:
        pass

    def sync_file(self, name: str) -> None:
        pass

    def note(self, name: str, text: str) -> None:
        with plain_errors():
            obstore.put(self._store, f"{OWN}/{name}", text.encode(), use_multipart=False)


def _stamp_of(meta: Mapping[str, Any]) -> PathStamp:
    return _stamp(meta["e_tag"]) or (str(meta["last_modified"]), meta["size"])


def _stamp(tag: str | None) -> PathStamp | None:
    return (tag,) if tag else None


class _SmallFiles:
    """Files that this process wrote or read lately. No file changes once it is there, and none has another's name."""

    def __init__(self) -> None:
        self._files: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, folder: str, name: str) -> bytes | None:
        with self._lock:
            if (found := self._files.get((folder, name))) is not None:
                self._files.move_to_end((folder, name))
            return found

    def put(self, folder: str, name: str, body: bytes) -> None:
        with self._lock:
            self._bytes += len(body) - len(self._files.pop((folder, name), b""))
            self._files[folder, name] = body
            while self._bytes > KEPT_BYTES:
                self._bytes -= len(self._files.popitem(last=False)[1])

    def clear(self) -> None:
        with self._lock:
            self._files.clear()
            self._bytes = 0


_kept = _SmallFiles()


class _Ranges(io.RawIOBase):
    """A large object, read where that is asked for: Arrow joins what is close together."""

    def __init__(self, folder: ObjectFolder, name: str, size: int) -> None:
        self._folder = folder
        self._name = name
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        length = self._size - self._at if size < 0 else min(size, self._size - self._at)
        found = self._folder.read_range(self._name, self._at, length) if length > 0 else b""
        self._at += len(found)
        return found


class _Upload(io.RawIOBase):
    """A new object, of which nothing is there before `finish`."""

    def __init__(self, store: Any, name: str) -> None:
        self._store = store
        self._name = name
        self._start: list[bytes] = []
        self._writer: Any = None
        self._written = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._written

    def write(self, data: Any) -> int:
        # Arrow's own buffers are of signed bytes, which obstore does not take.
        view = memoryview(data).cast("B")
        self._written += view.nbytes
        if self._writer is None and self._written > SMALL_BYTES:
            self._writer = obstore.open_writer(self._store, self._name, buffer_size=_PART_BYTES)
            start, self._start = self._start, []
            with plain_errors():
                self._writer.write(b"".join(start))
        if self._writer is None:
            self._start.append(bytes(view))
        else:
            with plain_errors():
                self._writer.write(view)
        return view.nbytes

    def finish(self) -> bytes | None:
        """Put the object. Returns its bytes if they are few."""
        with plain_errors():
            if self._writer is not None:
                self._writer.close()
                return None
            body = b"".join(self._start)
            obstore.put(self._store, self._name, body, use_multipart=False)
            return body
