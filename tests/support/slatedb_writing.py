"""A SlateDB writer in this process, for tests: what an application does, one call at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

from tailrace.option.table import TableOptions
from tailrace.source.slatedb import merge_operator
from tailrace.source.slatedb.object_store import ObjectStore, SlateDbDatabase, binding, run
from tailrace.source.slatedb.option import ObjectStoreOptions
from tailrace.source.slatedb.source import SlateDbSource
from tailrace.source.slatedb.table_mapping import folds_of, read_mappings
from tests.support.source_making import make_slatedb

api = binding()
NOW = api.GarbageCollectorDirectoryOptions(interval_ms=None, min_age_ms=0, dry_run=False)
EVERYTHING = api.KeyRange(start=None, start_inclusive=True, end=None, end_inclusive=False)
Row = tuple[bytes, bytes, int, int | None]


class Writer:
    """An open database. Writes return once they are durable. `fence` opens it again, as another process would."""

    def __init__(
        self,
        place: Path | ObjectStore,
        tables: TableOptions | None = None,
        *,
        path: str = "db1",
        wal: Path | ObjectStore | None = None,
        **settings: str,
    ) -> None:
        self.database = SlateDbDatabase(path, _store(place), _store(wal) if wal is not None else None)
        self.rules = read_mappings(path, tables or TableOptions())
        self._settings = {"flush_interval": '"5ms"', **settings}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._db = self.run(self._open())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result()

    async def _open(self) -> Any:
        settings = api.Settings.default()
        for key, value in self._settings.items():
            settings.set(key, value)
        builder = api.DbBuilder(self.database.path, self.database.store.open())
        builder.with_settings(settings)
        if self.database.wal_store is not None:
            builder.with_wal_object_store(self.database.wal_store.open())
        builder.with_merge_operator(
            merge_operator.for_reader({b"": merge_operator.make("append", "raw"), **folds_of(self.rules)})
        )
        return await builder.build()

    def put(self, key: bytes, value: bytes, expire_at: int | None = None, expire_after: int | None = None) -> None:
        ttl = api.Ttl.NO_EXPIRY()
        if expire_at is not None:
            ttl = api.Ttl.EXPIRE_AT_MILLIS(expire_at)
        if expire_after is not None:
            ttl = api.Ttl.EXPIRE_AFTER_MILLIS(expire_after)

        async def work() -> None:
            handle = await self._db.put_with_options(key, value, api.PutOptions(ttl=ttl), api.WriteOptions())
            await handle.await_durable()

        self.run(work())

    def delete(self, key: bytes) -> None:
        self._durably(self._db.delete(key))

    def merge(self, key: bytes, operand: bytes) -> None:
        self._durably(self._db.merge(key, operand))

    def write(self, *changes: tuple[bytes, bytes | None]) -> None:
        """One batch: puts, and deletes where the value is None."""
        batch = api.WriteBatch()
        for key, value in changes:
            if value is None:
                batch.delete(key)
            else:
                batch.put(key, value)
        self._durably(self._db.write(batch))

    def _durably(self, writing: Coroutine[Any, Any, Any]) -> None:
        async def work() -> None:
            handle = await writing
            await handle.await_durable()

        self.run(work())

    def flush(self) -> None:
        """Move everything from the WAL into tables."""
        self.run(self._db.flush_with_options(api.FlushOptions(flush_type=api.FlushType.MEM_TABLE)))

    def fence(self) -> None:
        """Another writer takes over; the old one is left as a crash leaves it."""
        self._db = self.run(self._open())

    def collect(self) -> None:
        """Delete every WAL file that SlateDB itself does not need any more."""
        options = api.GarbageCollectorOptions(
            manifest_options=None,
            wal_options=NOW,
            wal_fence_options=NOW,
            compacted_options=None,
            compactions_options=None,
            detach_options=None,
            disable_boundary_files=False,
        )
        self.run(self.database.admin().run_gc_once(options))

    def rows(self, clock: int | None = None) -> dict[bytes, Row]:
        return scan(self.database, clock, folds={b"": merge_operator.make("append", "raw"), **folds_of(self.rules)})

    def source(self, state: Path, tables: TableOptions | None = None, **options: Any) -> SlateDbSource:
        if self.database.wal_store is not None:
            options["wal_store"] = ObjectStoreOptions.model_validate(_options_of(self.database.wal_store))
        return make_slatedb(_options_of(self.database.store), state, tables, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._db.shutdown())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _options_of(store: ObjectStore) -> dict[str, Any]:
    """The store as a pipeline file describes it."""
    place = {"local": "path", "memory": "name", "azure": "container"}.get(store.type, "bucket")
    return {"type": store.type, place: store.place, "options": dict(store.options)}


def _store(place: Path | ObjectStore) -> ObjectStore:
    """A folder as a store, made when it is missing."""
    if isinstance(place, ObjectStore):
        return place
    place.mkdir(parents=True, exist_ok=True)
    return ObjectStore("local", str(place))


def scan(database: SlateDbDatabase, clock: int | None = None, folds: Any = None) -> dict[bytes, Row]:
    """Every row as SlateDB's own reader has it; with a clock, only those that have not expired then."""

    async def read() -> list[Any]:
        reader = await database.reader(operator=merge_operator.for_reader(folds) if folds else None)
        found = await reader.scan(EVERYTHING)
        rows: list[Any] = []
        while some := await found.next_batch(1000):
            rows += some
        await reader.shutdown()
        return rows

    rows = run(read(), "scanning")
    return {
        row.key: (row.key, row.value, row.seq, row.expire_ts)
        for row in rows
        if clock is None or row.expire_ts is None or row.expire_ts > clock
    }
