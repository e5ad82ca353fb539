"""Writes the living rows of files to other files, while batches go on to mark rows of the old ones.

A rewrite takes seconds, and batches do not wait for it: the new files are written from the version that was read, and
the commit brings them up to date. A row that was marked in the meantime is marked in the new file as well: its place
there is its rank among the rows that were kept. So a commit that loses to a batch only repeats this small step. Where
a batch rewrote or replaced one of the files, or the columns changed, nothing is committed; the new files are in no log
then, and a vacuum deletes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.destination.delta import deletion_vector
from tailrace.destination.delta.commit import MOVES_NO_ROWS, ConflictError, TableChange, commit
from tailrace.destination.delta.data_file import DataFile
from tailrace.destination.delta.deletion_vector import VectorWriter
from tailrace.destination.delta.file_reader import read_columns
from tailrace.destination.delta.file_writer import FileWriter
from tailrace.destination.delta.log import DeltaSnapshot
from tailrace.destination.delta.projection import AS_IS
from tailrace.destination.delta.table_folder import LOG, TablePath
from tailrace.destination.delta.table_lock import between_batches
from tailrace.destination.lake import row_bitmap
from tailrace.destination.lake.row_bitmap import Rows
from tailrace.system import failpoint

COMMIT_TRIES = 10
"""How often a commit is tried while batches commit, too. Each try takes milliseconds."""
_Numbers = npt.NDArray[np.int64]


class _ChangedError(Exception):
    """The files that were rewritten are no longer what they were, except for further marks."""


@dataclass(frozen=True)
class RewrittenGroup:
    """Files of one partition and those that hold their living rows, one after the other, in the same order.

    sources    as they were when they were read, each with the vector of that time
    """

    sources: Sequence[DataFile]
    written: Sequence[DataFile]

    def place_of(self, newest: DeltaSnapshot, read: DeltaSnapshot) -> _Numbers:
        """The rows that died since they were read: their numbers among all rows written, ascending."""
        dead: list[_Numbers] = []
        start = 0
        for source in self.sources:
            now = newest.by_path.get(source.path)
            if now is None:
                _require_dead(source, read, newest)
                dead.append(np.arange(start, start + source.alive))
            elif now.identity != source.identity:
                dead.append(start + _ranks(source, now, read.place))
            start += source.alive
        return np.concatenate(dead) if dead else np.zeros(0, np.int64)

    def marked(self, dead: _Numbers, vectors: VectorWriter) -> list[DataFile]:
        """The new files with these of their rows marked; without those in which no row is left."""
        found: list[DataFile] = []
        start = 0
        for file in self.written:
            low, high = np.searchsorted(dead, [start, start + file.rows])
            if low == high:
                found.append(file)
            elif high - low < file.rows:
                found.append(file.with_vector(vectors.put(row_bitmap.bitmap(dead[low:high] - start))))
            start += file.rows
        return found


def write_group(read: DeltaSnapshot, sources: Sequence[DataFile], rows_per_file: int) -> RewrittenGroup:
    """Write the living rows of files of one partition to new files, which no version lists yet."""
    kinds = {name: read.schema.field(name).type for name in read.partition_by}
    with FileWriter(read.place, read.schema, read.partition_by, rows_per_file) as writer:
        for file in sources:
            for rows in _living(read.place, file, kinds):
                writer.write(AS_IS.read(rows, read.schema))
    return RewrittenGroup(tuple(sources), tuple(writer.written))


def commit_rewritten(read: DeltaSnapshot, groups: Sequence[RewrittenGroup]) -> DeltaSnapshot | None:
    """Commit what was written from the version `read`. None when the table changed in a way that it does not fit."""
    place = read.place
    place.sync()
    failpoint.reach("delta.before_compact")
    for _ in range(COMMIT_TRIES):
        with between_batches(place):
            newest = DeltaSnapshot.load(place, read.table)
            try:
                change = _rebased(read, newest, groups)
            except _ChangedError:
                return None
            assert newest is not None
            if not change.adds and not change.removes:
                return newest
            failpoint.reach("delta.before_fold_commit")
            try:
                return commit(place, read.table, newest, change, None)
            except ConflictError:
                continue
    return None


def _rebased(read: DeltaSnapshot, newest: DeltaSnapshot | None, groups: Sequence[RewrittenGroup]) -> TableChange:
    """What has to be committed on top of the newest version. Writes the vectors that it takes."""
    if newest is None or not _is_same_table(read, newest):
        raise _ChangedError
    adds: list[DataFile] = []
    with VectorWriter(read.place) as vectors:
        for group in groups:
            adds += group.marked(group.place_of(newest, read), vectors)
    if vectors.written:
        read.place.sync()
    sources = [newest.by_path.get(source.path) for group in groups for source in group.sources]
    return TableChange(
        newest.schema,
        newest.partition_by,
        adds,
        [source for source in sources if source is not None],
        has_vectors=newest.has_vectors,
        changes_rows=False,
    )


def _is_same_table(read: DeltaSnapshot, newest: DeltaSnapshot) -> bool:
    names = ("id", "schemaString", "partitionColumns")
    return all(read.metadata.get(name) == newest.metadata.get(name) for name in names)


def _ranks(source: DataFile, now: DataFile, place: TablePath) -> _Numbers:
    """The rows of a file that were marked since it was read, by their place among its rows that were alive then."""
    before, after = (_marked(file, place) for file in (source, now))
    if not before <= after:
        raise _ChangedError  # another program brought rows back
    rows = row_bitmap.numbers(after - before)
    return rows - np.searchsorted(row_bitmap.numbers(before), rows)


def _require_dead(source: DataFile, read: DeltaSnapshot, newest: DeltaSnapshot) -> None:
    """Raises unless a file is gone because no row of it is alive: the commit that removed it moved no rows."""
    for version in range(read.version + 1, newest.version + 1):
        body = read.place.read(f"{LOG}/{version:020}.json")
        if body is None:
            break
        actions = [json.loads(line) for line in body.splitlines() if line.strip()]
        if any(one.get("remove", {}).get("path") == source.path for one in actions) and not any(
            one.get("add", {}).get("path") == source.path for one in actions
        ):
            if any(one.get("commitInfo", {}).get(MOVES_NO_ROWS) == "true" for one in actions):
                return
            break
    raise _ChangedError


def _living(place: TablePath, file: DataFile, kinds: dict[str, pa.DataType]) -> Iterable[pa.Table]:
    """The rows of a file that are not marked as deleted."""
    alive = np.ones(file.rows, bool)
    alive[row_bitmap.numbers(_marked(file, place))] = False
    start = 0
    for rows in read_columns(place, file, None, kinds):
        here = alive[start : start + rows.num_rows]
        start += rows.num_rows
        yield rows if here.all() else rows.filter(pa.array(here))


def _marked(file: DataFile, place: TablePath) -> Rows:
    return Rows() if file.vector is None else deletion_vector.read(place, file.vector, place.table)
