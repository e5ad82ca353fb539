"""Status files of processes: a disk that refuses to store one stops no process."""

from __future__ import annotations

import stat
import time
from pathlib import Path

from tailrace.option.table import FullDiffOptions
from tailrace.source.poll.schedule import PollSchedule
from tailrace.system import status_file
from tests.support.destination_writing import files_of_at_most


def test_a_full_disk_keeps_the_last_status_and_stops_no_process(tmp_path: Path) -> None:
    file = tmp_path / "made" / "status.json"
    assert status_file.read_file(file) == {}
    status_file.write_file(file, {"gear": "tail"})
    with files_of_at_most(0):
        status_file.write_file(file, {"gear": "behind"})
    assert status_file.read_file(file) == {"gear": "tail"}
    file.write_text("[")
    assert status_file.read_file(file) == {}


def test_a_folder_that_is_made_for_a_status_is_private(tmp_path: Path) -> None:
    file = tmp_path / "made" / "status.json"
    status_file.write_file(file, {"gear": "tail"})
    assert (stat.S_IMODE(file.parent.stat().st_mode), stat.S_IMODE(file.stat().st_mode)) == (0o700, 0o600)


def test_a_full_disk_stops_no_schedule(tmp_path: Path) -> None:
    schedule = PollSchedule(tmp_path / "poll" / "schedule.json", 1.0, 30.0)
    with files_of_at_most(0):
        schedule.polled("t", began=time.monotonic(), fresh=False)
        schedule.diffed("t")
    assert not schedule.is_diff_due("t", FullDiffOptions(every_cycles=1))
