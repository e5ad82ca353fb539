"""What is known of a table's rows downstream: files in the pipeline's state folder, written by the tasks that read.

    window-<step>-<attempt>.npy      hashes of the rows that a poll gave and that the next poll will see again
    polled-<step>-<attempt>.parquet  keys and hashes a poll gave, deletes without a hash
    base-<step>-<attempt>.parquet    keys and hashes of one stretch of keys, as a copy or a full diff left it

A step that is repeated writes its files again under another name. Which attempt reached the destination is not known
here, so all are looked at: a hash they do not agree on counts as unknown. Too little known costs a change that is given
twice; files are durable before their rows can be applied, so that too little is never known of a key.
"""

from __future__ import annotations

import json
import os
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tailrace import key as keys
from tailrace.source.poll import mark
from tailrace.source.poll.mark import Mark, Stretch

Hashes = npt.NDArray[np.int64]

HASH: Final = "_tailrace_hash"
PART: Final = "_tailrace_part"
STEP: Final = "_tailrace_step"
GONE: Final = "_tailrace_gone"
MOST_POLLED: Final = 64
"""How many files of polls there may be before they are made one."""


@dataclass(frozen=True)
class Known:
    """The files of one table."""

    folder: Path

    @classmethod
    def of(cls, folder: str, upstream_id: str) -> Known:
        return cls(Path(folder) / quote(upstream_id, safe="").replace(".", "%2E"))

    # -- the window of a poll -----------------------------------------------------------------------------

    def put_window(self, step: int, hashes: Hashes) -> None:
        with self._creating(f"window-{step:016}-{uuid.uuid4().hex}.npy") as path, path.open("wb") as file:
            np.save(file, hashes, allow_pickle=False)
            _flush(file.fileno())

    def window(self, step: int) -> Hashes:
        """The rows that step gave for certain; empty when nothing is known of it."""
        found = [np.load(path, allow_pickle=False) for path in sorted(self.folder.glob(f"window-{step:016}-*.npy"))]
        given = found[0] if found else np.zeros(0, np.int64)
        for other in found[1:]:
            given = np.intersect1d(given, other)
        return given

    # -- keys and hashes ----------------------------------------------------------------------------------

    def put_polled(self, step: int, rows: pa.Table) -> None:
        """What `record` made of the rows of one attempt, also when there were none."""
        self._put(f"polled-{step:016}-{uuid.uuid4().hex}.parquet", rows)

    def put_base(self, step: int, stretch: Stretch, rows: pa.Table, cuts: Sequence[Mark] = ()) -> None:
        """What `record` made of a stretch, and PART: between which of the cuts a key lies, for when it has grown."""
        range_ = [mark.to_json(stretch.after), None if stretch.upto is None else mark.to_json(stretch.upto)]
        note = json.dumps({"stretch": range_, "cuts": [mark.to_json(cut) for cut in cuts]})
        self._put(
            f"base-{step:016}-{uuid.uuid4().hex}.parquet", rows.replace_schema_metadata({b"tailrace": note.encode()})
        )

    def polled(self, after: int, upto: int) -> pa.Table | None:
        """The last thing known of every key that polls in (after, upto] gave: its columns, HASH and GONE.

        HASH is null where attempts disagree, and for a key that was deleted, of which GONE is true. None without polls.
        """
        files = [path for path in sorted(self.folder.glob("polled-*.parquet")) if after < _step(path) <= upto]
        if not files:
            return None
        return _fold([pq.read_table(path) for path in files], [_step(path) for path in files])

    def bases(self, step: int) -> list[Base] | None:
        """The stretches a base consists of, which together are the whole table; None when part of it is missing."""
        by_stretch: dict[tuple[Mark, Mark | None], list[tuple[Path, list[Mark]]]] = {}
        for path in sorted(self.folder.glob(f"base-{step:016}-*.parquet")):
            note = json.loads(pq.read_schema(path).metadata[b"tailrace"])
            after, upto = note["stretch"]
            place = (mark.from_json(after), None if upto is None else mark.from_json(upto))
            by_stretch.setdefault(place, []).append((path, [mark.from_json(cut) for cut in note["cuts"]]))
        ends = dict(by_stretch.keys())
        at: Mark | None = mark.START
        found: list[Base] = []
        while at is not None:
            if at not in ends or len(found) > len(ends) * 1000:
                return None
            upto = ends[at]
            found += _pieces(Stretch(at, upto), by_stretch[at, upto])
            at = upto
        return found if len(ends) == len({base.whole for base in found}) else None

    def prune(self, *, window: int, base: int) -> None:
        """Forget windows and bases of earlier steps, and what a base contains. Repeating it is harmless."""
        for path in self.folder.glob("*-*"):
            kind, at = path.name.partition("-")[0], _step(path)
            if at < (window if kind == "window" else base) or (kind == "polled" and at == base):
                path.unlink(missing_ok=True)

    def gather(self, base: int, upto: int) -> None:
        """Make one file of many, of steps that will not be repeated. A crash leaves too much, never too little."""
        files = [path for path in self.folder.glob("polled-*.parquet") if base < _step(path) <= upto]
        if len(files) <= MOST_POLLED:
            return
        last = max(map(_step, files))
        folded = _fold([pq.read_table(path) for path in files], [_step(path) for path in files])
        self._put(f"polled-{last:016}-{uuid.uuid4().hex}.parquet", folded)
        for path in files:
            path.unlink(missing_ok=True)

    def _put(self, name: str, rows: pa.Table) -> None:
        with self._creating(name) as path, path.open("wb") as file:
            pq.write_table(rows, file, compression="zstd")
            _flush(file.fileno())

    def _creating(self, name: str) -> _Creating:
        self.folder.mkdir(parents=True, exist_ok=True)
        return _Creating(self.folder, name)


class _Creating:
    """A file that is there as a whole or not at all."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._draft = folder / f".{name}"

    def __enter__(self) -> Path:
        return self._draft

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._draft.unlink(missing_ok=True)
            return
        self._draft.replace(self._folder / self._name)
        handle = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _flush(handle: int) -> None:
    os.fsync(handle)


def _step(path: Path) -> int:
    return int(path.name.split("-")[1])


@dataclass(frozen=True)
class Base:
    """A stretch of keys and the files that know them; with `part`, only that part of the one file."""

    stretch: Stretch
    files: tuple[str, ...]
    whole: Stretch
    part: int | None = None

    def read(self) -> pa.Table:
        """Key columns and HASH, null where attempts disagree."""
        filters = [(PART, "=", self.part)] if self.part is not None else None
        tables = [pq.read_table(path, filters=filters).drop_columns([PART]) for path in self.files]
        return tables[0] if len(tables) == 1 else _fold(tables, [0] * len(tables)).select(tables[0].schema.names)


def _pieces(whole: Stretch, attempts: Sequence[tuple[Path, Sequence[Mark]]]) -> Iterator[Base]:
    files = tuple(str(path) for path, _ in attempts)
    cuts = attempts[0][1] if len(attempts) == 1 else ()
    if not cuts:
        yield Base(whole, files, whole)
        return
    places = [whole.after, *cuts, whole.upto]
    for part, (after, upto) in enumerate(pairwise(places)):
        assert after is not None
        yield Base(Stretch(after, upto), files, whole, part)


def _fold(attempts: Sequence[pa.Table], at: Sequence[int]) -> pa.Table:
    """One row per key: that of its last step. Where the attempts at that step differ it has no hash, and is not gone.

    Each attempt has key columns, HASH, GONE and STEP, and was made `at` a step also when it has no rows. A key that one
    of them lacks differs, too.
    """
    # A key's type may have become a wider one since.
    rows = pa.concat_tables(attempts, promote_options="permissive")
    names = [name for name in rows.schema.names if name not in (HASH, GONE, STEP)]
    attempt = np.repeat(np.arange(len(attempts)), [each.num_rows for each in attempts])
    codes = keys.codes(keys.comparable([rows.column(name) for name in names]))
    steps = np.asarray(rows.column(STEP).to_numpy(), np.int64)
    order = np.lexsort((attempt, steps, codes))
    begins = _changes(codes[order])
    last_step = np.maximum.reduceat(steps[order], begins) if len(order) else steps
    order = order[steps[order] == np.repeat(last_step, np.diff(np.append(begins, len(order))))]
    begins = _changes(codes[order])
    sizes = np.diff(np.append(begins, len(order)))

    def agree(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        same = values == np.repeat(values[begins], sizes)
        return np.logical_and.reduceat(same, begins) if len(begins) else same

    hashes = rows.column(HASH).combine_chunks()
    valid = np.asarray(hashes.is_valid().to_numpy(zero_copy_only=False), bool)[order]
    filled = np.asarray(pc.fill_null(hashes, 0).to_numpy(zero_copy_only=False), np.int64)[order]
    gone = np.asarray(rows.column(GONE).to_numpy(), bool)[order]
    made = Counter(
        step for own, each in zip(at, attempts, strict=True) for step in {own, *pc.unique(each[STEP]).to_pylist()}
    )
    first_of_attempt = np.append(True, (attempt[order][1:] != attempt[order][:-1]))[: len(order)]
    first_of_attempt[begins] = True
    present = np.add.reduceat(first_of_attempt.astype(np.int64), begins) if len(begins) else sizes
    whole = present == np.array([made[step] for step in last_step.tolist()], np.int64)
    sure = agree(filled) & agree(valid) & agree(gone) & whole
    kept = rows.take(pa.array(order[begins])).select(names)
    kept = kept.append_column(HASH, pa.array(filled[begins], mask=~(valid[begins] & sure)))
    kept = kept.append_column(GONE, pa.array(gone[begins] & sure))
    return kept.append_column(STEP, pa.array(last_step))


def _changes(ordered: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where runs of equal numbers begin."""
    return np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)])


def record(keys_of: pa.StructArray, hashes: Hashes | None, step: int) -> pa.Table:
    """Keys and hashes as a table for `put_polled` and `put_base`; without hashes they are deletes."""
    count = len(keys_of)
    given = pa.nulls(count, pa.int64()) if hashes is None else pa.array(hashes)
    rows = pa.Table.from_batches([pa.RecordBatch.from_struct_array(keys_of)]).append_column(HASH, given)
    rows = rows.append_column(GONE, pa.array(np.full(count, hashes is None)))
    return rows.append_column(STEP, pa.array(np.full(count, step, np.int64)))
