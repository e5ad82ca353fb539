"""Housekeeping in the background: one job at a time, no batch waits for it, and no error of it reaches a batch."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tailrace.destination import Batch, Stage, TableBatch
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.destination.delta.option import CompactOptions
from tailrace.errors import TableError
from tailrace.option.table import TableOptions
from tailrace.stream import micro_batch, upkeep
from tailrace.stream.block import CopyReceipt, staged_row
from tailrace.stream.micro_batch import Applier
from tailrace.stream.upkeep import Upkeep
from tailrace.testing.destination import ITEMS, changes_of, insert, read
from tests.support.source_making import make_postgres

SECONDS = 30.0


def test_jobs_are_done_one_after_the_other_and_not_by_the_thread_that_submits_them() -> None:
    background, go = Upkeep(), threading.Event()
    done: list[tuple[str, int]] = []

    def job(name: str) -> None:
        go.wait(SECONDS)
        done.append((name, threading.get_ident()))

    assert background.submit("a", lambda: job("a"))
    assert background.submit("b", lambda: job("b"))
    assert done == []
    go.set()
    assert background.wait(SECONDS)
    assert [name for name, _ in done] == ["a", "b"]
    assert {thread for _, thread in done}.isdisjoint({threading.get_ident()})
    assert len({thread for _, thread in done}) == 1


def test_a_table_whose_housekeeping_waits_or_is_under_way_is_not_taken_again() -> None:
    background, begun, go = Upkeep(), threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        go.wait(SECONDS)

    assert background.submit("a", job)
    begun.wait(SECONDS)
    assert not background.submit("a", job)
    assert background.submit("b", job)
    assert not background.submit("b", job)
    go.set()
    assert background.wait(SECONDS)
    assert background.submit("a", job)
    assert background.wait(SECONDS)


@pytest.mark.parametrize("error", [TableError("a file is gone"), ValueError("a secret")])
def test_a_job_that_fails_is_logged_and_the_next_one_is_done(
    caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    background = Upkeep()
    done: list[str] = []

    def fail() -> None:
        raise error

    background.submit("a", fail)
    background.submit("b", lambda: done.append("b"))
    assert background.wait(SECONDS)
    assert done == ["b"]
    [said] = caplog.messages
    assert said.startswith("housekeeping of a: ")
    assert "secret" not in said


def test_the_thread_has_a_lower_priority_than_its_process() -> None:
    background = Upkeep()
    seen: list[int] = []
    background.submit("a", lambda: seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
    assert background.wait(SECONDS)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert seen == [min(own + upkeep.NICENESS, 19)]
    assert os.getpriority(os.PRIO_PROCESS, os.getpid()) == own


def test_the_end_of_a_process_does_not_wait_for_a_job() -> None:
    code = (
        "import threading\nfrom tailrace.stream.upkeep import BACKGROUND\nbegun = threading.Event()\n"
        "BACKGROUND.submit('a', lambda: (begun.set(), threading.Event().wait()))\nbegun.wait()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_batch_ends_while_the_housekeeping_it_began_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batch, "UPKEEP_BATCHES", 1)
    begun, go = threading.Event(), threading.Event()
    plainly = DeltaDestination.maintain

    def maintain(self: DeltaDestination, table: object) -> str | None:
        begun.set()
        go.wait(SECONDS)
        return plainly(self, ITEMS.table)

    monkeypatch.setattr(DeltaDestination, "maintain", maintain)
    destination = DeltaDestination(
        path=str(tmp_path / "lake"), compact=CompactOptions(files=2), updates="merge_on_read", vacuum=None
    )
    destination.write_changes(TableBatch(ITEMS, Batch("p", 0), changes_of(ITEMS, insert(id=0, name="a", price=1))))
    source = make_postgres("postgresql://", Path("nowhere"), "p", TableOptions())  # no one connects to it
    lane = Applier(source, destination, 1, Stage(tmp_path / "staged"), upkeep_in_background=True)
    for number in (1, 2):
        staged = destination.write_rows(ITEMS, changes_of(ITEMS, read(id=number, name="a", price=1)))
        blocks = iter([staged_row(CopyReceipt(ITEMS, staged, False, False), 0)])
        [result] = [row for rows in lane.run(blocks, Batch("p", number)) for row in rows.to_pylist()]
        assert (result["copied"], result["error"]) == (1, None)
        begun.wait(SECONDS)
    assert len(list((tmp_path / "lake/shop/items").glob("part-*.parquet"))) == 3
    go.set()
    assert upkeep.BACKGROUND.wait(SECONDS)
    assert len(list((tmp_path / "lake/shop/items").glob("part-*.parquet"))) == 4
