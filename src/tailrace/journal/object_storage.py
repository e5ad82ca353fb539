"""A journal in an object store: numbered pieces that are put once, and a lease.

The number of a piece is what keeps two writers apart: both would put the next one, and only one of them can. The loser
learns it before it acknowledges anything. The lease is politeness: it lets a second writer see that there is a first,
so that it does not take over from one that works.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import obstore

from tailrace.errors import DamagedError, OwnedError, TailraceError
from tailrace.journal.segment import SUFFIX, SegmentHeader, header_bytes, read_header
from tailrace.journal.storage import Buffer, JournalStorage, ObjectPlace, Pace
from tailrace.system.failpoint import reach
from tailrace.system.object_store import open_store, reached

LEASE_SECONDS = 30.0
"""How long a writer that does not renew its lease keeps others out."""
RENEW_SECONDS = 10.0
RETRY_SECONDS = 10.0
"""How long one request is repeated before the store counts as unavailable."""
PARALLEL = 16
"""How many requests run at once when many small ones are needed."""

_LOCK = "lock"
_QUARANTINE = "quarantine"
_FIRST_BYTES = 1 << 16
_PAGE = 1000


_tokens: set[str] = set()
"""The leases that this process holds."""


class OpenObject:
    """An object whose first bytes are here; the rest is fetched in ranges."""

    def __init__(self, storage: ObjectStorage, name: str, start: bytes, size: int) -> None:
        self._storage = storage
        self._name = name
        self._start = start
        self.size = size

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left to fetch."""
        return len(self._start) >= self.size

    def read(self, length: int, offset: int) -> bytes:
        end = min(offset + length, self.size)
        if end <= len(self._start):
            return self._start[offset:end]
        return bytes(self._storage.fetch(self._name, offset, end - offset)) if end > offset else b""


class ObjectStorage(JournalStorage):
    """A prefix of an object store."""

    grows = False
    pace = Pace(append_seconds=0.25, append_bytes=8 << 20, note_seconds=1.0, upkeep_seconds=5.0)

    def __init__(self, place: ObjectPlace) -> None:
        self.place = place

    def __str__(self) -> str:
        return self.place.url

    @property
    def store(self) -> Any:
        return open_store(self.place.url, self.place.options, retry_seconds=RETRY_SECONDS)

    def names(self) -> list[str]:
        return list(self.sizes())

    def sizes(self) -> dict[str, int]:
        return self.sizes_after(None)

    def sizes_after(self, last: str | None) -> dict[str, int]:
        """The segments after this one, with their bytes. S3 lists in the order of names, and 1000 at a time."""
        with reached(self.place.url):
            found = [
                (one["path"], one["size"])
                for page in obstore.list(self.store, offset=last, chunk_size=_PAGE)
                for one in page
                if _is_segment(one["path"])
            ]
        return dict(sorted(found))

    def first_name(self) -> str | None:
        """The oldest segment, from the first page of a listing."""
        with reached(self.place.url):
            for page in obstore.list(self.store, chunk_size=_PAGE):
                if found := [one["path"] for one in page if _is_segment(one["path"])]:
                    return str(min(found))
        return None

    @contextmanager
    def open(self, name: str) -> Iterator[OpenObject]:
        yield self.begin(name)

    def begin(self, name: str) -> OpenObject:
        """The first bytes of an object, in one request: a small one is here as a whole."""
        with reached(f"{self.place.url}/{name}", may_lack=True):
            got = obstore.get(self.store, name, options={"range": (0, _FIRST_BYTES)})
            return OpenObject(self, name, bytes(got.bytes()), got.meta["size"])

    def begin_all(self, names: Sequence[str]) -> list[OpenObject | None]:
        """`begin` of many at once; None for one that is not there."""

        def begin(name: str) -> OpenObject | None:
            with suppress(FileNotFoundError):
                return self.begin(name)
            return None

        if len(names) == 1:
            return [begin(names[0])]
        with ThreadPoolExecutor(PARALLEL) as pool:
            return list(pool.map(begin, names))

    def fetch(self, name: str, offset: int, length: int) -> memoryview:
        with reached(f"{self.place.url}/{name}", may_lack=True):
            return memoryview(obstore.get_range(self.store, name, start=offset, length=length))

    def read_range(self, name: str, offset: int, length: int) -> memoryview | None:
        got = self.fetch(name, offset, length)
        if got.nbytes < length:
            return None
        # The store's own memory may begin anywhere, and numpy wants to view numbers in it.
        stored = memoryview(np.empty(length, np.uint8).data)
        stored[:] = got
        return stored

    def headers(self, names: Sequence[str]) -> dict[str, SegmentHeader | None]:
        found: dict[str, SegmentHeader | None] = {}
        for name, opened in zip(names, self.begin_all(names), strict=True):
            if opened is not None:
                found[name] = None
                with suppress(DamagedError):
                    found[name] = read_header(opened, name)
        return found

    def remove(self, name: str) -> None:
        self.drop(name)

    def sync(self, name: str) -> None:
        """Whatever can be read of an object is durable."""

    def set_aside(self, name: str, *, keeps: bool) -> None:
        with suppress(FileNotFoundError), reached(self.place.url, may_lack=True):
            obstore.copy(self.store, name, f"{_QUARANTINE}/{name}")
        if not keeps:
            self.drop(name)

    def names_aside(self) -> list[str]:
        return [name.rpartition("/")[2] for name in self.small_files(_QUARANTINE, SUFFIX)]

    def load(self, name: str) -> bytes | None:
        try:
            with reached(f"{self.place.url}/{name}", may_lack=True):
                return bytes(obstore.get(self.store, name).bytes())
        except FileNotFoundError:
            return None

    def replace(self, name: str, content: bytes) -> None:
        with reached(f"{self.place.url}/{name}"):
            obstore.put(self.store, name, content, use_multipart=False)

    def drop(self, name: str) -> None:
        with suppress(FileNotFoundError), reached(f"{self.place.url}/{name}", may_lack=True):
            obstore.delete(self.store, name)

    def small_files(self, folder: str, suffix: str) -> list[str]:
        with reached(self.place.url):
            found = [one["path"] for page in obstore.list(self.store, folder) for one in page]
        return sorted(name for name in found if name.endswith(suffix))

    def acquire(self) -> ObjectSink:
        owner = self._owner()
        if owner is not None:
            raise OwnedError(
                f"journal {self} is written by {owner}",
                fix="stop that receiver first, or give this pipeline a journal of its own",
            )
        return ObjectSink(self)

    def is_written(self) -> bool:
        return self._owner() is not None

    def _owner(self) -> str | None:
        """The process whose lease holds. One of this machine that is dead holds none."""
        try:
            with reached(f"{self.place.url}/{_LOCK}", may_lack=True):
                got = obstore.get(self.store, _LOCK)
                lease, renewed = json.loads(bytes(got.bytes())), got.meta["last_modified"]
        except FileNotFoundError:
            return None
        except ValueError:
            return None  # half of a lease is none
        if (datetime.now(UTC) - renewed).total_seconds() > LEASE_SECONDS:
            return None
        if lease.get("machine") == _machine():
            pid = int(lease.get("pid", 0))
            # One that this process could not give up, or that an earlier process of the same number had, is no one's.
            is_left = pid == os.getpid() and lease.get("token") not in _tokens
            if is_left or not _is_alive(pid):
                return None
        return f"process {lease.get('pid')} on {lease.get('host')}"

    @contextmanager
    def removing(self) -> Iterator[None]:
        with reached(self.place.url):
            is_empty = not any(obstore.list(self.store))
        if is_empty:
            yield
            return
        sink = self.acquire()
        try:
            yield
            with reached(self.place.url):
                for page in obstore.list(self.store):
                    paths = [one["path"] for one in page if one["path"] != _LOCK]
                    if paths:
                        obstore.delete(self.store, paths)
        finally:
            sink.close()


class ObjectSink:
    """Puts pieces under the next number, and renews the lease."""

    def __init__(self, storage: ObjectStorage) -> None:
        self._storage = storage
        self._token = secrets.token_hex(16)
        self.is_fenced = False
        self._renewed_at = 0.0
        self._tried: list[bytes] = []
        """The headers of pieces of which no answer said that they are there: they may be, or may still arrive."""
        self._renew()
        _tokens.add(self._token)

    def create(self, name: str, content: Sequence[Buffer]) -> int | None:
        self._hold()
        body = b"".join(content)
        place = f"{self._storage}/{name}"
        reach("journal.before_fsync")
        before, self._tried = self._tried, [*self._tried, header_bytes(body)]
        try:
            with reached(place):
                # A multipart upload knows no condition: one request, whatever its size.
                obstore.put(self._storage.store, name, body, mode="create", use_multipart=False)
        except FileExistsError:
            there = self._storage.load(name)
            if there != body:
                if there is not None and any(there.startswith(tried) for tried in before):
                    return len(there)
                raise self._fenced(name) from None
        self._tried = []
        return None

    def append(self, pieces: list[Buffer], offset: int) -> None:
        raise NotImplementedError("an object never grows")

    def close(self) -> None:
        if self._token:
            # Without it the next writer waits until the lease has run out.
            with suppress(TailraceError):
                if self._is_own():
                    self._storage.drop(_LOCK)
        _tokens.discard(self._token)
        self._token = ""

    def _hold(self) -> None:
        """Renew the lease if it is time. A writer that was asleep for long may have lost it to another one."""
        age = time.monotonic() - self._renewed_at
        if age > LEASE_SECONDS and not self._is_own():
            raise self._fenced(_LOCK)
        if age > RENEW_SECONDS:
            self._renew()

    def _is_own(self) -> bool:
        stored = self._storage.load(_LOCK)
        return stored is None or self._token.encode() in stored

    def _renew(self) -> None:
        lease = {"token": self._token, "pid": os.getpid(), "host": socket.gethostname(), "machine": _machine()}
        self._storage.replace(_LOCK, json.dumps(lease).encode())
        self._renewed_at = time.monotonic()

    def renew(self) -> None:
        """Keep the lease while there is nothing to append. Raises OwnedError when another writer took over."""
        self._hold()

    def _fenced(self, name: str) -> OwnedError:
        self.is_fenced = True
        return OwnedError(
            f"another receiver has put {name} into journal {self._storage}",
            fix="stop one of the two receivers, or give this pipeline a journal of its own",
        )


def _is_segment(name: str) -> bool:
    return name.endswith(SUFFIX) and name.removesuffix(SUFFIX).isdecimal()


def _machine() -> str:
    """This machine since its start: a process id means something only there."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def _is_alive(pid: int) -> bool:
    with suppress(OSError, IndexError):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return False  # killed, and its parent has not noticed
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
