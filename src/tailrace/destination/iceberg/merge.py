"""Applies a batch to a table: finds the rows that have its keys, marks them as deleted, and adds the new ones.

The cost of a batch is that of its changes, whatever the size of the table: no data file is written again, unless a
schema change or a truncate that keeps its rows makes it necessary.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.manifest import DataFile, ManifestEntry

from tailrace.destination import Refetch, Written
from tailrace.destination.iceberg import position_delete
from tailrace.destination.iceberg.column import (
    IcebergEvolution,
    IcebergLayout,
    TableColumns,
    change_rows,
    encode,
    rows_of,
)
from tailrace.destination.iceberg.data_file import (
    DataFileWriter,
    TableFolder,
    WantedColumn,
    read_columns,
    read_rows,
    rows_per_file,
    wanted_columns,
)
from tailrace.destination.iceberg.snapshot import TableFile, key_bounds
from tailrace.destination.lake import key_cache, key_index
from tailrace.destination.lake.key_index import Indexes, KeyedFile, KeyProbe, RowKeys
from tailrace.destination.lake.row_bitmap import Rows, bitmap, numbers
from tailrace.destination.metadata import DELETED_AT, truncate_values
from tailrace.destination.partial_row import complete, left_out_columns
from tailrace.model import key as keys
from tailrace.model.change import EXACT, Changes, Op
from tailrace.model.collapse import Collapsed, renamed_exact

_T = TypeVar("_T")
_R = TypeVar("_R")
OWN_FOLDER = "_tailrace"
"""The folder in a table's location for what is tailrace's own. Programs that look for orphans leave it alone."""


@dataclass
class WorkingFile:
    """A data file while a batch is applied. `entry` is None for one that this batch wrote."""

    data: DataFile
    entry: ManifestEntry | None = None
    deletes: ManifestEntry | None = None
    dead: list[Indexes] = field(default_factory=list)

    @classmethod
    def of(cls, file: TableFile) -> WorkingFile:
        return cls(file.data.data_file, file.data, file.deletes)

    def before(self, folder: TableFolder) -> Rows:
        """The rows that were deleted before the batch."""
        return Rows() if self.deletes is None else position_delete.read_deletes(folder, self.deletes.data_file)

    def all_dead(self, folder: TableFolder) -> Rows:
        before = self.before(folder)
        return before | bitmap(np.concatenate(self.dead)) if self.dead else before

    def alive_among(self, folder: TableFolder, rows: Indexes) -> Indexes:
        """Which of these rows, by their place in the list, are deleted neither before nor by the batch."""
        if not len(rows):
            return rows
        alive = np.ones(len(rows), bool)
        if self.deletes is not None:
            alive &= ~np.isin(rows, numbers(bitmap(rows) & self.before(folder)))
        if self.dead:
            alive &= ~np.isin(rows, np.concatenate(self.dead))
        return np.flatnonzero(alive)


@dataclass
class Merge:
    """A table between its state before the batch and that after it. Nothing of it is committed.

    files      the data files as they will be
    removes    what of the earlier state is no longer in the table
    """

    folder: TableFolder
    layout: IcebergLayout
    columns: TableColumns
    now: pa.TimestampScalar
    files: list[WorkingFile]
    removes: list[ManifestEntry] = field(default_factory=list)

    # -- what a batch does ------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Remove every row."""
        for file in self.files:
            self._remove(file)
        self.files = []

    def rewrite(self, evolution: IcebergEvolution) -> None:
        """Write every row again, with the columns of an evolution."""
        sources = evolution.sources
        names = [*self.columns.types]
        wanted: list[WantedColumn] = []
        for one in wanted_columns(self.columns, names):
            [number] = one.ids
            old = sources.get(number)
            ids = (number,) if old is None else (old,)
            wanted.append(WantedColumn(one.field, ids, evolution.initial.get(number)))
        renames = EXACT in names and self.columns.ids([EXACT])[0] in sources

        def shape(rows: pa.Table) -> pa.Table:
            if not renames:
                return rows
            at = rows.schema.get_field_index(EXACT)
            texts = [renamed_exact(part, evolution.renamed) for part in rows.column(at).chunks]
            return rows.set_column(at, EXACT, pa.chunked_array(texts, pa.string()))

        self._rewrite_all(wanted, shape)

    def append(self, chunks: Sequence[Changes]) -> None:
        """Add changes as rows."""
        self._add(change_rows(self.columns, self.layout, chunk, self.now) for chunk in chunks)

    def apply(self, collapsed: Collapsed, refetch: Refetch | None) -> Written:
        """Apply the last change of each key. Values that a change left out come from the row before the batch."""
        soft = self.layout.keeps_deleted
        if collapsed.truncated and not soft:
            self.clear()
        wanted = KeyProbe(self._keys_of(collapsed))
        home, home_row = self._find(wanted)
        old, at = self._old_values(collapsed, wanted, home, home_row)
        kinds = self.columns.kinds(self.layout.table.arrow.names)
        values, marks, kept = complete(collapsed, old, at, refetch, schema=kinds, cast=self._cast)
        if collapsed.truncated and soft:
            self._stamp(truncate_values(collapsed.truncate_marks, self.now))
        if len(kept):
            self._add([rows_of(self.columns, self.layout, values, marks, self.now)])
        deletes = collapsed.deletes.num_rows
        upserts = len(kept)
        if soft:
            deletes = int((marks.op == Op.DELETE).sum())
            upserts -= deletes
        return Written(collapsed.changes, upserts, deletes)

    def finish(self) -> list[DataFile]:
        """Write the deletes, and return the files that the commit adds; `removes` is complete then."""
        adds: list[DataFile] = []
        left: list[WorkingFile] = []
        for file in self.files:
            if not file.dead:
                left.append(file)
                continue
            rows = file.all_dead(self.folder)
            if len(rows) == file.data.record_count:
                self._remove(file)
                continue
            if file.deletes is not None:
                self.removes.append(file.deletes)
            adds.append(position_delete.write_deletes(self.folder, file.data.file_path, rows))
            left.append(file)
        self.files = left
        return [*(file.data for file in left if file.entry is None), *adds]

    # -- rows -------------------------------------------------------------------------------------------------

    def _remove(self, file: WorkingFile) -> None:
        self.removes += [entry for entry in (file.entry, file.deletes) if entry is not None]

    def _add(self, rows: Any) -> None:
        limit = rows_per_file(sum(file.data.record_count for file in self.files))
        writer = DataFileWriter(self.folder, self.columns)
        self.files += [WorkingFile(file) for file in writer.write(rows, limit)]

    def _rewrite_all(self, wanted: Sequence[WantedColumn], shape: Callable[[pa.Table], pa.Table]) -> None:
        before, self.files = self.files, []

        def alive() -> Iterator[pa.Table]:
            for file in before:
                dead = np.zeros(file.data.record_count, bool)
                dead[numbers(file.all_dead(self.folder))] = True
                start = 0
                for rows in read_columns(self.folder, file.data.file_path, wanted):
                    here = ~dead[start : start + rows.num_rows]
                    start += rows.num_rows
                    yield shape(rows if here.all() else rows.filter(pa.array(here)))

        limit = rows_per_file(sum(file.data.record_count for file in before))
        writer = DataFileWriter(self.folder, self.columns)
        written = writer.write((rows for rows in alive() if rows.num_rows), limit)
        for file in before:
            self._remove(file)
        self.files = [WorkingFile(file) for file in written]

    def _stamp(self, values: Mapping[str, pa.Scalar[Any]]) -> None:
        """Mark every row as deleted that was not before."""

        def shape(rows: pa.Table) -> pa.Table:
            alive = pc.is_null(rows.column(DELETED_AT))
            for name, value in values.items():
                if name in rows.column_names:
                    at = rows.schema.get_field_index(name)
                    rows = rows.set_column(at, rows.schema.field(at), pc.if_else(alive, value, rows.column(name)))
            return rows

        self._rewrite_all(wanted_columns(self.columns, [*self.columns.types]), shape)

    # -- keys -------------------------------------------------------------------------------------------------

    def _keys_of(self, collapsed: Collapsed) -> keys.Comparable:
        both = [[*collapsed.rows.column(name).chunks, *collapsed.deletes.column(name).chunks] for name in self._key]
        kinds = collapsed.deletes.schema
        return keys.comparable(
            [
                self._cast(pa.chunked_array(chunks, kinds.field(name).type), self.columns.types[name], name)
                for name, chunks in zip(self._key, both, strict=True)
            ]
        )

    def _find(self, wanted: KeyProbe) -> tuple[Indexes, Indexes]:
        """Find the living rows with these keys and delete them: for each key the index of its file, and its row."""
        home, home_row = np.full(len(wanted), -1, np.int64), np.full(len(wanted), -1, np.int64)
        if not len(wanted):
            return home, home_row
        at = [number for number, file in enumerate(self.files) if self._may_hold(file, wanted)]

        def find(number: int) -> tuple[Indexes, Indexes]:
            file = self.files[number]
            rows, which = self._keys_in(file).match(wanted)
            alive = file.alive_among(self.folder, rows)
            return rows[alive], which[alive]

        for number, (rows, which) in zip(at, _in_threads(find, at), strict=True):
            if len(rows):
                self.files[number].dead.append(rows)
                home[which], home_row[which] = number, rows
        return home, home_row

    def _may_hold(self, file: WorkingFile, wanted: KeyProbe) -> bool:
        if len(self._key) != 1 or not keys.is_numeric(self.columns.types[self._key[0]]):
            return True
        [number] = self.columns.ids(self._key)
        return wanted.may_hold(*key_bounds(file.data, number))

    def _keys_in(self, file: WorkingFile) -> RowKeys:
        return key_index.keys_of(self._keyed(file), is_stored=True)

    def _keyed(self, file: WorkingFile) -> KeyedFile:
        return keyed_file(self.folder, str(self.layout.table.table), file.data, self.columns, self._key)

    @property
    def _key(self) -> list[str]:
        return list(self.layout.table.key)

    def _old_values(
        self, collapsed: Collapsed, wanted: KeyProbe, home: Indexes, home_row: Indexes
    ) -> tuple[pa.Table, Indexes]:
        """The rows from before the batch with what changes left out; for each incomplete row its index there, or -1."""
        names = [*left_out_columns(collapsed), *([EXACT] if EXACT in self.columns.own else [])]
        schema = self.columns.kinds(names)
        at = np.full(len(collapsed.incomplete), -1, np.int64)
        if collapsed.unchanged is None or collapsed.truncated:
            return schema.empty_table(), at
        sought = keys.comparable(
            [self._cast(collapsed.lookup.column(name), self.columns.types[name], name) for name in self._key]
        )
        where = keys.positions(sought, wanted.key)
        where[np.asarray(pc.is_null(collapsed.lookup.column(0)).to_numpy(zero_copy_only=False), bool)] = -1
        found = np.where(where >= 0, home[where], -1)
        pieces: list[pa.Table] = [schema.empty_table()]
        for number in np.unique(found[found >= 0]):
            rows = np.flatnonzero(found == number)
            order = np.argsort(home_row[where[rows]])
            at[rows[order]] = sum(map(len, pieces)) + np.arange(len(rows))
            path = self.files[number].data.file_path
            pieces += read_rows(self.folder, path, wanted_columns(self.columns, names), home_row[where[rows]][order])
        return pa.concat_tables(pieces), at

    def _cast(self, values: Any, kind: pa.DataType, column: str) -> Any:
        return encode(values, kind, column, str(self.layout.table.table))


def keyed_file(folder: TableFolder, table: str, file: DataFile, columns: TableColumns, key: Sequence[str]) -> KeyedFile:
    """A data file for the key index."""
    wanted = wanted_columns(columns, key)

    def read() -> keys.Comparable:
        pieces = list(read_columns(folder, file.file_path, wanted))
        schema = pa.schema([one.field for one in wanted])
        return keys.comparable((pa.concat_tables(pieces) if pieces else schema.empty_table()).columns)

    return KeyedFile(
        folder.location,
        table,
        file.file_path,
        file.record_count,
        str([(one.ids[0], str(one.field.type)) for one in wanted]),
        lambda: key_folder(folder) / key_name(file.file_path),
        read,
        is_cached="://" in folder.location.removeprefix("file://"),
    )


def key_folder(folder: TableFolder) -> Path:
    """The folder of a table's key files: next to the table on a disk; on this machine for an object store."""
    location = folder.location.removeprefix("file://")
    if "://" not in location:
        return Path(location, OWN_FOLDER, "keys")
    return key_cache.folder_for(location)


def key_name(path: str) -> str:
    """The name of a data file's key file."""
    name = path.rpartition("/")[2]
    if len(name.encode()) > 150:
        name = hashlib.sha256(name.encode()).hexdigest()
    return f"{name}.keys"


def _in_threads(job: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    """The result for each item, in order. Threads help: most of the work is native code."""
    if len(items) < 2:
        return [job(item) for item in items]
    with ThreadPoolExecutor(min(len(items), os.cpu_count() or 1)) as pool:
        return list(pool.map(job, items))
