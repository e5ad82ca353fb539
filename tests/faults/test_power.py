"""What was reported durable is still there after a power cut, under its name, in folders that are new too."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest

from tailrace.destination import Batch, Stage
from tailrace.destination.sqlite import replica_file
from tailrace.destination.webhook.format.event import QUEUE_SCHEMA
from tailrace.destination.webhook.queue import QueueReader, QueueWriter
from tailrace.destination.webhook.sender.lock import claim_queue, queue_id
from tailrace.journal import Cursor, Frame, Journal
from tailrace.model.change import START, Position
from tailrace.source.poll.diff import write_diff_result
from tailrace.source.poll.key_snapshot import KeySnapshot
from tailrace.source.poll.keyset import START as FIRST
from tailrace.source.poll.keyset import Stretch
from tailrace.source.rqlite.deduplication import DeduplicationWindow
from tailrace.source.schema_file import SchemaFile
from tailrace.source.slatedb.expiry_index import ExpiryIndex
from tailrace.source.slatedb.wal_archive import WalArchive
from tailrace.source.sqlite.cursor import Cursors
from tailrace.state import RunnerLock, SqliteStore
from tailrace.stream.checkpoint import Checkpoint
from tailrace.system.atomic_file import make_folder
from tailrace.testing.destination import ITEMS, changes_of, read
from tests.support.power_loss import Disk

KEYS = pa.table({"id": [1, 2], "_tailrace_part": [0, 0]})
EXTRA = 3
"""SQLite's number for syncing the folder as well, once a commit has removed its journal."""


def know(folder: Path) -> None:
    known = KeySnapshot.of(str(folder), "main.items")
    known.put_window(1, np.arange(3))
    known.put_polled(1, KEYS)
    known.put_base(1, Stretch(FIRST, None), KEYS)
    write_diff_result(known.new_diff_result(1), ITEMS, iter(changes_of(ITEMS, read(id=1, name="a", price=1))))


def hold_wal(folder: Path) -> None:
    keeper = cast(Any, SimpleNamespace(_folder=folder, head=3))
    make_folder(folder)
    WalArchive.hold(keeper, 3)


def note_expiry(folder: Path) -> None:
    ExpiryIndex(folder, "items").note("copy-1", pa.array([9]), pa.array([b"key"]), pa.array([1]))


def remember(folder: Path) -> None:
    make_folder(folder)
    SchemaFile(folder / "versions").put_schema(ITEMS, START)


def store_window(folder: Path) -> None:
    with Journal.open_writer(folder / "cluster") as writer:
        writer.append([Frame(Position(1, 0), Position(1, 1), True, 1)])
    DeduplicationWindow().save(folder / "cluster" / "window")


def fill_queue(folder: Path) -> None:
    with claim_queue(folder), QueueWriter(folder, segment_bytes=1000, max_bytes=1 << 20) as writer:
        queue_id(folder)
        reader = QueueReader(folder)
        for number in range(9):
            event = {"table": "t", "commit": number, "ordinal": 0, "copied": False, "marker": False}
            events = pa.Table.from_pylist([{**event, "id": "1", "event": "{}"}], schema=QUEUE_SCHEMA)
            writer.append(Batch("p", number), [events])
            reader.release(Position(number, 0))
            writer.require_room()
        reader.close()


def begin_checkpoint(folder: Path) -> None:
    with SqliteStore("p", folder.parent.with_name("state")).open() as store, RunnerLock(folder):
        checkpoint = Checkpoint(folder / "checkpoint")
        checkpoint.require(store)
        checkpoint.note_destination("delta /lake", store)
        for log in ("offsets", "commits"):
            (checkpoint.folder / log).mkdir()
            (checkpoint.folder / log / "0").write_text("v1")
        (checkpoint.folder / "metadata").write_text('{"id":"1"}')
        checkpoint.sync("offsets", 0)
        checkpoint.sync("commits", 0)


def advance_cursor(folder: Path) -> None:
    Cursor(folder, "reader").advance(START)


def follow_tape(folder: Path) -> None:
    Cursors(str(folder)).begin("stream", 3)


def stage_rows(folder: Path) -> None:
    Stage(folder / "staged").write(ITEMS, changes_of(ITEMS, read(id=1, name="a", price=1)))


@pytest.mark.parametrize(
    "write",
    [
        know,
        hold_wal,
        note_expiry,
        remember,
        store_window,
        fill_queue,
        begin_checkpoint,
        advance_cursor,
        follow_tape,
        stage_rows,
    ],
)
def test_a_power_cut_takes_nothing_of_what_was_put_down(
    write: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, root = Disk(monkeypatch), tmp_path / "root"
    root.mkdir()
    write(root / "new" / "folder")
    assert files_of(disk.left(root, tmp_path / "left")) == files_of(root) != {}


def test_a_power_cut_undoes_no_commit_where_sqlite_cannot_have_its_log(tmp_path: Path) -> None:
    replica = tmp_path / "replica.db"
    with replica_file.opened(replica, 1.0) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("BEGIN IMMEDIATE")
        with replica_file.opened(replica, 0.0) as another:
            assert another.execute("PRAGMA journal_mode").fetchone() == ("delete",)
            assert another.execute("PRAGMA synchronous").fetchone() == (EXTRA,)
    state = SqliteStore("p", tmp_path / "state").open_database()
    assert state.read("PRAGMA synchronous", {}) == [{"synchronous": EXTRA}]
    state.close()


def files_of(folder: Path) -> dict[Path, bytes]:
    """But for locks, which are of no use to the next process."""
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "lock" not in path.name and path.suffix != ".db"
    }


def test_a_folder_is_made_within_one_that_may_be_written_but_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, synced = os.open, Mock()

    def refusing(path: Any, *rest: Any, **more: Any) -> int:
        if Path(path) == tmp_path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *rest, **more)

    monkeypatch.setattr(os, "open", refusing)
    monkeypatch.setattr(os, "sync", synced)
    make_folder(tmp_path / "state")
    assert (tmp_path / "state").is_dir()
    synced.assert_called_once_with()
