"""Copied rows on their way: each call's in a file of its own beside the replica, until the batch that names it.

They are Arrow files, written in parallel and without the replica's write lock. A file goes when its batch is committed;
one whose batch never came, after a crash, goes once it is a day old.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa

from tailrace.destination import Staged
from tailrace.errors import TableError
from tailrace.model.change import Changes
from tailrace.model.collapse import fit
from tailrace.model.schema import TableSchema
from tailrace.system import failpoint
from tailrace.system.atomic_file import make_folder, sync

ABANDONED_SECONDS = 86_400.0
_COLUMNS = ("op", "commit", "ordinal", "committed_at", "exact", "row")


def folder_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-staged")


def write(path: Path, table: TableSchema, rows: Iterable[Changes]) -> Staged:
    """Store the rows durably. The receipt names the file and the version of its rows."""
    folder = folder_of(path)
    make_folder(folder)
    file = folder / f"{uuid.uuid4().hex}.arrow"
    count = 0
    try:
        with ExitStack() as stack:
            writer: Any = None
            for changes in rows:
                batch = fit(changes, table).batch.select(list(_COLUMNS))
                if writer is None:
                    writer = stack.enter_context(pa.ipc.new_file(stack.enter_context(file.open("xb")), batch.schema))
                writer.write_batch(batch)
                count += len(changes)
        if count:
            sync(file)
            sync(folder)
    except BaseException:
        file.unlink(missing_ok=True)
        raise
    failpoint.reach("sqlite.staged")
    receipt = {"file": file.name if count else None, "table": table.to_json()}
    return Staged(json.dumps(receipt, ensure_ascii=False), count, file.stat().st_size if count else 0)


def read(path: Path, staged: Sequence[Staged]) -> Iterator[Changes]:
    """The rows of the receipts, in their order. Raises TableError when a file is gone."""
    for one in staged:
        receipt = json.loads(one.receipt)
        if receipt["file"] is None:
            continue
        table = TableSchema.from_json(receipt["table"])
        file = folder_of(path) / Path(receipt["file"]).name
        try:
            source = pa.memory_map(str(file))
        except FileNotFoundError:
            raise TableError(
                f"{one.rows} copied rows are no longer in {folder_of(path)}",
                table=str(table.table),
                fix=f"tailrace resync FILE {table.table}, and let nobody else clean that folder",
            ) from None
        with source, pa.ipc.open_file(source) as reader:
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                yield Changes.build(
                    table,
                    batch.column("row"),
                    op=batch.column("op").to_numpy(),
                    commit=batch.column("commit").to_numpy(),
                    ordinal=batch.column("ordinal").to_numpy(),
                    committed_at=batch.column("committed_at"),
                    exact=batch.column("exact"),
                )


def discard(path: Path, staged: Sequence[Staged]) -> None:
    """Delete the files of the receipts, whose rows are in the replica. A repeat does nothing."""
    for one in staged:
        if (name := json.loads(one.receipt)["file"]) is not None:
            (folder_of(path) / Path(name).name).unlink(missing_ok=True)


def discard_abandoned(path: Path) -> int:
    """Delete files whose batch will not come any more; says how many."""
    oldest = time.time() - ABANDONED_SECONDS
    gone = [file for file in folder_of(path).glob("*.arrow") if file.stat().st_mtime < oldest]
    for file in gone:
        file.unlink(missing_ok=True)
    return len(gone)
