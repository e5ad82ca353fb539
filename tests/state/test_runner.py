from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from tailrace.errors import OwnedError
from tailrace.state import RunnerLock
from tailrace.state.runner import find_owner

_HOLDER = """
import sys, signal
from pathlib import Path
from tailrace.state import RunnerLock
lock = RunnerLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
signal.pause()
"""


def test_a_second_runner_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    with RunnerLock(tmp_path):
        with pytest.raises(OwnedError, match=f"process {os.getpid()} on ") as refused:
            RunnerLock(tmp_path).acquire()
        assert refused.value.fix is not None
        assert f"kill {os.getpid()}" in refused.value.fix
    RunnerLock(tmp_path).acquire().release()


def test_the_owner_can_be_found_without_disturbing_it(tmp_path: Path) -> None:
    assert find_owner(tmp_path) is None
    with RunnerLock(tmp_path):
        owner = find_owner(tmp_path)
        assert owner is not None
        assert owner.pid == os.getpid()
    assert find_owner(tmp_path) is None


def test_a_killed_runner_lets_go(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(OwnedError, match=f"process {holder.pid} on "):
        RunnerLock(tmp_path).acquire()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    RunnerLock(tmp_path).acquire().release()


def test_a_forked_child_does_not_hold_the_lock(tmp_path: Path) -> None:
    lock = RunnerLock(tmp_path).acquire()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    lock.release()
    try:
        RunnerLock(tmp_path).acquire().release()
    finally:
        os.close(writing)
        os.waitpid(child, 0)


def test_a_lock_that_was_let_go_is_forgotten(tmp_path: Path) -> None:
    lock = RunnerLock(tmp_path)
    for _ in range(2):
        lock.acquire().release()
    kept = weakref.ref(lock)
    del lock
    gc.collect()
    assert kept() is None, "a process that runs pipelines for years holds nothing of those that ended"
