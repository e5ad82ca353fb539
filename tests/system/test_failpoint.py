"""Failpoints act where, when and as often as ordered, and never otherwise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.system.failpoint import DIRECTORY_VARIABLE, VARIABLE, FailpointError, reach


def _run(program: str, orders: str, directory: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, VARIABLE: orders, **({DIRECTORY_VARIABLE: str(directory)} if directory else {})}
    return subprocess.run(
        [sys.executable, "-c", f"from tailrace.system.failpoint import reach\n{program}"],
        env=environment,
        start_new_session=True,
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_orders_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    reach("place")


def test_only_the_named_place_raises_and_only_while_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "other:raise, place:raise")
    reach("elsewhere")
    with pytest.raises(FailpointError, match="place"):
        reach("place")
    monkeypatch.delenv(VARIABLE)
    reach("place")


def test_the_nth_time_is_the_only_one_that_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "nth:raise@3")
    reach("nth")
    reach("nth")
    with pytest.raises(FailpointError):
        reach("nth")
    reach("nth")


def test_once_is_once_for_all_processes_together(tmp_path: Path) -> None:
    first = _run("reach('place'); print('went on')", "place:kill!once", tmp_path)
    assert first.returncode == -signal.SIGKILL
    assert (tmp_path / "place").exists()
    second = _run("reach('place'); print('went on')", "place:kill!once", tmp_path)
    assert second.returncode == 0
    assert second.stdout == "went on\n"


def test_a_kill_takes_the_whole_process_group() -> None:
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "reach('place')\n"
    )
    # The pipes to the child stay open for as long as it lives, so returning at all means that it died.
    assert _run(program, "place:kill").returncode == -signal.SIGKILL


def test_a_kill_in_a_child_with_a_group_of_its_own_takes_the_parent_too() -> None:
    program = (
        "import subprocess, sys\n"
        "child = 'import os; os.setpgid(0, 0); from tailrace.system.failpoint import reach; reach(\"place\")'\n"
        "subprocess.run([sys.executable, '-c', child])\n"
        "print('the parent lives')\n"
    )
    done = _run(program, "place:kill")
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == ""


def test_a_hang_lasts_until_the_process_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "from tailrace.system.failpoint import reach; print('at', flush=True); reach('place')"],
        env={**os.environ, VARIABLE: "place:hang"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "at\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.kill()


@pytest.mark.parametrize("orders", ["place", "place:explode", "place:kill@0", "place:kill!once", "a b:kill"])
def test_orders_that_cannot_be_understood_are_refused(orders: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, orders)
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    with pytest.raises(ValueError, match=VARIABLE):
        reach("place")


def test_a_paused_process_continues_after_sigcont() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "from tailrace.system.failpoint import reach; reach('place'); print('went on')"],
        env={**os.environ, VARIABLE: "place:pause"},
        stdout=subprocess.PIPE,
        text=True,
    )
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    process.send_signal(signal.SIGCONT)
    assert process.communicate()[0] == "went on\n"
