"""`DeltaDestination`: staging copied rows, and one commit for every table and batch."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import ClassVar, Literal
from urllib.parse import unquote

import pyarrow as pa

from tailrace.destination import CopyMode, Destination, Stage, Staged, TableBatch, Written, copy
from tailrace.destination.chunking import parts
from tailrace.destination.delta import history, key_index, maintenance, preflight, upsert, version
from tailrace.destination.delta.column import BEFORE, DeltaLayout, retaining
from tailrace.destination.delta.commit import ConflictError, TableChange, commit
from tailrace.destination.delta.data_file import LEAST_MARKED_ROWS, DataFile, mean_row_bytes, rows_per_file, total_rows
from tailrace.destination.delta.evolution import Evolution, evolve, reading_of, require_partition
from tailrace.destination.delta.file_writer import FileWriter
from tailrace.destination.delta.history import VersionWork
from tailrace.destination.delta.key_index import DeltaTarget
from tailrace.destination.delta.log import DeltaSnapshot
from tailrace.destination.delta.option import CompactOptions, DeltaOptions, TableMode, Updates
from tailrace.destination.delta.place import place_of
from tailrace.destination.delta.projection import AS_IS, ColumnReading
from tailrace.destination.delta.reader import read_rows
from tailrace.destination.delta.store_error import reaching
from tailrace.destination.delta.table_folder import TablePath
from tailrace.destination.delta.table_lock import writing_batch
from tailrace.destination.delta.version import version_table
from tailrace.destination.metadata import now
from tailrace.destination.preflight import as_errors
from tailrace.errors import Finding, SchemaChangedError, TableError, UnavailableError
from tailrace.model.change import EXACT, UNCHANGED, Changes
from tailrace.model.collapse import Collapsed, any_exact, collapse, fit
from tailrace.model.last_batch import LastBatch
from tailrace.model.schema import TableName, TableSchema
from tailrace.model.table_rows import TableRows
from tailrace.option.table import idle, matches
from tailrace.system import failpoint

_TRIES = 5
PART_BYTES = 256 << 20
"""How much of a batch is collapsed and written at a time: usually all of it, because every part rewrites the files
that hold its keys."""
HUGE_PART_BYTES = 96 << 20
"""The same for a batch that a huge transaction made larger than that, to limit its memory."""


class DeltaDestination(DeltaOptions, Destination):
    """Keeps each table as a Delta table; files are opened inside its methods.

    `deletes: soft` keeps deleted rows with `_tailrace_deleted_at` set, until the key is inserted again.
    A table without a key is a log: every change is a row, in order, with its operation and position.
    A value that its column cannot hold stands as text in `_tailrace_exact`; that column comes with the first such
    value.
    """

    type: Literal["delta"] = "delta"
    copy_mode: ClassVar[CopyMode] = "own"

    @property
    def name(self) -> str:
        return f"delta {self.path}"

    def shared_folders(self) -> dict[str, Path]:
        root = self.path.removeprefix("file://")
        return {} if "://" in root else {"destination.path": Path(root)}

    def check(self, tables: Sequence[TableSchema] | None) -> list[Finding]:
        """Check whether these tables can be kept here. Creates nothing."""
        known = [
            (table, self.place(table.table), self._layout(table), self.updates_of(table.table))
            for table in tables or ()
        ]
        patterns = {
            "history": self.history,
            "mode": [] if isinstance(self.mode, str) else list(self.mode),
            "updates": [] if isinstance(self.updates, str) else list(self.updates),
        }
        return [
            *preflight.check(self.path, self._store_options, known),
            *(
                Finding("warning", self.path, f"{option} names {pattern}, but no table matches it", "correct it")
                for option, given in patterns.items()
                for pattern in ([] if tables is None else idle(given, (table.table for table in tables)))
            ),
        ]

    def check_columns(self, table: TableSchema) -> list[Finding]:
        return as_errors(table, preflight.unkept_columns(table))

    def mode_of(self, table: TableSchema) -> TableMode:
        """What the rows of a table are. Those of a table without a key are its changes, without more ado."""
        if not table.key:
            return "current"
        if matches(table.table, self.history):
            return "changelog"
        if isinstance(self.mode, str):
            return self.mode
        return next((mode for pattern, mode in self.mode.items() if matches(table.table, [pattern])), "current")

    def write_rows(self, table: TableSchema, rows: Iterable[Changes], stage: Stage | None = None) -> Staged:
        """Write copied rows to files that no version of the table lists yet; the stage is not used.

        The receipt names them. Each call writes files of its own; a vacuum deletes those that are never committed.
        """
        place = self.place(table.table)
        layout = self._layout(table)
        require_partition(layout)
        at = now()
        exact = False
        with reaching(place, str(table.table)):
            before = DeltaSnapshot.load(place, str(table.table))
            place.make()
            updates, known = self._updates_of(layout, before), total_rows(before.files()) if before else 0
            limit = rows_per_file(known, marks=updates == "merge_on_read")
            # A table with so many rows in one chunk will be marked once they change, and wants larger files then.
            many = 0 if updates == "copy_on_write" else rows_per_file(known, marks=True)
            writer = FileWriter(place, layout.schema, layout.partition_by, limit, many=many)
            with writer:
                for changes in rows:
                    fitted = fit(changes, table)
                    if not exact and any_exact([fitted]):
                        exact = True
                        layout = self._layout(table, exact=True)
                        writer.widen(layout.schema)
                    writer.write(layout.rows_of(fitted, at))
            files = writer.written
            place.sync()
            if layout.keyed and place.is_local and writer.limit >= LEAST_MARKED_ROWS:
                # The first batch that marks rows would have to index the whole table.
                for file in files:
                    key_index.keys_of(place, file, layout.key_types, AS_IS, is_stored=True)
        failpoint.reach("delta.staged")
        receipt = {
            "schema": base64.b64encode(layout.schema.serialize()).decode(),
            "files": [f.to_json() for f in files],
        }
        return Staged(json.dumps(receipt, ensure_ascii=False), total_rows(files), sum(file.size for file in files))

    def write_changes(self, batch: TableBatch) -> Written:
        """Make the batch visible in one commit. A batch that the table holds already changes nothing.

        Rows copied into a table that already holds rows are held back until the batch that completes the copy; a
        repeated batch is held only once. Nothing is committed when there is nothing to write and the table already
        has the columns of `batch.table`. Raises OwnedError when another runner of the pipeline committed meanwhile,
        UnavailableError when the storage does not answer, TableError when this table cannot go on.
        """
        table, changes, begins = batch.table, batch.log, batch.begins_copy
        name = str(table.table)
        place = self.place(table.table)
        mode = self.mode_of(table)
        kept = replace(table, key=()) if mode == "changelog" else table
        if kept != table:
            changes = (Changes(kept, fit(chunk, table).batch) for chunk in changes)
        with reaching(place, name), writing_batch(place):
            before = DeltaSnapshot.load(place, name)
            if before is not None:
                before.sync()
            if before is None and not begins:
                copy.require_unknown(batch, place.uri, root=_root(place))
            last = before.last_batch(batch.pipeline) if before is not None else None
            if batch.is_repeat(last):
                if batch.completes_copy:
                    copy.give_up(place, batch.batch)
                return Written(repeated=True, last=last)
            pieces = parts(
                changes,
                kept,
                PART_BYTES if batch.log_bytes <= PART_BYTES else HUGE_PART_BYTES,
                row_bytes=lambda: mean_row_bytes(before.files()) if before is not None else 0,
                keep_deleted=self.deletes == "soft" and mode == "current",
            )
            part = next(pieces, None)
            receipts: list[copy.HeldReceipt] = [json.loads(one.receipt) for one in batch.staged]
            goes_on = before is not None and not begins and (batch.completes_copy or bool(receipts))
            held = copy.copy_notes(place, batch.batch) if goes_on else []
            replaces_rows = begins and before is not None and bool(before.files())
            if not batch.completes_copy and (replaces_rows or (held and receipts)):
                if part:
                    raise copy.early_changes_error(table.table)
                self._hold(place, batch, receipts)
                return Written(last=last)
            if batch.completes_copy and held:
                _require_files(place, name, held)
                receipts = [*(receipt for note in held for receipt in note.receipts), *receipts]
                begins = True
            elif begins:
                copy.give_up(place, batch.batch)
            was_history = before is not None and mode_in(before.schema) == "history"
            continues = mode == "history" and was_history and batch.completes_copy and (replaces_rows or bool(held))
            begins = begins and not continues
            layout = self._layout(table, exact=any(EXACT in _schema_of(receipt).names for receipt in receipts))
            if not (begins or receipts or part) and (before is None or not _evolve(layout, before)[1].changes):
                return Written(last=last)
            place.make()
            _require_staged(place, name, batch)
            works: Iterable[Work] = [self._work(part.chunks if part is not None else [], kept)]
            tries = _TRIES
            if part is not None and not part.is_last:
                # Each part is discarded once it is written, so the batch cannot be retried from here.
                works = chain(_given_away(list(works)), (self._work(part.chunks, kept) for part in pieces))
                tries = 1
            del part
            for _ in range(tries):
                try:
                    written = self._write(place, layout, before, works, receipts, batch, begins, continues)
                except ConflictError as conflict:
                    problem = conflict
                    before = DeltaSnapshot.load(place, name)
                else:
                    if batch.completes_copy:
                        copy.give_up(place, batch.batch)
                    return written
        message = f"another writer changed the Delta table while batch {batch.id} was written: {problem}"
        if tries == 1:
            raise UnavailableError(f"{message}; the batch is done again", table=name)
        raise TableError(message, table=name, fix=f"stop the other writer of {place.uri}")

    def _hold(self, place: TablePath, batch: TableBatch, receipts: Sequence[copy.HeldReceipt]) -> None:
        """Hold what a batch staged until its copy ends. A batch that begins a copy gives up an unfinished one."""
        failpoint.reach("delta.before_hold")
        copy.hold(place, batch, receipts)
        failpoint.reach("delta.held")
        if batch.begins_copy:
            copy.give_up(place, batch.batch)

    def _work(self, chunks: list[Changes], table: TableSchema) -> Work:
        if self.mode_of(table) == "history":
            return VersionWork(table, chunks)
        if table.key:
            return collapse(chunks, table, keep_deleted=self.deletes == "soft")
        return _Log(chunks)

    def _write(
        self,
        place: TablePath,
        layout: DeltaLayout,
        before: DeltaSnapshot | None,
        works: Iterable[Work],
        receipts: Sequence[copy.HeldReceipt],
        batch: TableBatch,
        begins: bool,
        continues: bool,
    ) -> Written:
        """Write the files of one part after the other, each on top of those before it, then commit once.

        With `begins` the rows there are go; with `continues` copied rows continue their history.
        """
        name = str(layout.table.table)
        at = now()
        written = Written()
        first, moves = True, False
        updates = self._updates_of(layout, before)
        try:
            layout, evolution = _evolve(layout, None if begins else before)
        except SchemaChangedError as error:
            if continues:
                error.fix = f"move {place.uri} away, which ends this history, then tailrace resync FILE {name}"
            raise
        reading = evolution.reading
        key = [reading.name(column) for column in layout.table.key]
        known = before.files(key) if before is not None and not begins else []
        files = known
        for work in works:
            has_before = isinstance(work, _Log) and layout.mode == "changelog" and work.has_before
            if (work.has_exact and not layout.exact) or (has_before and not layout.before):
                wanted = replace(layout, exact=layout.exact or work.has_exact, before=layout.before or has_before)
                layout, evolution = _evolve(wanted, None if begins else before)
            target = DeltaTarget(place, layout, evolution.schema, files, updates=updates)
            if first:
                target.reading, copied = reading, _staged(receipts, evolution.schema, layout)
                if continues and isinstance(work, VersionWork):
                    work = replace(work, copied=copied)
                else:
                    target.staged = copied
            first = False
            if isinstance(work, VersionWork):
                outcome = history.apply(target, work, at, batch.refetch)
            elif isinstance(work, Collapsed):
                outcome = upsert.apply(target, work, at, batch.refetch)
            else:
                rows = (layout.rows_of(chunk, at) for chunk in work.chunks)
                outcome = upsert.log(target, rows, work.changes)
            gone = {file.identity for file in outcome.removes}
            files = [*(file for file in files if file.identity not in gone), *outcome.adds]
            moves |= outcome.moves
            # The parts after one that marked rows find them marked.
            updates = "merge_on_read" if outcome.marks else updates
            written += Written(work.changes, outcome.upserts, outcome.deletes)
        place.sync()
        failpoint.reach("delta.before_commit")
        old, new = {file.identity for file in known}, {file.identity for file in files}
        change = TableChange(
            evolution.schema,
            layout.partition_by,
            adds=[file for file in files if file.identity not in old],
            removes=[file for file in known if file.identity not in new],
            # Not all of them are among the known ones: a copy begins without looking at them.
            replace=begins,
            has_vectors=updates == "merge_on_read" or any(file.vector is not None for file in files),
            moves_rows=moves,
        )
        committed = commit(place, name, before, change, batch.batch)
        failpoint.reach("delta.committed")
        return replace(written, last=replace(batch.batch.last, version=committed.version))

    def _updates_of(self, layout: DeltaLayout, before: DeltaSnapshot | None) -> Updates:
        """How changed rows of a table are replaced. Under `auto`, a table that was marked once stays with that."""
        if not layout.table.key:
            return "copy_on_write"
        chosen = self.updates_of(layout.table.table)
        if chosen == "auto" and before is not None and before.has_vectors:
            return "merge_on_read"
        return chosen

    def updates_of(self, table: TableName) -> Updates:
        """What `updates` says about a table: the first pattern that matches it counts."""
        if isinstance(self.updates, str):
            return self.updates
        return next((mode for pattern, mode in self.updates.items() if matches(table, [pattern])), "auto")

    def last_batch(self, table: TableName, pipeline: str) -> LastBatch | None:
        place = self.place(table)
        with reaching(place, str(table)):
            snapshot = DeltaSnapshot.load(place, str(table))
            if snapshot is None and (root := _root(place)) is not None and not root.is_dir():
                raise copy.missing_root(root, table)
            return snapshot.last_batch(pipeline) if snapshot is not None else None

    def read_table(self, table: TableSchema) -> TableRows | None:
        return None if self.mode_of(table) == "changelog" else read_rows(self.place(table.table), table)

    def maintain(self, table: TableName) -> str | None:
        """Merge small files, fold vectors and delete unneeded files if that is due; otherwise only look at the log."""
        return self._maintain(table, self.compact)

    def maintain_now(self, table: TableName) -> str | None:
        """Merge all small files, fold all vectors and delete what the retention allows (nothing with `vacuum: off`)."""
        return self._maintain(table, self.compact or CompactOptions(), everything=True)

    def _maintain(self, table: TableName, compact: CompactOptions | None, *, everything: bool = False) -> str | None:
        place, updates = self.place(table), self.updates_of(table)
        with reaching(place, str(table)):
            return maintenance.maintain(place, str(table), compact, self.vacuum, updates, everything=everything)

    def place(self, table: TableName) -> TablePath:
        """The location of a table, with everything needed to open it."""
        return place_of(self.path, table, self._store_options)

    @property
    def _store_options(self) -> dict[str, str]:
        return {name: value.reveal() for name, value in self.storage_options.items()}

    def _layout(self, table: TableSchema, *, exact: bool = False) -> DeltaLayout:
        partition_by = tuple(self.partition_by.get(str(table.table), ()))
        mode = self.mode_of(table)
        if mode == "history":
            return DeltaLayout(version_table(table), False, False, partition_by, exact, mode)
        kept = replace(table, key=()) if mode == "changelog" else table
        return DeltaLayout(kept, self.metadata, self.deletes == "soft", partition_by, exact, mode)


def _root(place: TablePath) -> Path | None:
    """The folder of all tables, on a local disk."""
    return Path(place.base).parent.parent if place.is_local else None


def _require_files(place: TablePath, table: str, notes: Sequence[copy.CopyNote]) -> None:
    """Raises TableError when a held file is gone, for example after a vacuum by another program."""
    paths = _paths(receipt for note in notes for receipt in note.receipts)
    if missing := place.missing(paths):
        raise TableError(
            f"{len(missing)} of the {len(paths)} files that were copied are no longer in {place.uri}",
            table=table,
            fix=f"tailrace resync FILE {table}, and let no one else vacuum the table meanwhile",
        )


def _require_staged(place: TablePath, table: str, batch: TableBatch) -> None:
    """Raises UnavailableError when a file that this batch itself copied is gone: the machine slept, and then a vacuum
    found the file old."""
    if missing := place.missing(_paths(json.loads(one.receipt) for one in batch.staged)):
        raise UnavailableError(
            f"{len(missing)} files that batch {batch.id} copied are no longer in {place.uri}; the batch is done again",
            table=table,
        )


def _paths(receipts: Iterable[copy.HeldReceipt]) -> list[str]:
    return [unquote(file["path"]) for receipt in receipts for file in receipt["files"]]


def _evolve(layout: DeltaLayout, before: DeltaSnapshot | None) -> tuple[DeltaLayout, Evolution]:
    """The columns the table has after the batch: only those of the layout if there is no table yet to evolve."""
    if before is None:
        require_partition(layout)
        return layout, Evolution(layout.schema)
    require_partition(layout, before.partition_by)
    _require_mode(before.schema, layout)
    if EXACT in before.schema.names:
        layout = replace(layout, exact=True)
    if any(name.startswith(BEFORE) for name in before.schema.names):
        layout = replace(layout, before=True)
    if layout.mode == "history":
        layout = replace(layout, table=retaining(layout.table, before.schema))
    return layout, evolve(before.schema, layout)


_KINDS: Mapping[TableMode, str] = {
    "current": "current rows",
    "changelog": "a changelog",
    "history": "the history of its rows",
}


def mode_in(found: pa.Schema) -> TableMode:
    """What the rows of a Delta table with these columns are."""
    return "history" if version.TO in found.names else "changelog" if UNCHANGED in found.names else "current"


def _require_mode(found: pa.Schema, layout: DeltaLayout) -> None:
    """Raises SchemaChangedError when the rows of the table are others than are wanted."""
    if mode_in(found) == layout.mode:
        return
    raise SchemaChangedError(
        f"the Delta table holds {_KINDS[mode_in(found)]}, and is to hold {_KINDS[layout.mode]}",
        table=str(layout.table.table),
        fix=f"tailrace resync FILE {layout.table.table} replaces them; or set `mode` or `history` as it was",
    )


def _schema_of(receipt: copy.HeldReceipt) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(receipt["schema"])))


def _staged(
    receipts: Iterable[copy.HeldReceipt], schema: pa.Schema, layout: DeltaLayout
) -> list[tuple[DataFile, ColumnReading]]:
    """The files of the receipts, each with its projection: it may have been written before a schema change."""
    found: list[tuple[DataFile, ColumnReading]] = []
    for receipt in receipts:
        if layout.mode != "current":
            _require_mode(_schema_of(receipt), layout)
        reading = reading_of(_schema_of(receipt), schema, layout)
        key = [reading.name(column) for column in layout.table.key]
        for raw in receipt["files"]:
            moved = tuple(raw["partition"]) != layout.partition_by
            found.append((DataFile.from_json(raw, key), replace(reading, rewrite=True) if moved else reading))
    return found


def _given_away(works: list[Work]) -> Iterator[Work]:
    while works:
        yield works.pop(0)


@dataclass(frozen=True)
class _Log:
    """The changes of a table without a key, or of one that is kept as a changelog."""

    chunks: list[Changes]

    @property
    def changes(self) -> int:
        return sum(map(len, self.chunks))

    @property
    def has_exact(self) -> bool:
        return any_exact(self.chunks)

    @property
    def has_before(self) -> bool:
        return any(chunk.batch.column("before").null_count < len(chunk) for chunk in self.chunks)


Work = _Log | VersionWork | Collapsed
