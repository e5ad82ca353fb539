"""What /proc shows of processes. Any of them may end before it is read, so every answer has a value for that."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def descendants(pid: int) -> list[int]:
    """The processes below one, at this moment."""
    children: dict[int, list[int]] = {}
    for each in processes():
        if fields := stat(each):
            children.setdefault(int(fields[1]), []).append(each)
    found, open_ = [], [pid]
    while open_:
        below = children.get(open_.pop(), [])
        found += below
        open_ += below
    return found


def stat(pid: int) -> list[str]:
    """The fields of a process's `stat` from its state on: state, parent, group, session, …; none once it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def is_ended(pid: int) -> bool:
    """Whether a process does nothing any more, even if no one has asked yet how it ended."""
    return not (fields := stat(pid)) or fields[0] in "ZX"


def is_paused(pid: int) -> bool:
    return stat(pid)[:1] == ["T"]


def command_line(pid: int) -> bytes:
    """The words a process was started with, each with a zero byte after it; nothing once it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def resident_bytes(pid: int) -> int:
    """How much memory a process holds; 0 once it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """A signal to each that is still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
