"""A transaction many times larger than a frame, cut by a crash in its middle: applied once, in bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tailrace.model.schema import TableName
from tailrace.source.postgres.frame_builder import FRAME_BYTES
from tests.support.process import command_line, descendants, resident_bytes
from tests.support.runner import RunningPipeline
from tests.support.scenario import Scenario

ROWS = 80_000
ROW_BYTES = 1_000
PYTHON_BYTES = 1_500_000_000
RECEIVER_BYTES = 400_000_000

LARGE = TableName("public", "large")


@contextmanager
def watched(run: RunningPipeline) -> Iterator[dict[str, int]]:
    """The most memory that any Python process of a run held, and its receiver, while the block ran."""
    peaks = {"python": 0, "receiver": 0}
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            for pid in descendants(run.pid):
                command = command_line(pid).split(b"\0")
                if b"python" in command[0]:
                    kind = "receiver" if b"tailrace.source.postgres" in command else "python"
                    peaks[kind] = max(peaks[kind], resident_bytes(pid))

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield peaks
    finally:
        over.set()
        watcher.join()


def test_a_transaction_of_many_frames_cut_in_its_middle_is_applied_once_and_in_one_batch(scenario: Scenario) -> None:
    assert ROWS * ROW_BYTES > 8 * FRAME_BYTES
    scenario.sql(
        "CREATE TABLE large (id int PRIMARY KEY, filler text)",
        "CREATE TABLE log (id int)",
        "INSERT INTO large SELECT i, 'old' FROM generate_series(1, 10) i",
    )
    # The receiver fails with four pieces of the transaction in the journal; the pipeline starts it again by itself.
    with scenario.run(failpoints="receiver.appended:raise@4!once") as run:
        scenario.catch_up(run)
        before = len(scenario.batch_ids(LARGE))
        with watched(run) as peaks:
            scenario.sql(
                f"BEGIN; INSERT INTO large SELECT i, repeat(md5(i::text), {ROW_BYTES // 32})"
                f" FROM generate_series(11, {ROWS}) i; UPDATE large SET filler = 'new' WHERE id <= 10;"
                " INSERT INTO log SELECT generate_series(1, 1000); COMMIT"
            )
            scenario.catch_up(run)
        assert run.acted() == {"receiver.appended"}
    assert scenario.differences() == []
    assert scenario.doubled() == []
    assert len(scenario.batch_ids(LARGE)) == before + 1
    assert 0 < peaks["receiver"] < RECEIVER_BYTES
    assert 0 < peaks["python"] < PYTHON_BYTES


def test_a_backlog_killed_in_the_middle_of_a_transaction_is_applied_once(scenario: Scenario) -> None:
    scenario.sql("CREATE TABLE large (id int PRIMARY KEY, filler text)", "CREATE TABLE log (id int)")
    scenario.apply()
    scenario.sql(
        "INSERT INTO log SELECT generate_series(1, 100)",
        f"BEGIN; INSERT INTO log SELECT generate_series(1, 100);"
        f" INSERT INTO large SELECT i, repeat(md5(i::text), {ROW_BYTES // 32})"
        f" FROM generate_series(1, {ROWS}) i; COMMIT",
    )
    orders = "receiver.appended:kill@3!once,receiver.before_advance:kill!once"
    codes = [scenario.run_once(failpoints=orders) for _ in range(2)]
    assert all(code < 0 for code in codes[: len(scenario.run().acted())])
    scenario.apply()
    assert "receiver.appended" in scenario.run().acted()
    assert scenario.differences() == []
    assert scenario.doubled() == []
