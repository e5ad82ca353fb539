"""The transaction log of one Delta table: what it holds now, and the one commit that makes a batch visible."""

from __future__ import annotations

import datetime
import errno
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, Schema, TableFeatures
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import (
    AddAction,
    CommitProperties,
    RemoveAction,
    Transaction,
    create_table_with_add_actions,
)

from tailrace.destination import Batch
from tailrace.destination.delta.column import delta_type
from tailrace.destination.delta.data_file import DataFile, partition_text
from tailrace.destination.delta.table_folder import OWN, TablePath
from tailrace.errors import OwnedError, TableError, UnavailableError
from tailrace.system import failpoint

MARK = "Kept by tailrace. Others may optimize it but must not change its rows."
LOG = "_delta_log"
_LAST_CHECKPOINT = "_last_checkpoint"
CONFIGURATION: Mapping[str, str] = {
    # Thousands of small commits a day: a reader opens the last checkpoint and at most this many commits.
    "delta.checkpointInterval": "50",
    "delta.logRetentionDuration": "interval 1 days",
    "delta.enableExpiredLogCleanup": "true",
    # Checkpoints list removed files this long; small batches remove some each, and a checkpoint must stay small.
    "delta.deletedFileRetentionDuration": "interval 2 hours",
}
_synced: dict[str, int] = {}
"""By the table's id, the version up to which this process has made the table's log durable."""


class ConflictError(Exception):
    """Another writer changed the table during this commit; what was computed from the table must be computed again."""


@dataclass(frozen=True)
class DeltaSnapshot:
    """A Delta table at one version."""

    place: TablePath
    table: str
    handle: DeltaTable

    @classmethod
    def load(cls, place: TablePath, table: str) -> DeltaSnapshot | None:
        """The table now, None if there is none. Raises TableError for one that tailrace did not make."""
        try:
            if place.is_file():
                raise TableNotFoundError
            handle = _opened(place)
        except TableNotFoundError:
            if problem := foreign_content(place):
                raise TableError(problem, table=table, fix=f"move {place.uri} away, or choose another path") from None
            return None
        if handle.metadata().description != MARK:
            raise TableError(
                f"the Delta table at {place.uri} was not made by tailrace",
                table=table,
                fix=f"move {place.uri} away, or choose another path",
            )
        return cls(place, table, handle)

    def has(self, batch: Batch) -> bool:
        """Whether this batch, or a later one of its pipeline, is in the table."""
        return batch.is_repeat(self.handle.transaction_version(app_id(batch)))

    @cached_property
    def schema(self) -> pa.Schema:
        raw = pa.schema(self.handle.schema().to_arrow())
        return pa.schema([pa.field(f.name, delta_type(f.type), metadata=f.metadata) for f in raw])

    @cached_property
    def partition_by(self) -> tuple[str, ...]:
        return tuple(self.handle.metadata().partition_columns)

    def files(self, key: Sequence[str | None] = ()) -> list[DataFile]:
        """The table's files; with the bounds of a key, by its names in the files, that is one whole number or date.

        Raises TableError when another writer left a file there that tailrace cannot take out again.
        """
        adds = pa.table(self.handle.get_add_actions(flatten=True))
        count = adds.num_rows
        if others := [path for path in adds.column("path").to_pylist() if not path.isascii()]:
            # delta-rs escapes such a name when it removes the file. No reader recognizes the escaped name, so the old
            # rows would stay next to the rewritten ones.
            raise TableError(
                f"another writer gave a file of {self.place.uri} a name that delta-rs cannot remove: {others[0]}",
                table=self.table,
                fix=f"move {self.place.uri} away, then copy the table again: tailrace resync FILE {self.table}",
            )

        def column(name: str) -> list[Any]:
            return adds.column(name).to_pylist() if name in adds.schema.names else [None] * count

        low, high = (
            (column(f"min.{key[0]}"), column(f"max.{key[0]}")) if len(key) == 1 else ([None] * count, [None] * count)
        )
        partitions = {name: column(f"partition.{name}") for name in self.partition_by}
        return [
            DataFile(
                path,
                size,
                self._count(path) if rows is None else rows,
                partition={name: partition_text(values[index]) for name, values in partitions.items()},
                low=_bound(low[index]),
                high=_bound(high[index]),
            )
            for index, (path, size, rows) in enumerate(
                zip(column("path"), column("size_bytes"), column("num_records"), strict=True)
            )
        ]

    def sync(self) -> None:
        """Make the log durable up to this version, which delta-rs and other writers leave to the operating system.

        Versions that this process has already made durable cost nothing.
        """
        version, table_id = self.handle.version(), str(self.handle.metadata().id)
        if not self.place.is_local or _synced.get(table_id, -1) >= version:
            return
        failpoint.reach("delta.before_sync")
        # The previous process may have been killed between a commit and this call.
        first = _synced[table_id] + 1 if table_id in _synced else _checkpoint(self.place)
        for number in range(first, version + 1):
            for ending in ("json", "checkpoint.parquet"):
                self.place.sync_file(f"{LOG}/{number:020}.{ending}")
        self.place.sync_file(f"{LOG}/{_LAST_CHECKPOINT}")
        self.place.sync(LOG)
        _synced[table_id] = version

    def _count(self, path: str) -> int:
        return int(pq.read_metadata(self.place.open(path)).num_rows)


def _checkpoint(place: TablePath) -> int:
    """The version of the last checkpoint: a reader needs nothing before it."""
    try:
        return int(json.loads(Path(place.base, LOG, _LAST_CHECKPOINT).read_bytes())["version"])
    except (FileNotFoundError, ValueError):
        return 0


def _opened(place: TablePath) -> DeltaTable:
    return DeltaTable(place.uri, storage_options=dict(place.options) or None)


def _needs_clock(schema: pa.Schema, handle: DeltaTable) -> bool:
    """Whether a table must first enable timestamps without a zone, which Delta counts as a feature."""
    features = handle.protocol().reader_features or []
    return "timestampNtz" not in features and "timestamp[us]" in str(schema.types)


def app_id(batch: Batch) -> str:
    return f"tailrace/{batch.pipeline}"


def foreign_content(place: TablePath) -> str | None:
    """Why a table cannot be created here: the place holds something that tailrace did not make. None if it does not."""
    if place.is_file():
        return f"{place.uri} is a file, not a directory"
    others = [name for name in place.names() if name != OWN and not _is_data(place, name)]
    # A log directory without a commit is what a crash before the very first one leaves.
    if others == [LOG]:
        return None
    return f"{place.uri} holds files that are no Delta table" if others else None


def _is_data(place: TablePath, name: str) -> bool:
    """Whether this is a data file, or the folder of a partition with nothing else in it."""
    files = place.names_below(name) if "=" in name else [name]
    return all(file.startswith("part-") and file.endswith(".parquet") for file in files)


def commit(
    place: TablePath,
    table: str,
    before: DeltaSnapshot | None,
    schema: pa.Schema,
    partition_by: Sequence[str],
    adds: Sequence[AddAction],
    removes: Sequence[RemoveAction],
    batch: Batch | None,
    *,
    added: Sequence[pa.Field[Any]] = (),
    replace: bool = False,
) -> None:
    """Add and remove these files in one commit that carries the batch; with `replace`, everything else goes too.

    `added` are columns of the schema that the table lacks. delta-rs adds columns or files in a commit, not both,
    unless it replaces all files; otherwise a commit that only adds the columns comes first, and a repeat skips it.
    Durable when it returns. Raises OwnedError when another runner committed a batch of the same pipeline meanwhile,
    ConflictError when any other writer committed.
    """
    properties = CommitProperties(
        # The commit is the very next version or fails: delta-rs does not treat an OPTIMIZE in between as a conflict,
        # and the files it merged would be there twice.
        max_commit_retries=0,
        app_transactions=[Transaction(app_id(batch), batch.id)] if batch else None,
        custom_metadata={"tailrace.batch": str(batch.id)} if batch else None,
    )
    delta_schema = Schema.from_arrow(schema)
    try:
        if before is not None and before.partition_by == tuple(partition_by):
            if replace and _needs_clock(schema, before.handle):
                before.handle.alter.add_feature(
                    TableFeatures.TimestampWithoutTimezone, allow_protocol_versions_increase=True
                )
            alone = not (adds or removes)
            if added and not replace:
                before.handle.alter.add_columns(
                    Schema.from_arrow(pa.schema(list(added))).fields,
                    commit_properties=properties if alone else CommitProperties(max_commit_retries=0),
                )
                # On disk before the rows: a power cut must not undo the columns alone.
                DeltaSnapshot(place, table, _opened(place)).sync()
                failpoint.reach("delta.columns_added")
            if replace or not (added and alone):
                before.handle.create_write_transaction(
                    list(adds) if replace else [*adds, *removes],
                    "overwrite" if replace else "append",
                    delta_schema if replace else before.handle.schema(),
                    list(partition_by),
                    commit_properties=properties,
                )
        else:
            create_table_with_add_actions(
                place.uri,
                delta_schema,
                list(adds),
                mode="error" if before is None else "overwrite",
                partition_by=list(partition_by),
                name=table,
                description=MARK,
                configuration=CONFIGURATION,
                storage_options=dict(place.options) or None,
                commit_properties=properties,
            )
    except DeltaError as error:
        lost = isinstance(error, CommitFailedError) or _EXISTS.match(str(error)) is not None
        if not lost:
            raise
        if batch is not None:
            now = DeltaSnapshot.load(place, table)
            if now is not None and now.has(batch):
                raise OwnedError(
                    f"another runner wrote batch {batch.id} of pipeline {batch.pipeline}",
                    table=table,
                    fix="stop the other runner of this pipeline, or this one",
                ) from error
        raise ConflictError(str(error)) from error
    DeltaSnapshot(place, table, _opened(place)).sync()


# delta-rs raises most failures of a store as OSError; what is left begins with these words. Names of tables, columns
# and files come after them, so none can be taken for an outage.
_DOWN = re.compile(
    r"(?:(?:Generic error|Generic DeltaTable error|Kernel error|Transaction failed|Log storage error"
    r"|Failed to read delta log object): )*"
    r"(?:Error interacting with object store|Generic (?:S3|GCS|MicrosoftAzure|LocalFileSystem|HTTP) error)\b"
)
_EXISTS = re.compile(r"(?:Generic error: )?A (?:Delta Lake )?table already exists at")


@contextmanager
def reaching(place: TablePath, table: str) -> Iterator[None]:
    """Turn the errors of a full or read-only disk and of an unreachable object store into UnavailableError."""
    try:
        yield
    except FileNotFoundError as error:
        if not place.is_local or not Path(place.base, LOG).is_dir():
            raise _unavailable(place, table, "ENOENT") from error
        raise TableError(
            f"a file of the table is no longer in {place.uri}",
            table=table,
            fix=f"restore it, then tailrace retry FILE {table}; or tailrace resync FILE {table}",
        ) from error
    except OSError as error:
        raise _unavailable(place, table, errno.errorcode.get(error.errno or 0, "error")) from error
    except DeltaError as error:
        if _DOWN.match(str(error)):
            raise _unavailable(place, table, str(error).splitlines()[0]) from error
        raise TableError(
            f"delta-rs reported an error: {str(error).splitlines()[0]}",
            table=table,
            fix=f"check the log in {place.uri}/{LOG}; if it is damaged, move {place.uri} away, then copy the table "
            f"again: tailrace resync FILE {table}",
        ) from error


def _unavailable(place: TablePath, table: str, reason: str) -> UnavailableError:
    access = "this user may write there" if place.is_local else "the network and storage_options allow access"
    return UnavailableError(
        f"cannot use {place.uri}: {reason}",
        table=table,
        fix=f"check that {place.uri} is there and has space and that {access}; tailrace retries by itself",
    )


def _bound(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
        return (value - datetime.date(1970, 1, 1)).days
    return None
