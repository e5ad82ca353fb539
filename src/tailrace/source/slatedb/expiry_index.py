"""Which keys of a table may expire, and when: an index next to the stream, sorted by time.

SlateDB sends nothing when a row expires. So a task that reads a row with an `expire_ts` stores its key here, before the
row reaches the destination; once a batch's clock has passed it, the key is looked up in SlateDB and, unless it was
written again meanwhile, deleted. An entry only triggers a lookup: an extra or duplicate entry does no harm.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.system.atomic_file import make_folder, sync

ENTRIES = pa.schema([("expire_ts", pa.int64()), ("key", pa.binary()), ("seq", pa.int64())])
_FAN = 8
"""How many files of about the same size are merged into one."""


class ExpiryIndex:
    """The entries of one table, in a folder that every task sees. Files are replaced atomically."""

    def __init__(self, folder: str | Path, table: str) -> None:
        self.folder = Path(folder) / quote(table, safe="")
        self._times: dict[str, tuple[int, npt.NDArray[np.int64]]] = {}

    def note(self, name: str, expire_ts: pa.Array[Any], key: pa.Array[Any], seq: pa.Array[Any]) -> None:
        """Store entries durably under a name; a second call with the same name replaces them."""
        if len(key):
            self._write(name, pa.table([expire_ts, key, seq], schema=ENTRIES))

    def is_due(self, since: int, clock: int) -> bool:
        """Whether an entry is in (since, clock]. Cheap: a file's times are read once."""
        while True:
            try:
                return any(
                    np.subtract(*np.searchsorted(times, [clock, since], side="right")) for times in self._known()
                )
            except FileNotFoundError:
                continue  # merged into another file a moment ago

    def _known(self) -> Iterator[npt.NDArray[np.int64]]:
        files = list(self._files())
        for gone in self._times.keys() - {path.name for path in files}:
            del self._times[gone]
        for path in files:
            changed = path.stat().st_mtime_ns
            known = self._times.get(path.name)
            if known is None or known[0] != changed:
                known = self._times[path.name] = (changed, _read(path).column("expire_ts").to_numpy())
            yield known[1]

    def between(self, since: int, clock: int) -> pa.Table:
        """The keys with an entry in (since, clock], each once, with the newest `seq` it was stored for."""
        while True:
            try:
                tables = [_slice(_read(path), since, clock) for path in self._files()]
            except FileNotFoundError:
                continue  # merged into another file a moment ago
            due = pa.concat_tables(tables) if tables else ENTRIES.empty_table()
            return due.group_by("key", use_threads=False).aggregate([("seq", "max")]).sort_by("seq_max")

    def tidy(self, clock: int) -> None:
        """Delete entries at or before `clock`, and merge small files. Called between batches."""
        levels: dict[int, list[tuple[Path, pa.Table]]] = {}
        for path in self._files():
            table = _read(path)
            if table.column("expire_ts")[-1].as_py() <= clock:
                path.unlink(missing_ok=True)
                continue
            level = int(np.log(table.num_rows) / np.log(_FAN))
            levels.setdefault(level, []).append((path, table))
        for files in levels.values():
            if len(files) >= _FAN:
                merged = pa.concat_tables([_slice(table, clock, None) for _, table in files])
                digest = hashlib.sha256("".join(path.name for path, _ in files).encode()).hexdigest()[:16]
                self._write(f"merged-{digest}", merged)
                for path, _ in files:
                    path.unlink(missing_ok=True)

    def _files(self) -> Iterator[Path]:
        return iter(sorted(self.folder.glob("*.arrow")))

    def _write(self, name: str, table: pa.Table) -> None:
        make_folder(self.folder)
        write_durably(self.folder / f"{name}.arrow", table.sort_by("expire_ts").combine_chunks())


def _read(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def _slice(table: pa.Table, since: int, clock: int | None) -> pa.Table:
    times = table.column("expire_ts").to_numpy()
    low = int(np.searchsorted(times, since, side="right"))
    high = len(times) if clock is None else int(np.searchsorted(times, clock, side="right"))
    return table.slice(low, max(0, high - low))


def write_durably(path: Path, table: pa.Table | pa.RecordBatch) -> None:
    """Write a file completely or not at all, even after a power cut."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.{id(table):x}")
    with partial.open("wb") as file:
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write(table)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync(path.parent)


def live(expire_ts: pa.Array[Any], clock: int) -> pa.Array[Any]:
    """Which rows have not expired at a time."""
    return pc.fill_null(pc.greater(expire_ts, clock), True)
