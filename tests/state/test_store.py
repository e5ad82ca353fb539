"""The state in a SQLite file: what is true of the file and not of every store (see tests/contract/test_store.py)."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tailrace.errors import ConfigError, DamagedError, OwnedError
from tailrace.state import Owner, RunnerLock, SqliteStore, StateStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StateStore]:
    with SqliteStore("shop", tmp_path).open() as opened:
        yield opened


def test_the_state_of_another_pipeline_is_refused(store: StateStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="belongs to pipeline shop, not other"):
        SqliteStore("other", tmp_path).open()
    assert store.pipeline().name == "shop"


def test_the_runner_is_the_process_that_holds_the_folder(store: StateStore, tmp_path: Path) -> None:
    store.claim_run()
    assert store.runner() is None
    with RunnerLock(tmp_path):
        runner = store.runner()
    assert runner is not None
    assert runner.pid == os.getpid()


def test_a_holder_that_died_on_this_machine_need_not_be_waited_for(store: StateStore) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead = replace(Owner.here(), pid=ended.pid)
    store.claim_run(dead, seconds=600)
    assert store.pipeline().owner == dead
    assert store.claim_run() == 2
    assert dead.gone
    assert not replace(dead, pid=os.getppid()).gone


def test_a_dead_process_on_another_machine_of_the_same_name_may_live(store: StateStore) -> None:
    here = Owner.here()
    store.claim_run(replace(here, pid=2**22 + 1, machine="another boot"), seconds=600)
    with pytest.raises(OwnedError):
        store.claim_run()
    assert not replace(here, machine="").gone


def test_a_copy_of_the_bare_file_can_be_read_after_a_clean_end(tmp_path: Path) -> None:
    with SqliteStore("shop", tmp_path / "live").open() as store:
        store.add_table("1", "public.a")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(tmp_path / "live" / "state.db", elsewhere)
    elsewhere.chmod(0o555)
    try:
        with SqliteStore("shop", elsewhere).open_reading() as reader:
            assert [table.name for table in reader.tables()] == ["public.a"]
    finally:
        elsewhere.chmod(0o755)


def test_reading_before_the_first_run_leaves_the_folder_empty(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has not run yet"):
        SqliteStore("shop", tmp_path).open_reading()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_only_being_made_is_not_read(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "state.db").close()
    (tmp_path / "state.db").touch()
    with pytest.raises(ConfigError, match="only being made"):
        SqliteStore("shop", tmp_path).open_reading()


def test_a_newer_format_is_refused_by_readers_and_writers(store: StateStore, tmp_path: Path) -> None:
    store.close()
    with sqlite3.connect(tmp_path / "state.db") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(ConfigError, match="has format 99, this tailrace reads up to 6"):
        SqliteStore("shop", tmp_path).open()
    with pytest.raises(ConfigError, match="has format 99"):
        SqliteStore("shop", tmp_path).open_reading()


def test_a_file_that_is_no_database_is_called_damaged(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_bytes(b"not a database at all, but long enough to be taken for one" * 100)
    with pytest.raises(DamagedError, match="not a sound state file"):
        SqliteStore("shop", tmp_path).open()


def test_reading_the_state_loads_neither_arrow_nor_a_driver(store: StateStore, tmp_path: Path) -> None:
    store.add_table("1", "public.a")
    code = (
        "import sys; from tailrace.state.status import PipelineStatus; from tailrace.state import SqliteStore\n"
        "PipelineStatus.read(SqliteStore('shop', sys.argv[1]).open_reading()).to_dict()\n"
        "print({'pyarrow', 'psycopg', 'pydantic', 'pyspark'} & set(sys.modules))"
    )
    said = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert said.stdout == "set()\n"


_WRITER = """
import sys
from tailrace.state import BatchRecord, SqliteStore, TableUpdate
with SqliteStore("shop", sys.argv[1]).open() as store:
    store.claim_run()
    store.add_table("1", "public.a"), store.add_table("2", "public.b")
    for batch in range(1_000_000):
        updates = [TableUpdate("1", changes_applied=1), TableUpdate("2", changes_applied=1)]
        store.apply_batch(BatchRecord(batch, {"lsn": batch}, rows=2), updates)
        print(batch, flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_whole_batches(tmp_path: Path) -> None:
    for wanted in (0, 3, 17):
        folder = tmp_path / str(wanted)
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(folder)], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        assert writer.stdout is not None
        said = -1
        while said < wanted:
            said = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read().split()
        writer.stdout.close()
        writer.wait()
        said = int(rest[-1]) if rest else said
        with SqliteStore("shop", folder).open() as store:
            last = store.last_batch()
            assert last is not None
            # One batch more may be on disk than the writer could still report.
            assert last.id in (said, said + 1)
            assert [table.changes_applied for table in store.tables()] == [last.id + 1] * 2
