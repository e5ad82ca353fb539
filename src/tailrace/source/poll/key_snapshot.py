"""What is known downstream of a table's rows: files in the pipeline's state folder, written by the reading tasks.

    window-<step>-<attempt>.npy      hashes of the rows that a poll emitted and that the next poll will see again
    polled-<step>-<attempt>.parquet  keys and hashes a poll emitted, deletes without a hash; of a full diff, the keys
                                     that came with earlier polls: those it found gone, and those still there;
                                     -<share>of<shares> after the attempt names the task that checked them
    base-<step>-<attempt>.parquet    keys and hashes of one stretch of keys, as a copy or a full diff left it
    found-<step>-<attempt>.arrow     changes that one task of a full diff found, until they are applied

A step that is repeated writes its files again under another name. Which attempt reached the destination is not known
here, so all are read: a hash they do not agree on counts as unknown. An unknown hash only means that a change is
emitted twice. Files are durable before their rows can be applied, so no key is ever missing.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tailrace.errors import RESYNC, DamagedError
from tailrace.model import key as keys
from tailrace.source.poll import keyset
from tailrace.source.poll.keyset import Keyset, Stretch
from tailrace.system.atomic_file import creating

T = TypeVar("T")
Hashes = npt.NDArray[np.int64]

HASH: Final = "_tailrace_hash"
PART: Final = "_tailrace_part"
STEP: Final = "_tailrace_step"
GONE: Final = "_tailrace_gone"
MOST_POLLED: Final = 64
"""How many files of polls there may be before they are merged into one."""


@dataclass(frozen=True)
class KeySnapshot:
    """The files of one table."""

    folder: Path

    @classmethod
    def of(cls, folder: str, upstream_id: str) -> KeySnapshot:
        return cls(Path(folder) / quote(upstream_id, safe="").replace(".", "%2E"))

    # -- the window of a poll -----------------------------------------------------------------------------

    def put_window(self, step: int, hashes: Hashes) -> None:
        with creating(self._new("window", step, "npy")) as file:
            np.save(file, hashes, allow_pickle=False)

    def window(self, step: int) -> Hashes:
        """The rows that the step certainly emitted; empty when nothing is known of it."""
        try:
            found = [np.load(path, allow_pickle=False) for path in sorted(self.folder.glob(f"window-{step:016}-*.npy"))]
        except (ValueError, EOFError):
            found = []  # damaged: the rows are emitted again
        given = found[0] if found else np.zeros(0, np.int64)
        for other in found[1:]:
            given = np.intersect1d(given, other)
        return given

    # -- keys and hashes ----------------------------------------------------------------------------------

    def put_polled(self, step: int, rows: pa.Table, share: str = "") -> None:
        """Store what `record` made of the rows of one attempt, even if there were none.

        Only attempts at the same `share` of a step should have the same keys.
        """
        self._put("polled", step, rows, share)

    def put_base(self, step: int, stretch: Stretch, rows: pa.Table, cuts: Sequence[Keyset] = ()) -> None:
        """Store what `record` made of a stretch, and PART: between which cuts a key lies, to split it later."""
        range_ = [keyset.to_json(stretch.after), None if stretch.upto is None else keyset.to_json(stretch.upto)]
        note = json.dumps({"stretch": range_, "cuts": [keyset.to_json(cut) for cut in cuts]})
        self._put("base", step, rows.replace_schema_metadata({b"tailrace": note.encode()}))

    def polled(self, after: int, upto: int) -> pa.Table | None:
        """The last known state of every key that steps from the base `after` to `upto` brought.

        Its columns, HASH, GONE and STEP. HASH is null where attempts disagree, and for a key that was deleted, of which
        GONE is true. None without polls.
        """
        return self._while_gathered(lambda: _fold_files(tuple(self._polled(after, upto))))

    def count_polled(self, after: int, upto: int) -> int:
        """About how many keys `polled` has: a key that several polls brought is counted each time."""
        try:
            return self._while_gathered(
                lambda: sum(int(pq.read_metadata(path).num_rows) for path in self._polled(after, upto))
            )
        except pa.ArrowInvalid:
            return 0  # damaged, which `polled` reports

    def _while_gathered(self, read: Callable[[], T]) -> T:
        """The result of `read`, repeated if `gather` merged the files meanwhile."""
        while True:
            try:
                return read()
            except FileNotFoundError:
                continue

    def _polled(self, after: int, upto: int) -> list[Path]:
        return [path for path in sorted(self.folder.glob("polled-*.parquet")) if after <= _step(path) <= upto]

    def bases(self, step: int) -> list[Base] | None:
        """The stretches a base consists of, which together are the whole table; None when part of it is missing."""
        by_stretch: dict[tuple[Keyset, Keyset | None], list[tuple[Path, list[Keyset]]]] = {}
        for path in sorted(self.folder.glob(f"base-{step:016}-*.parquet")):
            try:
                note = json.loads(pq.read_schema(path).metadata[b"tailrace"])
            except (OSError, ValueError, KeyError, TypeError):
                return None  # damaged, or just deleted
            after, upto = note["stretch"]
            place = (keyset.from_json(after), None if upto is None else keyset.from_json(upto))
            by_stretch.setdefault(place, []).append((path, [keyset.from_json(cut) for cut in note["cuts"]]))
        ends = dict(by_stretch.keys())
        at: Keyset | None = keyset.START
        found: list[Base] = []
        while at is not None:
            if at not in ends or len(found) > len(ends) * 1000:
                return None
            upto = ends[at]
            found += _pieces(Stretch(at, upto), by_stretch[at, upto])
            at = upto
        return found if len(ends) == len({base.whole for base in found}) else None

    def prune(self, *, window: int, base: int, applied: int) -> None:
        """Delete windows and bases of earlier steps, and what was applied. A second call does no harm."""
        first = {"window": window, "polled": base, "base": base, "found": applied + 1}
        for path in self._files():
            if _step(path) < first[_kind(path)]:
                path.unlink(missing_ok=True)

    def leave(self) -> None:
        """Delete everything of a table that is no longer followed. A second call does no harm."""
        for path in self._files():
            path.unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()

    def forget(self, after: int) -> None:
        """Delete what later steps wrote: they failed, and nothing of them was applied."""
        for path in self._files():
            if _step(path) > after:
                path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return [path for path in self.folder.glob("*-*") if _kind(path) in _KINDS]

    def gather(self, base: int, upto: int) -> None:
        """Merge files of steps that will not be repeated into one. A crash leaves extra files, never missing ones."""
        files = self._polled(base, upto)
        if len(files) <= MOST_POLLED:
            return
        last = max(map(_step, files))
        self._put("polled", last, _fold([_load(path) for path in files], [_made_at(path) for path in files]))
        for path in files:
            path.unlink(missing_ok=True)

    def new_diff_result(self, step: int) -> Path:
        """The file for what one attempt of a comparison found."""
        return self._new("found", step, "arrow")

    def _new(self, kind: str, step: int, ending: str, share: str = "") -> Path:
        return self.folder / f"{kind}-{step:016}-{uuid.uuid4().hex}{share and f'-{share}'}.{ending}"

    def _put(self, kind: str, step: int, rows: pa.Table, share: str = "") -> None:
        with creating(self._new(kind, step, "parquet", share)) as file:
            pq.write_table(rows, file, compression="zstd", write_page_checksum=True)


def last_step(folder: Path) -> int:
    """The highest step that wrote a file of any table in the state folder; 0 when there is none."""
    files = [path for table in folder.glob("*/") for path in KeySnapshot(table)._files()]
    return max(map(_step, files), default=0)


def _load(path: str | Path, **options: Any) -> pa.Table:
    """The rows of a file. Raises DamagedError when they are not those that were written."""
    try:
        return pq.read_table(path, page_checksum_verification=True, **options)
    except (pa.ArrowInvalid, OSError) as error:
        if getattr(error, "errno", None) or isinstance(error, FileNotFoundError):
            raise
        raise DamagedError(f"the key snapshot {path} is damaged", fix=RESYNC) from error


_KINDS = frozenset({"window", "polled", "base", "found"})


def _kind(path: Path) -> str:
    # Includes unfinished files of a process that ended while it wrote.
    return path.name.lstrip(".").partition("-")[0]


def _step(path: Path) -> int:
    return int(path.name.split("-")[1])


def _made_at(path: Path) -> tuple[int, str]:
    """The step of a file, and its share of that."""
    return _step(path), "".join(path.stem.split("-")[3:])


@dataclass(frozen=True)
class Base:
    """A stretch of keys and the files that hold them; with `part`, only that part of a single file."""

    stretch: Stretch
    files: tuple[str, ...]
    whole: Stretch
    part: int | None = None

    def read(self) -> pa.Table:
        """Key columns and HASH, null where attempts disagree."""
        filters = [(PART, "=", self.part)] if self.part is not None else None
        tables = [_load(path, filters=filters).drop_columns([PART]) for path in self.files]
        return tables[0] if len(tables) == 1 else _fold(tables, [(0, "")] * len(tables)).select(tables[0].schema.names)


def read_keys(file: str, names: Sequence[str]) -> pa.Table:
    """The keys in one file of a base, without their hashes."""
    return _load(file, columns=list(names))


def _pieces(whole: Stretch, attempts: Sequence[tuple[Path, Sequence[Keyset]]]) -> Iterator[Base]:
    files = tuple(str(path) for path, _ in attempts)
    cuts = attempts[0][1] if len(attempts) == 1 else ()
    if not cuts:
        yield Base(whole, files, whole)
        return
    places = [whole.after, *cuts, whole.upto]
    for part, (after, upto) in enumerate(pairwise(places)):
        assert after is not None
        yield Base(Stretch(after, upto), files, whole, part)


@lru_cache(maxsize=1)
def _fold_files(files: tuple[Path, ...]) -> pa.Table | None:
    """Cached for the next piece of the same diff, as every piece needs it. A file is never written twice."""
    return _fold([_load(path) for path in files], [_made_at(path) for path in files]) if files else None


def _fold(attempts: Sequence[pa.Table], at: Sequence[tuple[int, str]]) -> pa.Table:
    """One row per key: that of its last step. Where the attempts at that step differ it has no hash, and is not gone.

    Each attempt has key columns, HASH, GONE and STEP, and was made `at` a share of a step also when it has no rows. A
    key that one of them lacks differs, too.
    """
    # A key's type may have been widened since.
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
        (step, share)
        for (own, share), each in zip(at, attempts, strict=True)
        for step in {own, *pc.unique(each[STEP]).to_pylist()}
    )
    first_of_attempt = np.append(True, (attempt[order][1:] != attempt[order][:-1]))[: len(order)]
    first_of_attempt[begins] = True
    present = np.add.reduceat(first_of_attempt.astype(np.int64), begins) if len(begins) else sizes
    places = zip(last_step.tolist(), attempt[order][begins].tolist(), strict=True)
    whole = present == np.array([made[step, at[one][1]] for step, one in places], np.int64)
    sure = agree(filled) & agree(valid) & agree(gone) & whole
    kept = rows.take(pa.array(order[begins])).select(names)
    kept = kept.append_column(HASH, pa.array(filled[begins], mask=~(valid[begins] & sure)))
    kept = kept.append_column(GONE, pa.array(gone[begins] & sure))
    return kept.append_column(STEP, pa.array(last_step))


def _changes(ordered: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The indexes at which runs of equal numbers begin."""
    return np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)])


def record(keys_of: pa.StructArray, hashes: Hashes | None, step: int) -> pa.Table:
    """Keys and hashes as a table for `put_polled` and `put_base`; without hashes they are deletes."""
    count = len(keys_of)
    given = pa.nulls(count, pa.int64()) if hashes is None else pa.array(hashes)
    rows = pa.Table.from_batches([pa.RecordBatch.from_struct_array(keys_of)]).append_column(HASH, given)
    rows = rows.append_column(GONE, pa.array(np.full(count, hashes is None)))
    return rows.append_column(STEP, pa.array(np.full(count, step, np.int64)))
