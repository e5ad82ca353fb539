"""Processes as /proc shows them, gone ones included."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tailrace.testing.wait import wait_until
from tests.support.process import command_line, descendants, is_ended, is_paused, resident_bytes, send, stat


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def test_a_process_is_described(sleeper: subprocess.Popen[bytes]) -> None:
    me = os.getpid()
    assert sleeper.pid in descendants(me)
    assert me not in descendants(me)
    wait_until(lambda: b"time.sleep(60)" in command_line(sleeper.pid))
    assert resident_bytes(sleeper.pid) > 1_000_000
    assert not is_paused(sleeper.pid)
    send([sleeper.pid], signal.SIGSTOP)
    wait_until(lambda: is_paused(sleeper.pid))
    assert not is_ended(sleeper.pid)


def test_a_gone_process_is_ended_and_nothing_else(sleeper: subprocess.Popen[bytes]) -> None:
    send([sleeper.pid], signal.SIGKILL)
    wait_until(lambda: is_ended(sleeper.pid))  # no one has asked how it ended
    sleeper.wait()
    assert is_ended(sleeper.pid)
    assert not is_paused(sleeper.pid)
    assert (stat(sleeper.pid), command_line(sleeper.pid), resident_bytes(sleeper.pid)) == ([], b"", 0)
    assert descendants(sleeper.pid) == []
    send([sleeper.pid], signal.SIGKILL)
