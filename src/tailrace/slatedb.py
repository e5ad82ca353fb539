"""The WAL of a SlateDB database, file by file and row by row, without Spark.

from tailrace.slatedb import Cursor, WalReader

reader = WalReader("db1", store="/data/store")
cursor = Cursor()
for file in reader.list(start=cursor.wal_id):       # once; then ask for the next file by its id
    for row in cursor.unseen(file):
        print(file.id, row.seq, row.kind, row.key, row.value)
    cursor = cursor.after(file)
following = reader.get(cursor.wal_id + 1).rows()    # None: it is not there, yet or any more
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple, Self, TypeAlias
from urllib.parse import urlsplit

from tailrace.errors import ConfigError, LostError
from tailrace.source.slatedb.object_store import CollectedError, ObjectStore, SlateDbDatabase
from tailrace.source.slatedb.option import ObjectStoreOptions
from tailrace.source.slatedb.wal import MERGE, TOMBSTONE, VALUE, find_tail, read_files
from tailrace.source.slatedb.wal_tail import LOOK_SECONDS, WalObjects
from tailrace.system.backoff import wait

__all__ = ["Cursor", "WalFile", "WalReader", "WalRow"]

RowKind: TypeAlias = Literal["value", "merge", "tombstone"]
StoreAddress: TypeAlias = str | Path | Mapping[str, object] | ObjectStore

_KINDS: dict[int, RowKind] = {VALUE: "value", MERGE: "merge", TOMBSTONE: "tombstone"}
_SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "azure": "azure", "abfs": "azure"}


class WalRow(NamedTuple):
    """One row as it was written. Rows of one write batch share their `seq`; times are in milliseconds since 1970.

    `value` is the operand of a `merge`, and None of a `tombstone`.
    """

    key: bytes
    kind: RowKind
    value: bytes | None
    seq: int
    create_ts: int | None
    expire_ts: int | None


@dataclass(frozen=True)
class WalFile:
    """A WAL file, which may not be there: not yet, or no longer. Size and time are known of files that were listed."""

    id: int
    size_bytes: int | None = None
    last_modified: datetime | None = None
    _database: SlateDbDatabase | None = field(default=None, repr=False)

    def rows(self) -> list[WalRow] | None:
        """Its rows in the order of `seq`; no rows for the file a new writer begins with. None when it is not there."""
        assert self._database is not None
        if not _is_there(self._database, self.id):
            return None
        try:
            [batch] = read_files(self._database, self.id, self.id)
        except CollectedError:
            return None
        kinds = [_KINDS[kind] for kind in batch.column("kind").to_pylist()]
        names = ("value", "seq", "create_ts", "expire_ts")
        values = zip(*(batch.column(name).to_pylist() for name in names), strict=True)
        keys = batch.column("key").to_pylist()
        return [WalRow(key, kind, *rest) for key, kind, rest in zip(keys, kinds, values, strict=True)]


def _is_there(database: SlateDbDatabase, number: int) -> bool:
    if number < 1:
        return False
    if database.is_shared:
        return WalObjects(database).has(number)
    try:
        return find_tail(database, number - 1) >= number
    except CollectedError:
        return False


@dataclass(frozen=True)
class Cursor:
    """How far a WAL was read: up to `last_seq` in the file `wal_id`. As text `WAL_ID:SEQ`.

    All rows of a write batch have the same `seq`, so a cursor moves only when the whole batch was handled.
    """

    wal_id: int = 0
    last_seq: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """The cursor of `WAL_ID:SEQ`, or of `WAL_ID`, which is before the first row of that file.

        Raises ValueError for other text.
        """
        wal_id, _, seq = text.partition(":")
        if not wal_id.isascii() or not wal_id.isdigit() or not (seq or "0").isascii() or not (seq or "0").isdigit():
            raise ValueError("a cursor is WAL_ID or WAL_ID:SEQ")
        return cls(int(wal_id), int(seq or 0))

    def __str__(self) -> str:
        return f"{self.wal_id}:{self.last_seq}"

    def unseen(self, file: WalFile) -> Iterator[WalRow]:
        """The rows of the file that come after the cursor; none of a file that is not there."""
        return (row for row in file.rows() or () if not self.has_seen(file.id, row))

    def has_seen(self, wal_id: int, row: WalRow) -> bool:
        return wal_id < self.wal_id or (wal_id == self.wal_id and row.seq <= self.last_seq)

    def after(self, file: WalFile, rows: Sequence[WalRow] | None = None) -> Self:
        """The cursor once all rows of the file were handled; give the `rows` if they were read already."""
        found = file.rows() if rows is None else rows
        return type(self)(file.id, max([self.last_seq, *(row.seq for row in found or ())]))


class WalReader:
    """Reads the WAL of the database at `path`. It needs no connection to the writer, and changes nothing.

    `store` is a folder, a URL such as `s3://bucket`, `gs://bucket` or `az://container`, or the mapping that a pipeline
    file has under `store:`. A database with a separate store for its WAL needs `wal_store` as well. Raises ConfigError
    for a store that cannot be understood.
    """

    def __init__(self, path: str, store: StoreAddress, wal_store: StoreAddress | None = None) -> None:
        self._database = SlateDbDatabase(path, _store(store), _store(wal_store) if wal_store is not None else None)
        self._objects = WalObjects(self._database)

    def list(self, start: int = 0, end: int | None = None) -> list[WalFile]:
        """The files there are now, `end` excluded, in the order of their ids. Lists the store: costly if often done."""
        return [WalFile(one.number, one.bytes, one.modified, self._database) for one in self._objects.list(start, end)]

    def get(self, id: int) -> WalFile:  # noqa: A002 - what SlateDB calls it
        """The file of this id, without asking the store: its `rows` are None if it is not there."""
        return WalFile(id, _database=self._database)

    def tail(
        self,
        cursor: Cursor | None = None,
        *,
        follow: bool = False,
        poll_seconds: float = 1.0,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[WalFile, Sequence[WalRow]]]:
        """Every file with its rows after the cursor, in order; with `follow` it waits for the next file, and so on.

        Lists the store once, then asks for each file by its id: one request every `poll_seconds` while there is none.
        Raises LostError when a file after the cursor was deleted before it was read.
        """
        cursor = cursor or Cursor()
        listed = self.list(start=cursor.wal_id)
        first = listed[0].id if listed else max(cursor.wal_id, 1)
        if cursor.wal_id and not cursor.last_seq and first > cursor.wal_id:
            raise _lost(cursor)
        if not listed and cursor.wal_id:
            self._require_next(cursor, first)
        number = first
        is_checked = not cursor.last_seq or first <= cursor.wal_id
        looked = time.monotonic()
        while not should_stop():
            file = self.get(number)
            rows = file.rows()
            if rows is None:
                if listed and number <= listed[-1].id:
                    raise _lost(cursor)
                if time.monotonic() - looked > LOOK_SECONDS:
                    self._require_next(cursor, number)
                    looked = time.monotonic()
                if not follow:
                    return
                wait(poll_seconds, should_stop)
                continue
            if rows and not is_checked:
                # The file of the cursor is gone: only the numbers show whether the rest of it was read.
                if rows[0].seq > cursor.last_seq + 1:
                    raise _lost(cursor)
                is_checked = True
            unseen = [row for row in rows if not cursor.has_seen(number, row)]
            cursor = cursor.after(file, rows)
            yield file, unseen
            number += 1

    def _require_next(self, cursor: Cursor, number: int) -> None:
        """Raise LostError when the file is not missing because it is still to come."""
        if _is_there(self._database, number - 1):
            return  # files are deleted in their order
        try:
            is_newer = find_tail(self._database, number - 1) > number
        except CollectedError as error:
            raise _lost(cursor) from error
        if is_newer and not _is_there(self._database, number):
            raise _lost(cursor)


def _lost(cursor: Cursor) -> LostError:
    return LostError(
        f"SlateDB deleted WAL files after {cursor} before they were read: changes are lost",
        fix="read the database again as a whole, and go on from a file that is there; a larger min_age of the writer's"
        " WAL garbage collection prevents it",
    )


def _store(address: StoreAddress) -> ObjectStore:
    if isinstance(address, ObjectStore):
        return address
    if isinstance(address, Mapping):
        try:
            return ObjectStore.from_options(ObjectStoreOptions.model_validate(dict(address)))
        except ValueError as error:
            raise ConfigError("the store is not described as in a pipeline file", fix="see docs/slatedb.md") from error
    text = str(address)
    scheme, separator, _ = text.partition("://")
    if not separator:
        return ObjectStore("local", text)
    parts = urlsplit(text)
    if scheme == "file":
        return ObjectStore("local", parts.path)
    if scheme not in _SCHEMES or not parts.netloc or parts.path.strip("/"):
        raise ConfigError(
            f"{scheme}:// with this path is no store", fix="use a folder, s3://BUCKET, gs://BUCKET or az://CONTAINER"
        )
    return ObjectStore(_SCHEMES[scheme], parts.netloc)
