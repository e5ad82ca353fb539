"""Housekeeping of a Delta table next to its batches: checkpoints, small files merged, vectors folded, files deleted.

A table whose rows are marked (merge on read) stays fast to read by two rules. Small files are merged once there are
`compact.files` of them; one that is larger than all smaller ones together waits for more, so that a row is rewritten
only a few times. A file is rewritten without its deleted rows once a tenth of them is deleted, or once the vectors that
were written for it add up to its own size: from then on the vectors cost more than the file. With
`updates: copy_on_write` every vector is folded, as no batch will write one again.

Batches do not wait for a rewrite, and what they change meanwhile is not lost (`rewrite.py`). The keys of the new files
are indexed before the commit, so that the next batch need not do it. What is deleted, and when: `vacuum.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa

from tailrace.destination.delta import key_index, vacuum
from tailrace.destination.delta.commit import checkpoint_if_due
from tailrace.destination.delta.data_file import LEAST_MARKED_ROWS, DataFile, rows_per_file, total_rows
from tailrace.destination.delta.log import DeltaSnapshot
from tailrace.destination.delta.option import CompactOptions, Updates, VacuumOptions
from tailrace.destination.delta.projection import AS_IS
from tailrace.destination.delta.rewrite import RewrittenGroup, commit_rewritten, write_group
from tailrace.destination.delta.table_folder import TablePath
from tailrace.destination.delta.table_lock import maintaining
from tailrace.errors import UnavailableError

WORN_PART = 0.1
"""The part of a file's rows that may be deleted before it is rewritten."""
COMMIT_ROWS = 2_000_000
"""How many rows one commit rewrites: some seconds of work, which a process that is killed loses."""
WAIT_SECONDS = 600.0
"""How long maintenance by hand waits for another process that maintains the same table."""

_FULL = "full.json"
_KEY = "key.json"
_Group = list[DataFile]


def maintain(
    place: TablePath,
    table: str,
    compact: CompactOptions | None,
    vacuuming: VacuumOptions | None,
    updates: Updates = "auto",
    *,
    everything: bool = False,
) -> str | None:
    """Do the housekeeping that is due. Cheap when nothing is: it only looks at the log.

    `everything`: merge all small files, fold all vectors and delete what may be deleted now, however little that is.
    Does nothing while another process of this machine does the same; with `everything` it waits for that one, and
    raises UnavailableError when it does not end.
    """
    before = DeltaSnapshot.load(place, table)
    if before is None:
        return None
    checkpoint_if_due(before)
    with maintaining(place, WAIT_SECONDS if everything else 0.0) as is_held:
        if not is_held:
            if everything:
                raise UnavailableError(
                    f"another process has been maintaining {place.uri} for {WAIT_SECONDS / 60:.0f} minutes",
                    table=table,
                    fix="wait for it, then run this again",
                )
            return None
        done = [_rewrite(place, table, compact, updates, everything=everything) if compact is not None else None]
        if (snapshot := DeltaSnapshot.load(place, table)) is not None:
            checkpoint_if_due(snapshot)
            done.append(vacuum.delete_unneeded(snapshot, vacuuming, at_once=everything))
    return "; ".join(filter(None, done)) or None


def _rewrite(
    place: TablePath, table: str, compact: CompactOptions, updates: Updates, *, everything: bool
) -> str | None:
    """Rewrite small and worn files, some at a time. Files that appear meanwhile are left to the next call."""
    snapshot = DeltaSnapshot.load(place, table)
    if snapshot is None:
        return None
    marks = snapshot.has_vectors and updates != "copy_on_write"
    limit = rows_per_file(total_rows(snapshot.files()), marks=marks)
    # A file that is small by its rows may still be full: the bytes of wide rows can compress well.
    full = set(json.loads(place.noted(_FULL) or "[]"))
    # A copied table is not rewritten only to have larger files: those of a copy are not small.
    least = LEAST_MARKED_ROWS // 2 if marks else limit // 2
    groups = plan(snapshot.files(), compact, least, marks=marks, full=full, everything=everything)
    key = _key_of(place, snapshot) if groups and marks else None
    merged = written = 0
    for some in _portions(groups):
        snapshot = DeltaSnapshot.load(place, table)
        # Batches have marked further rows, and may have removed files.
        current = (
            []
            if snapshot is None
            else [[now for one in group if (now := snapshot.by_path.get(one.path))] for group in some]
        )
        wanted = [group for group in current if len(group) > 1 or (group and group[0].vector is not None)]
        if snapshot is None or not wanted:
            continue
        rewritten = [write_group(snapshot, group, limit) for group in wanted]
        if key is not None:
            _index(place, rewritten, key)
        committed = commit_rewritten(snapshot, rewritten)
        if committed is None:
            continue
        merged += sum(len(group.sources) for group in rewritten)
        written += sum(len(group.written) for group in rewritten)
        now_full = full | {file.path for group in rewritten for file in group.written[:-1]}
        now_full &= committed.by_path.keys()
        if now_full != full:
            full = now_full
            place.note(_FULL, json.dumps(sorted(full)))
        if not (place.is_local or everything):
            # Without locks, each of these commits may make a batch be applied twice: one for each call.
            break
    return f"merged {merged} files into {written}" if merged else None


def plan(
    files: Sequence[DataFile],
    compact: CompactOptions,
    least: int,
    *,
    marks: bool,
    full: set[str],
    everything: bool,
) -> list[_Group]:
    """The files to rewrite, those together that are to be merged. One with fewer rows than `least` is small. Pure."""
    small = [
        file for file in files if file.alive < least and file.size < compact.target_bytes // 2 and file.path not in full
    ]
    worn = {file.path for file in files if _is_worn(file, at_all=everything or not marks)}
    many = len(small) >= (2 if everything else compact.files)
    merging: dict[tuple[tuple[str, str | None], ...], _Group] = {}
    for file in small:
        if many or file.path in worn:
            merging.setdefault(tuple(file.partition.items()), []).append(file)
    groups = [group if everything else _worth_merging(group, worn) for group in merging.values()]
    together = {file.path for file in small}
    # Each of the others stays a file of its own: files keep their range of keys.
    groups += [[file] for file in files if file.path in worn and file.path not in together]
    return [
        sorted(part, key=lambda file: (file.modified, file.path))
        for group in groups
        for part in _parts(group)
        if len(part) > 1 or part[0].vector is not None
    ]


def _is_worn(file: DataFile, *, at_all: bool) -> bool:
    if file.vector is None:
        return False
    return at_all or file.dead >= WORN_PART * file.rows or file.vector_bytes >= file.size


def _worth_merging(group: _Group, worn: set[str]) -> _Group:
    """The small files without those that are larger than all smaller ones together, unless they are worn."""
    ascending = sorted(group, key=lambda file: file.alive)
    smaller = total_rows(ascending)
    found: _Group = []
    for file in reversed(ascending):
        smaller -= file.alive
        if found or file.alive <= smaller or file.path in worn:
            found.append(file)
    return found


def _parts(group: _Group) -> Iterator[_Group]:
    """A group in parts that one commit can rewrite."""
    part: _Group = []
    for file in group:
        if part and total_rows(part) + file.alive > COMMIT_ROWS:
            yield part
            part = []
        part.append(file)
    if part:
        yield part


def _portions(groups: Sequence[_Group]) -> Iterator[list[_Group]]:
    """The groups of each commit."""
    some: list[_Group] = []
    for group in groups:
        if some and sum(map(total_rows, (*some, group))) > COMMIT_ROWS:
            yield some
            some = []
        some.append(group)
    if some:
        yield some


# -- the keys of new files ---------------------------------------------------------------------------------


def _key_of(place: TablePath, snapshot: DeltaSnapshot) -> Mapping[str, pa.DataType] | None:
    """The key's columns and their types: as batches of this process used them, or as another process noted them."""
    noted = json.loads(place.noted(_KEY) or "null")
    known = key_index.last_key(place)
    if known is not None and list(known) != noted:
        noted = list(known)
        place.note(_KEY, json.dumps(noted))
    if noted is None or not set(noted) <= set(snapshot.schema.names):
        return None
    return known or {name: snapshot.schema.field(name).type for name in noted}


def _index(place: TablePath, groups: Sequence[RewrittenGroup], key: Mapping[str, pa.DataType]) -> None:
    for group in groups:
        for file in group.written:
            key_index.keys_of(place, file, key, AS_IS, is_stored=True)
