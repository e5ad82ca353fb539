"""Splits that are read by several processes at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest

from tailrace.errors import TableError, UnfitError
from tailrace.model.change import Changes
from tailrace.option.table import TableOptions
from tailrace.source.slatedb import reader_pool as module
from tailrace.source.slatedb.log_split import WalRange, WalSplit, read_wal
from tailrace.source.slatedb.offset import WalPoint
from tailrace.source.slatedb.option import ObjectStoreOptions
from tailrace.source.slatedb.reader_pool import WORTHWHILE_BYTES, ReaderPool
from tailrace.source.slatedb.source import SlateDbSource
from tailrace.source.slatedb.wal import find_tail
from tailrace.testing.wait import wait_until
from tests.support.process import is_ended
from tests.support.slatedb_writing import Writer
from tests.support.source_making import make_slatedb, with_options

ROOT = Path(__file__).parents[3]
END = 2**62
UTF8 = TableOptions.model_validate({"settings": {"slatedb.text": {"mapping": {"prefix": "t:", "value": "utf8"}}}})


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReaderPool]:
    """That of a machine with two cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    made = ReaderPool()
    yield made
    made.close()


def splits_of(source: SlateDbSource, size: int = WORTHWHILE_BYTES) -> list[WalSplit]:
    """One for each file."""
    wanted = {str(table.table): WalRange(table, WalPoint(0, 0), WalPoint(END, END), 0) for table in source.tables()}
    numbers = range(1, find_tail(source.database, 0) + 1)
    return [WalSplit(first=number, last=number, ranges=wanted, bytes=size) for number in numbers]


def read_two(readers: ReaderPool, source: SlateDbSource, here: WalSplit, there: WalSplit) -> list[Changes]:
    """Read one split while another is being read in this process."""
    reading = readers.read(source, here)
    first = next(reading)
    return [first, *readers.read(source, there), *reading]


def rows(changes: list[Changes]) -> list[object]:
    return [row for piece in changes for row in piece.batch.to_pylist()]


def test_what_another_process_reads_is_what_this_one_reads(tmp_path: Path, readers: ReaderPool) -> None:
    with Writer(tmp_path / "store", UTF8) as writer:
        writer.write((b"a", b"1"), (b"t:b", b"2"))
        writer.write((b"a", None), (b"t:c", b"3"))
        source = writer.source(tmp_path / "state", UTF8)
        _, here, there = splits_of(source)
        both = read_two(readers, source, here, there)
        assert [child.process.poll() for child in readers._idle] == [None]
        alone = [piece for split in (here, there) for piece in read_wal(source, split)]
        assert sorted(map(str, rows(both))) == sorted(map(str, rows(alone)))
        assert {piece.table for piece in both} == set(source.tables())


@pytest.mark.parametrize(
    ("change", "size"),
    [
        (lambda source: source, WORTHWHILE_BYTES - 1),
        (lambda source: with_options(source, wal_store=ObjectStoreOptions(type="memory", name="m")), 2**40),
    ],
)
def test_small_splits_and_stores_in_memory_stay_here(
    change: Callable[[SlateDbSource], SlateDbSource], size: int, tmp_path: Path, readers: ReaderPool
) -> None:
    with Writer(tmp_path / "store") as writer:
        source = change(writer.source(tmp_path / "state"))
        split = replace(WalSplit(first=1, last=1), bytes=size)
        readers._here = 1
        assert list(readers.read(source, split)) == []
        assert not readers._idle


def test_tasks_that_read_the_same_files_share_the_cores(tmp_path: Path, readers: ReaderPool) -> None:
    with Writer(tmp_path / "store") as writer:
        writer.put(b"a", b"1")
        source = writer.source(tmp_path / "state")
        [_, split] = splits_of(source)
        assert len(read_two(readers, source, split, replace(split, readers=2))) == 2
        assert not readers._idle


def test_a_process_that_is_killed_is_replaced_and_loses_nothing(tmp_path: Path, readers: ReaderPool) -> None:
    with Writer(tmp_path / "store") as writer:
        writer.put(b"a", b"1")
        writer.put(b"b", b"2")
        source = writer.source(tmp_path / "state")
        _, here, there = splits_of(source)
        expected = rows(read_two(readers, source, here, there))
        [child] = readers._idle
        child.process.kill()
        child.process.wait()
        assert rows(read_two(readers, source, here, there)) == expected
        [other] = readers._idle
        assert other is not child
        os.kill(other.process.pid, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(read_two, readers, source, here, there)
            wait_until(lambda: bool(readers._busy))
            other.process.kill()
            assert rows(waiting.result()) == expected


def test_an_answer_that_was_never_read_is_not_given_to_the_next_request(
    tmp_path: Path, readers: ReaderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_answers: IO[bytes]) -> list[Any]:
        raise KeyboardInterrupt

    with Writer(tmp_path / "store") as writer:
        for key in (b"a", b"b", b"c"):
            writer.put(key, b"1")
        source = writer.source(tmp_path / "state")
        _, here, there, other = splits_of(source)
        with monkeypatch.context() as patch:
            patch.setattr(module, "receive_rows", interrupted)
            with pytest.raises(KeyboardInterrupt):
                read_two(readers, source, here, there)
        assert not readers._busy
        pieces = read_two(readers, source, here, other)
        assert [key for piece in pieces for key in piece.row.field("key").to_pylist()] == [b"a", b"c"]


def test_errors_of_another_process_are_raised_here(tmp_path: Path, readers: ReaderPool) -> None:
    with Writer(tmp_path / "store", UTF8) as writer:
        writer.put(b"t:a", b"fits")
        writer.put(b"t:b", b"\xff")
        source = writer.source(tmp_path / "state", UTF8)
        _, here, there = splits_of(source)
        with pytest.raises(UnfitError) as caught:
            read_two(readers, source, here, there)
        assert (caught.value.table, caught.value.raw) == ("slatedb.text", b"\xff")
        writer.flush()
        writer.put(b"t:a", b"")
        writer.flush()
        writer.collect()
        readers._here = 1
        with pytest.raises(TableError, match="only a new snapshot helps"):
            list(readers.read(source, there))
        assert len(readers._idle) == 1


def test_further_processes_do_not_outlive_the_one_that_was_killed(tmp_path: Path) -> None:
    with Writer(tmp_path / "store") as writer:
        writer.put(b"a", b"1")
        program = [sys.executable, "-m", "tests.source.slatedb.test_reader_pool", str(tmp_path / "store")]
        owner = subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        with owner:
            assert owner.stdout is not None
            child = int(owner.stdout.readline())
            os.kill(child, 0)
            owner.kill()
        wait_until(lambda: is_ended(child))


def _own(store: str) -> None:
    """Start a further process, print its process id, and never end."""
    source = make_slatedb({"type": "local", "path": store}, Path(f"{store}-state"))
    [_, split] = splits_of(source)
    os.cpu_count = lambda: 2
    read_two(module.reader_pool(), source, split, split)
    [child] = module.reader_pool()._idle
    print(child.process.pid, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    _own(sys.argv[1])
