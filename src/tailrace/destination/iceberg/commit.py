"""The commit that makes a batch visible: new columns, rows and the batch's number in one step, or nothing.

PyIceberg has no commit that adds data and deletes at once. So the manifests of the new snapshot are written here, with
PyIceberg's own writers, and given to the catalog's `commit_table`, which neither retries nor merges: what was computed
from a table that has changed meanwhile must be computed again.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pyiceberg.exceptions import CommitFailedException
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriter,
    ManifestWriterV2,
    write_manifest_list,
)
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH, SnapshotRefType
from pyiceberg.table.snapshots import (
    Operation,
    Snapshot,
    SnapshotSummaryCollector,
    Summary,
    update_snapshot_summaries,
)
from pyiceberg.table.update import (
    AddSchemaUpdate,
    AddSnapshotUpdate,
    AssertCurrentSchemaId,
    AssertRefSnapshotId,
    AssertTableUUID,
    RemoveSnapshotsUpdate,
    SetCurrentSchemaUpdate,
    SetPropertiesUpdate,
    SetSnapshotRefUpdate,
    TableUpdate,
)

from tailrace.destination import Batch
from tailrace.destination.iceberg.column import TableColumns
from tailrace.destination.iceberg.snapshot import COLUMNS, IcebergSnapshot, ListedManifest, batch_property
from tailrace.errors import OwnedError
from tailrace.system import failpoint
from tailrace.system.phase import phase

MOST_MANIFESTS = 12
"""Once there are more manifests of data files, the small ones become one: readers open them all."""
SMALL_MANIFEST = 1_000
"""A manifest with fewer files is small."""
_CODEC: Literal["deflate"] = "deflate"


class IcebergConflictError(Exception):
    """Another writer changed the table during this commit; what was computed from the table must be computed again."""


@dataclass(frozen=True)
class IcebergChange:
    """What one commit changes.

    adds, removes    data files and files of deletes
    columns          the columns afterwards; None: as they are
    changes_rows     False for a commit that only moves rows to other files
    """

    adds: Sequence[DataFile] = ()
    removes: Sequence[ManifestEntry] = ()
    columns: TableColumns | None = None
    changes_rows: bool = True
    properties: Mapping[str, str] = field(default_factory=dict)


class _DeleteManifestWriter(ManifestWriterV2):
    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


@phase("commit")
def commit(before: IcebergSnapshot, change: IcebergChange, batch: Batch | None, snapshots: int) -> int:
    """Commit a change on top of `before`, with the batch that brings it. Durable when it returns the new version.

    `snapshots` is how many stay listed. Raises OwnedError when another runner committed a batch of the same pipeline
    meanwhile, IcebergConflictError when any other writer committed.
    """
    handle = before.handle
    metadata = handle.metadata
    updates: list[TableUpdate] = []
    properties = dict(change.properties)
    if change.columns is not None:
        if change.columns.schema.as_struct() != metadata.schema().as_struct():
            number = _next_schema_id(metadata)
            schema = Schema(*change.columns.schema.fields, schema_id=number)
            updates += [AddSchemaUpdate(schema=schema), SetCurrentSchemaUpdate.model_validate({"schema-id": number})]
        properties[COLUMNS] = change.columns.kept.to_json()
    if batch is not None:
        properties[batch_property(batch.pipeline)] = batch.mark
    if properties:
        updates.append(SetPropertiesUpdate(updates=properties))
    version = before.version
    if change.adds or change.removes:
        writer = _SnapshotWriter(before, change)
        updates += writer.updates()
        version += 1
        updates += _expired(metadata, snapshots)
    current = metadata.current_snapshot_id
    requirements = (
        AssertTableUUID(uuid=metadata.table_uuid),
        AssertRefSnapshotId.model_validate({"ref": MAIN_BRANCH, "snapshot-id": current}),
        AssertCurrentSchemaId.model_validate({"current-schema-id": metadata.current_schema_id}),
    )
    failpoint.reach("iceberg.before_commit")
    try:
        handle.catalog.commit_table(handle, requirements, tuple(updates))
    except CommitFailedException as error:
        _require_alone(before, batch)
        raise IcebergConflictError(str(error)) from error
    failpoint.reach("iceberg.committed")
    return version


def _require_alone(before: IcebergSnapshot, batch: Batch | None) -> None:
    if batch is None:
        return
    now = IcebergSnapshot(before.handle.catalog.load_table(before.handle.name()), before.table)
    last, known = now.last_batch(batch.pipeline), before.last_batch(batch.pipeline)
    if last is not None and last.id >= batch.id and (known is None or last.is_other(known)):
        raise OwnedError(
            f"another runner wrote batch {last.id} of pipeline {batch.pipeline}",
            table=str(before.table),
            fix="stop the other runner of this pipeline, or this one",
        )


def _next_schema_id(metadata: TableMetadata) -> int:
    return max(each.schema_id for each in metadata.schemas) + 1


def _expired(metadata: TableMetadata, most: int) -> list[TableUpdate]:
    """Take the oldest snapshots off the list, so that with a new one there are `most`. Those with a name stay."""
    named = {each.snapshot_id for each in metadata.refs.values()} | {metadata.current_snapshot_id}
    others = sorted(
        (each for each in metadata.snapshots if each.snapshot_id not in named), key=lambda each: each.timestamp_ms
    )
    gone = others[: max(len(metadata.snapshots) + 1 - max(most, 2), 0)]
    if not gone:
        return []
    return [RemoveSnapshotsUpdate.model_validate({"snapshot-ids": [each.snapshot_id for each in gone]})]


class _SnapshotWriter:
    """Writes the manifests of one new snapshot."""

    def __init__(self, before: IcebergSnapshot, change: IcebergChange) -> None:
        self.before = before
        self.change = change
        self.handle: Table = before.handle
        metadata = self.handle.metadata
        self.id = metadata.new_snapshot_id()
        self.parent = metadata.current_snapshot()
        self.sequence = metadata.next_sequence_number()
        self.schema, self.schema_id = metadata.schema(), metadata.current_schema_id
        if change.columns is not None and change.columns.schema.as_struct() != self.schema.as_struct():
            self.schema, self.schema_id = change.columns.schema, _next_schema_id(metadata)
        self._uuid = uuid.uuid4()
        self._written = 0

    def updates(self) -> list[TableUpdate]:
        listed = self._list(self._manifests())
        metadata = self.handle.metadata
        snapshot = Snapshot.model_validate(
            {
                "snapshot-id": self.id,
                "parent-snapshot-id": self.parent.snapshot_id if self.parent is not None else None,
                "sequence-number": self.sequence,
                "timestamp-ms": max(int(time.time() * 1000), metadata.last_updated_ms),
                "manifest-list": listed,
                "summary": self._summary(),
                "schema-id": self.schema_id,
            }
        )
        branch = {"ref-name": MAIN_BRANCH, "type": SnapshotRefType.BRANCH, "snapshot-id": self.id}
        return [AddSnapshotUpdate(snapshot=snapshot), SetSnapshotRefUpdate.model_validate(branch)]

    def _manifests(self) -> list[ManifestFile]:
        removed = {entry.data_file.file_path for entry in self.change.removes}
        found: list[ManifestFile] = []
        for content in (ManifestContent.DATA, ManifestContent.DELETES):
            is_data = content == ManifestContent.DATA
            adds = [each for each in self.change.adds if (each.content == DataFileContent.DATA) == is_data]
            listed = [each for each in self.before.manifests if each.manifest.content == content]
            merges = bool(adds) and (not is_data or len(listed) >= MOST_MANIFESTS)
            written, kept = _split(listed, removed, merges=merges)
            found += kept
            entries = [entry for each in written for entry in each.entries]
            if adds or entries:
                found.append(self._write(content, adds, entries, removed))
        return found

    def _write(
        self, content: ManifestContent, adds: Sequence[DataFile], entries: Sequence[ManifestEntry], removed: set[str]
    ) -> ManifestFile:
        kind = ManifestWriterV2 if content == ManifestContent.DATA else _DeleteManifestWriter
        self._written += 1
        path = f"{self.before.folder.location}/metadata/{self._uuid}-m{self._written}.avro"
        writer: ManifestWriter = kind(
            self.handle.metadata.spec(), self.schema, self.handle.io.new_output(path), self.id, _CODEC
        )
        with writer:
            for file in adds:
                writer.add_entry(
                    ManifestEntry.from_args(
                        status=ManifestEntryStatus.ADDED,
                        snapshot_id=self.id,
                        sequence_number=None,
                        file_sequence_number=None,
                        data_file=file,
                    )
                )
            for entry in entries:
                (writer.delete if entry.data_file.file_path in removed else writer.existing)(entry)
        return writer.to_manifest_file()

    def _list(self, manifests: Iterable[ManifestFile]) -> str:
        path = f"{self.before.folder.location}/metadata/snap-{self.id}-0-{self._uuid}.avro"
        parent = self.parent.snapshot_id if self.parent is not None else None
        with write_manifest_list(2, self.handle.io.new_output(path), self.id, parent, self.sequence, _CODEC) as writer:
            writer.add_manifests(list(manifests))
        return path

    def _summary(self) -> Summary:
        collector = SnapshotSummaryCollector()
        for file in self.change.adds:
            collector.add_file(file, self.schema)
        for entry in self.change.removes:
            collector.remove_file(entry.data_file, self.schema)
        is_append = not self.change.removes and all(each.content == DataFileContent.DATA for each in self.change.adds)
        operation = Operation.APPEND if is_append else Operation.OVERWRITE
        previous = self.parent.summary if self.parent is not None else None
        found = update_snapshot_summaries(
            Summary(operation=operation, **collector.build()),
            previous.additional_properties if previous is not None else None,
        )
        return found if self.change.changes_rows else found.model_copy(update={"operation": Operation.REPLACE})


def _split(
    listed: Sequence[ListedManifest], removed: set[str], *, merges: bool
) -> tuple[list[ListedManifest], list[ManifestFile]]:
    """The manifests that are written again, as one, and those that stay."""
    written: list[ListedManifest] = []
    kept: list[ManifestFile] = []
    for each in listed:
        changes = any(entry.data_file.file_path in removed for entry in each.entries)
        if changes or (merges and len(each.entries) < SMALL_MANIFEST):
            written.append(each)
        elif each.entries:
            kept.append(each.manifest)
    return written, kept
