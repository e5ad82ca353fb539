"""The commit that makes a batch visible: one new version of the log, which is the very next one or none."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version as version_of
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, Schema
from deltalake.exceptions import DeltaError

from tailrace.destination import Batch
from tailrace.destination.delta import log
from tailrace.destination.delta.data_file import DataFile
from tailrace.destination.delta.log import MARK, DeltaSnapshot, app_id, end_id
from tailrace.destination.delta.table_folder import LOG, TablePath
from tailrace.errors import OwnedError, TableError
from tailrace.system import failpoint
from tailrace.system.phase import phase

_log = logging.getLogger(__name__)

CHECKPOINT_INTERVAL = 50
CONFIGURATION: Mapping[str, str] = {
    # Thousands of small commits a day: a reader opens the last checkpoint and at most this many commits.
    "delta.checkpointInterval": str(CHECKPOINT_INTERVAL),
    "delta.logRetentionDuration": "interval 1 days",
    "delta.enableExpiredLogCleanup": "true",
    # Checkpoints list removed files this long; small batches remove some each, and a checkpoint must stay small.
    "delta.deletedFileRetentionDuration": "interval 2 hours",
}
_ENABLED = "delta.enableDeletionVectors"
VECTOR_CONFIGURATION: Mapping[str, str] = {
    _ENABLED: "true",
    # Every batch names most large files again, with another vector: the log grows faster and must be shorter.
    "delta.logRetentionDuration": "interval 2 hours",
    "delta.deletedFileRetentionDuration": "interval 15 minutes",
}
_VECTORS = "deletionVectors"
_IMPLIED = frozenset({"appendOnly", "invariants"})
"""The features that a table of writer version 2 has without listing them."""
_PLAIN: Mapping[str, Any] = {"minReaderVersion": 1, "minWriterVersion": 2}


MOVES_NO_ROWS = "tailrace.movesNoRows"
"""In the information about a commit: each row that the commit leaves alone is in the file where it was before."""


class ConflictError(Exception):
    """Another writer changed the table during this commit; what was computed from the table must be computed again."""


@dataclass(frozen=True)
class TableChange:
    """What one commit changes: `replace` removes every file that is not among `adds`.

    has_vectors     the table may have deletion vectors from now on; without it, a table whose files have none any more
                    becomes one that readers without deletion vectors can read again
    changes_rows    False for a commit that only moves rows to other files: readers of changes can skip it
    moves_rows      False for one that leaves every row it does not change in its file: a file that it removes and does
                    not add again has no living row
    """

    schema: pa.Schema
    partition_by: Sequence[str] = ()
    adds: Sequence[DataFile] = ()
    removes: Sequence[DataFile] = ()
    replace: bool = False
    has_vectors: bool = False
    changes_rows: bool = True
    moves_rows: bool = True


@phase("commit")
def commit(
    place: TablePath, table: str, before: DeltaSnapshot | None, change: TableChange, batch: Batch | None
) -> DeltaSnapshot:
    """Commit a change, with the batch that brings it, as the version after `before`. Durable when it returns.

    Raises OwnedError when another runner committed a batch of the same pipeline meanwhile, ConflictError when any other
    writer committed.
    """
    start = before if before is not None else DeltaSnapshot(place, table)
    actions = _actions_of(start, change, batch)
    body = "".join(json.dumps(action, ensure_ascii=False, separators=(",", ":")) + "\n" for action in actions).encode()
    name = f"{LOG}/{start.version + 1:020}.json"
    place.make(LOG)
    failpoint.reach("delta.before_log_entry")
    stamp = None
    try:
        stamp = place.put_new(name, body)
    except FileExistsError as error:
        # The answer to an earlier try may have been lost. No two commits have the same text.
        if place.read(name) != body:
            log.forget(place)
            _require_alone(place, table, before, batch)
            raise ConflictError(f"version {start.version + 1} was written by another program") from error
    committed = start.after(start.version + 1, actions)
    log.remember(committed, stamp)
    # Maintenance makes checkpoints, so that no batch waits for one, unless it has not come for too long.
    is_due = committed.version and committed.version % (2 * CHECKPOINT_INTERVAL) == 0
    is_late = is_due and _behind(committed) >= 2 * CHECKPOINT_INTERVAL
    if is_late or _drops_vectors(start, change):
        # A reader that knows no vectors must not need the entries that have some.
        _checkpoint(committed)
    return committed


def checkpoint_if_due(snapshot: DeltaSnapshot) -> None:
    """Write a checkpoint if the last one is many versions old. Safe next to batches, and to others that do the same."""
    if _behind(snapshot) >= CHECKPOINT_INTERVAL:
        _checkpoint(snapshot)


def _behind(snapshot: DeltaSnapshot) -> int:
    """How many versions there are since the last checkpoint, or since the first."""
    return snapshot.version - log.checkpoint_version(snapshot.place)


def _require_alone(place: TablePath, table: str, before: DeltaSnapshot | None, batch: Batch | None) -> None:
    if batch is None:
        return
    now = DeltaSnapshot.load(place, table)
    last = now.last_batch(batch.pipeline) if now is not None else None
    known = before.last_batch(batch.pipeline) if before is not None else None
    if last is not None and last.id >= batch.id and (known is None or last.is_other(known)):
        raise OwnedError(
            f"another runner wrote batch {last.id} of pipeline {batch.pipeline}",
            table=table,
            fix="stop the other runner of this pipeline, or this one",
        )


def _actions_of(before: DeltaSnapshot, change: TableChange, batch: Batch | None) -> list[dict[str, Any]]:
    now = int(time.time() * 1000)
    actions: list[dict[str, Any]] = [{"commitInfo": _information(before, change, batch, now)}]
    metadata = _metadata(before, change, now)
    protocol = _protocol(before, change, metadata["schemaString"])
    actions += [{"protocol": protocol}] if protocol != before.protocol else []
    actions += [{"metaData": metadata}] if metadata != before.metadata else []
    if batch is not None:
        marks = {app_id(batch.pipeline): batch.id}
        marks |= {} if batch.end is None else {end_id(batch.pipeline): batch.end}
        actions += [{"txn": {"appId": name, "version": value, "lastUpdated": now}} for name, value in marks.items()]
    kept = {file.identity for file in change.adds}
    removes = [one for one in before.files() if one.identity not in kept] if change.replace else change.removes
    known = {file.identity for file in before.files()}
    adds = [file for file in change.adds if file.identity not in known] if change.replace else change.adds
    actions += [{"remove": file.remove(now, data_change=change.changes_rows)} for file in removes]
    actions += [{"add": file.add(now, data_change=change.changes_rows)} for file in adds]
    return actions


def _information(before: DeltaSnapshot, change: TableChange, batch: Batch | None, now: int) -> dict[str, Any]:
    if before.version < 0:
        operation = "CREATE TABLE"
    elif not change.changes_rows:
        operation = "OPTIMIZE"
    else:
        operation = "WRITE" if change.replace else "MERGE"
    return {
        "timestamp": now,
        "operation": operation,
        "operationParameters": {},
        # delta-rs cannot read a history with a negative number in it.
        **({"readVersion": before.version} if before.version >= 0 else {}),
        "isBlindAppend": False,
        "engineInfo": f"tailrace/{version_of('tailrace')}",
        "txnId": str(uuid.uuid4()),
        **({"tailrace.batch": str(batch.id)} if batch is not None else {}),
        **({} if change.moves_rows or change.replace else {MOVES_NO_ROWS: "true"}),
    }


def _metadata(before: DeltaSnapshot, change: TableChange, now: int) -> dict[str, Any]:
    text = _schema_text(change.schema, before.table)
    new = {
        "id": str(uuid.uuid4()),
        "name": before.table,
        "description": MARK,
        "format": {"provider": "parquet", "options": {}},
        "createdTime": now,
    }
    return {
        **(before.metadata or new),
        "schemaString": text,
        "partitionColumns": list(change.partition_by),
        "configuration": _configuration(before, change),
    }


def _configuration(before: DeltaSnapshot, change: TableChange) -> dict[str, str]:
    """The table's properties. Those that someone else set stay as they are."""
    found = dict(before.configuration) or dict(CONFIGURATION)
    if change.has_vectors and not before.has_vectors:
        ours = {
            name: value for name, value in VECTOR_CONFIGURATION.items() if found.get(name) == CONFIGURATION.get(name)
        }
        return {**found, **ours, _ENABLED: "true"}
    if _drops_vectors(before, change):
        ours = {name: value for name, value in found.items() if VECTOR_CONFIGURATION.get(name) == value}
        kept = {name: value for name, value in found.items() if name not in ours}
        return {**kept, **{name: CONFIGURATION[name] for name in ours if name in CONFIGURATION}}
    return found


def _drops_vectors(before: DeltaSnapshot, change: TableChange) -> bool:
    """Whether the table had deletion vectors, has none now and is to get none."""
    return before.has_vectors and not change.has_vectors and all(file.vector is None for file in before.files())


def _protocol(before: DeltaSnapshot, change: TableChange, schema: str) -> Mapping[str, Any]:
    """The least protocol that the table needs, but never less than it has, unless it no longer has vectors."""
    wanted = {"timestampNtz"} if '"timestamp_ntz"' in schema else set()
    wanted |= {_VECTORS} if change.has_vectors else set()
    old = before.protocol or _PLAIN
    readers, writers = (set(old.get(side) or ()) for side in ("readerFeatures", "writerFeatures"))
    if _drops_vectors(before, change):
        readers, writers = readers - {_VECTORS}, writers - {_VECTORS}
        if not readers and writers <= _IMPLIED:
            return _PLAIN
    elif wanted <= readers:
        return old
    # A table with features lists them all; those of writer version 2 were implied before.
    implied = _IMPLIED if old["minWriterVersion"] < 7 and before.version >= 0 else set()
    return {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": sorted(readers | wanted),
        "writerFeatures": sorted(writers | wanted | implied),
    }


def _schema_text(schema: pa.Schema, table: str) -> str:
    """The columns as the log holds them. Raises TableError for columns that no Delta table can have."""
    folded: dict[str, str] = {}
    for name in schema.names:
        if name.lower() in folded:
            raise _unkept(table, f"{folded[name.lower()]} and {name} differ in case only")
        folded[name.lower()] = name
    try:
        return Schema.from_arrow(schema).to_json()
    except Exception as error:
        # delta-rs has no class for these. Its first line names the column.
        raise _unkept(table, str(error).splitlines()[0]) from error


def _unkept(table: str, why: str) -> TableError:
    return TableError(
        f"a Delta table cannot have these columns: {why}",
        table=table,
        fix=f"rename or retype the column upstream, then tailrace resync FILE {table}",
    )


def _checkpoint(snapshot: DeltaSnapshot) -> None:
    """Write a checkpoint and remove old log entries. The commit is durable: a failure only costs readers time."""
    place = snapshot.place
    try:
        handle = DeltaTable(place.uri, storage_options=dict(place.options) or None)
        failpoint.reach("delta.before_checkpoint")
        handle.create_checkpoint()
        failpoint.reach("delta.checkpointed")
        log.sync_checkpoint(place, handle.version())
        handle.cleanup_metadata()
    except (DeltaError, OSError) as error:
        _log.warning("%s: no checkpoint of version %d: %s", snapshot.table, snapshot.version, str(error).split("\n")[0])
    finally:
        log.look_again(place)
