"""The object store of a database: how it is opened, what its errors mean, and how asynchronous code is called."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tailrace.errors import ConfigError, DamagedError, LostError, TailraceError, UnavailableError

if TYPE_CHECKING:
    from tailrace.source.slatedb.option import ObjectStoreOptions

Result = TypeVar("Result")

_KINDS = {"local": "LOCAL", "memory": "IN_MEMORY", "s3": "S3", "gcs": "GCS", "azure": "AZURE"}
_PLACES = {"local": "local_path", "s3": "bucket", "gcs": "bucket", "azure": "container_name"}
_SCAN_BYTES = 4 << 20
ANSWER_SECONDS = 60.0
"""SlateDB itself would retry an unreachable store forever."""
_opened: dict[tuple[Any, ...], Any] = {}


class CollectedError(LostError):
    """A WAL file that is needed was deleted by the database's garbage collector."""


def binding() -> Any:
    """The module of SlateDB's Python package. Raises ConfigError where it is not installed."""
    try:
        return import_module("slatedb.uniffi")
    except ImportError as error:
        raise ConfigError(
            "the source type slatedb needs the package slatedb", fix="pip install 'tailrace[slatedb]'"
        ) from error


def _objects() -> Any:
    """The module of the object store's own client. Raises ConfigError where it is not installed."""
    try:
        return import_module("obstore")
    except ImportError as error:
        raise ConfigError(
            "the source type slatedb needs the package obstore", fix="pip install 'tailrace[slatedb]'"
        ) from error


@dataclass(frozen=True)
class ObjectStore:
    """An object store, as configuration. Credentials never show in its repr."""

    type: str
    place: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def from_options(cls, options: ObjectStoreOptions) -> ObjectStore:
        place = options.path or options.name or options.bucket or options.container
        return cls(options.type, str(place), {key: value.reveal() for key, value in options.options.items()})

    def open(self) -> Any:
        """The store's handle, with its connections: one per process, which is also how long a memory store lives."""
        # A forked process must not use its parent's connections.
        key = (os.getpid(), self.type, self.place, *sorted(self.options.items()))
        if key not in _opened:
            _opened[key] = self._build()
        return _opened[key]

    def _build(self) -> Any:
        api = binding()
        kind = getattr(api.ObjectStoreType, _KINDS[self.type])
        if self.type == "memory":
            return api.ObjectStoreBuilder(kind).build()
        # Credentials that are not configured come from the environment, as with the provider's own tools.
        remote = self.type != "local"
        if remote:
            self._require_encryption()
        try:
            builder = api.ObjectStoreBuilder.from_env(kind) if remote else api.ObjectStoreBuilder(kind)
            builder.with_config(_PLACES[self.type], self.place)
            for name, value in self.options.items():
                builder.with_config(name, value)
            return builder.build()
        except api.Error as error:
            # The longest first: one value may be part of another.
            values = sorted(filter(None, self.options.values()), key=len, reverse=True)
            text = re.sub("|".join(map(re.escape, values)) or "(?!)", "***", str(error.message))
            # Leave out the cause: its text quotes values.
            raise ConfigError(
                f"the {self.type} store cannot be opened: {text}",
                fix="check `store` and its `options` in the pipeline file",
            ) from None

    def has(self, path: str) -> bool:
        """Whether there is an object with this path: one request. True also for a store that only SlateDB can ask."""
        if self.type == "local":
            return Path(self.place, path).exists()
        client = self._client()
        if client is None:
            return True
        obstore = _objects()
        try:
            obstore.head(client, path)
        except FileNotFoundError:
            return False
        except obstore.exceptions.BaseError as error:
            raise self._unanswered(error) from error
        return True

    def list(self, folder: str, after: str | None = None) -> Iterator[tuple[str, int, datetime]]:
        """Path, size and time of the objects in a folder, those after a path. Raises ConfigError for a memory store."""
        if self.type == "local":
            for file in Path(self.place, folder).glob("*"):
                path = f"{folder}{file.name}"
                with suppress(FileNotFoundError):  # just deleted
                    if after is None or path > after:
                        status = file.stat()
                        yield path, status.st_size, datetime.fromtimestamp(status.st_mtime, UTC)
            return
        client = self._client()
        if client is None:
            raise ConfigError(
                f"the files of a {self.type} store cannot be listed", fix="use a store outside the process"
            )
        obstore = _objects()
        try:
            for some in obstore.list(client, folder, offset=after):
                yield from ((one["path"], one["size"], one["last_modified"]) for one in some)
        except obstore.exceptions.BaseError as error:
            raise self._unanswered(error) from error

    def _unanswered(self, error: Exception) -> UnavailableError:
        # Only the kind of the error: its text quotes the request.
        return UnavailableError(
            f"the {self.type} store {self.place} did not answer ({type(error).__name__})",
            fix="check its endpoint and credentials, and the network",
        )

    def _client(self) -> Any:
        """A client of the store's own interface; None for a store that exists only within SlateDB."""
        if self.type == "memory":
            return None
        key = ("client", os.getpid(), self.type, self.place, *sorted(self.options.items()))
        if key not in _opened:
            self._require_encryption()
            _objects()
            stores = import_module("obstore.store")
            make = {"s3": stores.S3Store, "gcs": stores.GCSStore, "azure": stores.AzureStore}[self.type]
            plain = any(name.lower().endswith("allow_http") for name in (*self.options, *os.environ))
            config = {name: value for name, value in self.options.items() if not name.endswith("allow_http")}
            try:
                _opened[key] = make(
                    self.place,
                    config=config,
                    client_options={"allow_http": plain, "timeout": timedelta(seconds=ANSWER_SECONDS)},
                    retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=ANSWER_SECONDS)},
                )
            except _objects().exceptions.BaseError as error:
                # Leave out the cause: its text quotes values.
                raise ConfigError(
                    f"the {self.type} store cannot be opened: {type(error).__name__}",
                    fix="check `store` and its `options` in the pipeline file",
                ) from None
        return _opened[key]

    def _require_encryption(self) -> None:
        """The client refuses every request to a plain endpoint, and SlateDB would retry forever."""
        plain = any("endpoint" in name and value.startswith("http://") for name, value in self.options.items())
        if plain and not any(name.lower().endswith("allow_http") for name in (*self.options, *os.environ)):
            raise ConfigError(
                f"the endpoint of the {self.type} store is plain http, which its client refuses",
                fix='use https, or set allow_http: "true" in the options of the store',
            )


@dataclass(frozen=True)
class SlateDbDatabase:
    """A SlateDB database, as configuration: every handle is opened where it is used."""

    path: str
    store: ObjectStore
    wal_store: ObjectStore | None = None

    @property
    def is_shared(self) -> bool:
        """Whether other processes see the same database."""
        return all(store.type != "memory" for store in (self.store, self.wal_store) if store is not None)

    def wal_reader(self) -> Any:
        """A reader of WAL files. Few parallel fetches: files after the wanted ones would be fetched for nothing."""
        api = binding()
        options = api.SlateDbWalReaderOptions(max_buffered_bytes=32 << 20, max_fetch_tasks=4)
        if self.wal_store is None:
            return api.SlateDbWalReader.with_options(self.path, self.store.open(), options)
        return api.SlateDbWalReader.with_wal_object_store_and_options(
            self.path, self.store.open(), self.wal_store.open(), options
        )

    def admin(self) -> Any:
        builder = binding().AdminBuilder(self.path, self.store.open())
        if self.wal_store is not None:
            builder.with_wal_object_store(self.wal_store.open())
        return builder.build()

    async def reader(self, *, checkpoint: str | None = None, operator: Any) -> Any:
        """A reader of everything that is durable now, or of a checkpoint. The caller shuts it down."""
        api = binding()
        builder = api.DbReaderBuilder(self.path, self.store.open())
        if self.wal_store is not None:
            builder.with_wal_object_store(self.wal_store.open())
        if operator is not None:
            builder.with_merge_operator(operator)
        # Reads the latest state and writes nothing upstream: it is open for one batch only.
        pinned = checkpoint is not None
        builder.with_reader_mode(api.ReaderMode.CHECKPOINT(checkpoint) if pinned else api.ReaderMode.FOLLOW_LATEST())
        builder.with_options(
            api.ReaderOptions(
                manifest_poll_interval_ms=60_000,
                checkpoint_lifetime_ms=600_000,
                max_memtable_bytes=64 << 20,
                skip_wal_replay=pinned,
            )
        )
        return await builder.build()

    async def manifest(self) -> Any:
        """The newest manifest; None where there is no database."""
        return await self.admin().read_manifest(None)


def scan_options() -> Any:
    api = binding()
    return api.ScanOptions(
        durability_filter=api.DurabilityLevel.REMOTE,
        dirty=False,
        read_ahead_bytes=_SCAN_BYTES,
        cache_blocks=False,
        max_fetch_tasks=4,
    )


class Loop:
    """An event loop for work done step by step. Errors of SlateDB become tailrace errors."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, work: Coroutine[Any, Any, Result], doing: str) -> Result:
        """Run one step. Raises UnavailableError when there is no answer."""
        return self.run_steps(in_time(work), doing)

    def run_steps(self, work: Coroutine[Any, Any, Result], doing: str) -> Result:
        """Run work of many steps, each of which has its own timeout."""
        api = binding()
        try:
            return self._runner.run(work)
        except api.Error as error:
            raise translate(error, doing) from error
        except TimeoutError as error:
            raise UnavailableError(
                f"the object store did not answer within {ANSWER_SECONDS:.0f} s while {doing}",
                fix="check its endpoint and credentials, and the network",
            ) from error

    def __enter__(self) -> Self:
        self._runner.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()


async def in_time(step: Awaitable[Result]) -> Result:
    """Wait for a result. Raises TimeoutError when there is no answer."""
    return await asyncio.wait_for(step, ANSWER_SECONDS)


def run(work: Coroutine[Any, Any, Result], doing: str) -> Result:
    """Run one step on its own event loop."""
    with Loop() as loop:
        return loop.run(work, doing)


def run_steps(work: Coroutine[Any, Any, Result], doing: str) -> Result:
    """Run many steps on their own event loop."""
    with Loop() as loop:
        return loop.run_steps(work, doing)


_QUOTE = re.compile("[`'\"=]")
"""Where SlateDB begins to quote keys and paths, which may be any text. Its own words come before."""


def translate(error: Any, doing: str) -> TailraceError:
    """Turn a SlateDB error into a tailrace error. The message never holds values: it is SlateDB's own text."""
    api = binding()
    text = str(error.message)
    said = _QUOTE.split(text)[0]
    if isinstance(error, api.Error.Data):
        if "WAL was truncated" in said:
            return CollectedError(f"SlateDB deleted a WAL file that is still needed ({text})")
        if "failed to find latest" in said:
            return LostError(
                f"the SlateDB database no longer exists, found while {doing}",
                fix="restore the database, or run tailrace reset FILE",
            )
        return DamagedError(f"SlateDB cannot read its own data while {doing}: {text}")
    if isinstance(error, api.Error.Invalid):
        if "merge operator" in said:
            return MergeFailedError(text)
        return ConfigError(
            f"SlateDB refuses while {doing}: {text}", fix="check `path` and `store` in the pipeline file"
        )
    return UnavailableError(f"SlateDB is not available while {doing}: {text}")


class MergeFailedError(TailraceError):
    """A read found merge operands without an operator, or the operator failed."""
