"""`IcebergDestination`: one commit for every table and batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from tailrace.destination import CopyMode, Destination, Stage, Staged, TableBatch, Written, chunking, copy
from tailrace.destination.chunking import ChangePart, parts
from tailrace.destination.iceberg import maintenance, preflight
from tailrace.destination.iceberg.catalog import create_table, reaching
from tailrace.destination.iceberg.column import IcebergEvolution, IcebergLayout, evolve, new_columns, replace_columns
from tailrace.destination.iceberg.commit import IcebergChange, IcebergConflictError, commit
from tailrace.destination.iceberg.merge import Merge, WorkingFile
from tailrace.destination.iceberg.option import IcebergOptions
from tailrace.destination.iceberg.reader import read_rows
from tailrace.destination.iceberg.snapshot import (
    COLUMNS,
    COMMENT,
    MARK,
    IcebergSnapshot,
    mean_row_bytes,
    warehouse_folder,
)
from tailrace.destination.metadata import now
from tailrace.destination.preflight import as_errors
from tailrace.errors import Finding, TableError, UnavailableError
from tailrace.model.change import EXACT, Changes
from tailrace.model.collapse import Collapsed, any_exact, collapse
from tailrace.model.last_batch import LastBatch
from tailrace.model.schema import TableName, TableSchema
from tailrace.model.table_rows import TableRows

_TRIES = 5
_PROPERTIES = {
    COMMENT: MARK,
    # What was computed from a table that has changed meanwhile must never be committed.
    "commit.retry.num-retries": "0",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
}


class IcebergDestination(IcebergOptions, Destination):
    """Keeps each table as an Iceberg table; the catalog is opened inside its methods.

    `deletes: soft` keeps deleted rows with `_tailrace_deleted_at` set, until the key is inserted again.
    A table without a key is a log: every change is a row, with its operation and position.
    A value that its column cannot hold stands as text in `_tailrace_exact`; that column comes with the first such
    value.
    """

    type: Literal["iceberg"] = "iceberg"
    copy_mode: ClassVar[CopyMode] = "own"

    @property
    def name(self) -> str:
        return f"iceberg {self.warehouse}"

    def shared_folders(self) -> dict[str, Path]:
        folder = warehouse_folder(self)
        return {} if folder is None else {"destination.warehouse": folder}

    def check(self, tables: Sequence[TableSchema] | None) -> list[Finding]:
        """Check whether these tables can be kept here. Creates nothing."""
        return preflight.check(self, tables or ())

    def check_columns(self, table: TableSchema) -> list[Finding]:
        return as_errors(table, preflight.unkept_columns(table))

    def write_changes(self, batch: TableBatch) -> Written:
        """Make the batch visible in one commit. A batch that the table holds already changes nothing.

        Rows copied into a table that already holds rows are held back until the batch that completes the copy. Nothing
        is committed when there is nothing to write and the table already has the columns of `batch.table`. Raises
        OwnedError when another runner of the pipeline committed meanwhile, UnavailableError when the catalog or the
        storage does not answer, TableError when this table cannot go on.
        """
        table = batch.table
        with reaching(self, str(table.table)):
            before = IcebergSnapshot.load(self, table.table)
            if before is None and not batch.begins_copy:
                copy.require_unknown(batch, self.warehouse, root=warehouse_folder(self))
            last = before.last_batch(batch.pipeline) if before is not None else None
            if batch.is_repeat(last):
                _discard_copy(batch, [])
                return Written(repeated=True, last=last)
            pieces = parts(
                batch.log,
                table,
                chunking.PART_BYTES,
                row_bytes=lambda: mean_row_bytes(before.files) if before is not None else 0,
                keep_deleted=self.deletes == "soft",
            )
            part = next(pieces, None)
            held = _held(batch)
            replaces_rows = batch.begins_copy and before is not None and bool(before.files)
            if not batch.completes_copy and (replaces_rows or (held and batch.staged)):
                if part is not None:
                    raise copy.early_changes_error(table.table)
                _hold(batch)
                return Written(last=last)
            staged = [*held, *batch.staged]
            clears = batch.begins_copy or bool(held)
            layout = IcebergLayout(table, self.metadata, self.deletes == "soft")
            if before is not None and not (clears or staged or part):
                if not _evolve(layout, before, exact=False, clears=False).changes:
                    return Written(last=last)
            elif before is None and not (batch.copies or part):
                return Written(last=last)
            work = _Work(batch, layout, replace(batch, staged=staged), clears, part, pieces)
            written = self._write(work, before)
            _discard_copy(batch, held)
            return written

    def _write(self, work: _Work, before: IcebergSnapshot | None) -> Written:
        batch = work.batch
        for _ in range(work.tries):
            if before is None:
                before = self._create(work.layout)
            try:
                return self._write_once(work, before)
            except IcebergConflictError as conflict:
                problem = conflict
                before = IcebergSnapshot.load(self, batch.table.table)
        message = f"another writer changed the Iceberg table while batch {batch.id} was written: {problem}"
        if work.tries == 1:
            raise UnavailableError(f"{message}; the batch is done again", table=str(batch.table.table))
        raise TableError(
            message, table=str(batch.table.table), fix=f"stop the other writer of {batch.table.table} in the catalog"
        )

    def _create(self, layout: IcebergLayout) -> IcebergSnapshot:
        columns = new_columns(layout, exact=False)
        properties = {**_PROPERTIES, COLUMNS: columns.kept.to_json()}
        found = IcebergSnapshot(create_table(self, layout.table.table, columns.schema, properties), layout.table.table)
        found.require_own()
        return found

    def _write_once(self, work: _Work, before: IcebergSnapshot) -> Written:
        """Write the files of one part after the other, each on top of those before it, then commit once."""
        batch, layout = work.batch, work.layout
        evolution = _evolve(layout, before, exact=False, clears=work.clears)
        merge = Merge(
            before.folder,
            layout,
            evolution.columns,
            now(),
            [WorkingFile.of(file) for file in before.files],
        )
        if work.clears:
            merge.clear()
        elif evolution.rewrites:
            merge.rewrite(evolution)
        written = Written()
        for piece in work.pieces(self.deletes == "soft"):
            if piece.has_exact and EXACT not in merge.columns.own:
                evolution = _evolve(layout, before, exact=True, clears=work.clears)
                merge.columns = evolution.columns
            if isinstance(piece.work, Collapsed):
                done = merge.apply(piece.work, batch.refetch)
            else:
                merge.append(piece.work)
                done = Written(sum(map(len, piece.work)), sum(map(len, piece.work)))
            written += done if piece.is_log else Written(upserts=done.upserts)
        adds = merge.finish()
        columns = evolution.columns if evolution.changes else None
        change = IcebergChange(adds, merge.removes, columns)
        version = commit(before, change, batch.batch, self.snapshots)
        return replace(written, last=replace(batch.batch.last, version=version))

    def last_batch(self, table: TableName, pipeline: str) -> LastBatch | None:
        with reaching(self, str(table)):
            snapshot = IcebergSnapshot.load(self, table)
            if snapshot is None and (root := warehouse_folder(self)) is not None and not root.is_dir():
                raise copy.missing_root(root, table)
            return snapshot.last_batch(pipeline) if snapshot is not None else None

    def read_table(self, table: TableSchema) -> TableRows:
        return read_rows(self, table)

    def maintain(self, table: TableName) -> str | None:
        """Merge small files, leave out deleted rows and delete unneeded files if that is due."""
        with reaching(self, str(table)):
            return maintenance.maintain(self, table)

    def maintain_now(self, table: TableName) -> str | None:
        """Merge all small files, leave out all deleted rows and delete what the retention allows."""
        with reaching(self, str(table)):
            return maintenance.maintain(self, table, everything=True)


@dataclass
class _Piece:
    """Changes that are applied together: collapsed where the table has a key."""

    work: Collapsed | list[Changes]
    is_log: bool

    @property
    def has_exact(self) -> bool:
        return self.work.has_exact if isinstance(self.work, Collapsed) else any_exact(self.work)


@dataclass
class _Work:
    """What a batch does to its table: the copied rows, then the log. The log can be read once."""

    batch: TableBatch
    layout: IcebergLayout
    copied: TableBatch
    clears: bool
    first: ChangePart | None
    more: Iterator[ChangePart]

    def __post_init__(self) -> None:
        # Each part of a log that is larger is given away once it is written, so it cannot be applied again.
        self.tries = _TRIES if self.first is None or self.first.is_last else 1

    def pieces(self, keep_deleted: bool) -> Iterator[_Piece]:
        table = self.layout.table
        copied = parts(self.copied.copied(), table, chunking.PART_BYTES, row_bytes=lambda: 0, keep_deleted=keep_deleted)
        for part in copied:
            yield self._piece(part.chunks, False, keep_deleted)
        if self.first is None:
            return
        yield self._piece(self.first.chunks, True, keep_deleted)
        for part in self.more:
            yield self._piece(part.chunks, True, keep_deleted)

    def _piece(self, chunks: list[Changes], is_log: bool, keep_deleted: bool) -> _Piece:
        table = self.layout.table
        return _Piece(collapse(chunks, table, keep_deleted=keep_deleted) if table.key else chunks, is_log)


def _evolve(layout: IcebergLayout, before: IcebergSnapshot, *, exact: bool, clears: bool) -> IcebergEvolution:
    last_id = before.metadata.last_column_id
    if clears:
        return replace_columns(before.columns, layout, last_id, exact=exact)
    return evolve(before.columns, layout, last_id, exact=exact)


# -- copies into a table that holds rows -----------------------------------------------------------------------


def _held(batch: TableBatch) -> list[Staged]:
    """The rows that earlier batches of this copy held back."""
    if batch.begins_copy or not batch.copies or batch.stage is None:
        return []
    notes = copy.copy_notes(batch.stage.notes(batch.table.table), batch.batch)
    return [Staged(**receipt) for note in notes for receipt in note.receipts]


def _hold(batch: TableBatch) -> None:
    assert batch.stage is not None, "a copy has a stage"
    notes = batch.stage.notes(batch.table.table)
    copy.hold(notes, batch, [asdict(one) for one in batch.staged])
    if batch.begins_copy:
        _give_up(batch, batch.stage)


def _give_up(batch: TableBatch, stage: Stage) -> None:
    given_up = copy.give_up(stage.notes(batch.table.table), batch.batch)
    stage.discard(Staged(**receipt) for note in given_up for receipt in note.receipts)


def _discard_copy(batch: TableBatch, held: Iterable[Staged]) -> None:
    """Delete what the batch made visible."""
    if batch.stage is None or not batch.copies:
        return
    batch.stage.discard([*held, *batch.staged])
    if batch.begins_copy or batch.completes_copy:
        _give_up(batch, batch.stage)
