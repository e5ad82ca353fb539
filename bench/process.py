"""Memory and CPU time of a process tree, read from /proc, separately for Python and Java."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from tests.support.process import command_line, descendants, stat

SAMPLE_SECONDS = 0.2
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """One number for the Python processes of a tree and one for the others (Java or PostgreSQL)."""

    python: float
    other: float

    def __sub__(self, before: Usage) -> Usage:
        return Usage(self.python - before.python, self.other - before.other)


def tree(root: int) -> list[int]:
    """A process and all its descendants."""
    return [root, *descendants(root)]


def cpu_seconds(root: int) -> Usage:
    """CPU time so far. That of ended children counts as Python's, because Java starts no other programs here."""
    python = other = 0.0
    for pid in tree(root):
        if not (fields := stat(pid)):
            continue
        own, ended = sum(map(int, fields[11:13])) / _TICK, sum(map(int, fields[13:15])) / _TICK
        python += ended
        if _is_python(pid):
            python += own
        else:
            other += own
    return Usage(python, other)


def cpu_by_process(root: int) -> dict[str, float]:
    """CPU time so far of each process of a tree, with its ended children, by number and words of its command line."""
    found: dict[str, float] = {}
    for pid in tree(root):
        if fields := stat(pid):
            found[f"{_words(pid)} [{pid}]"] = sum(map(int, fields[11:15])) / _TICK
    return found


def memory_bytes(root: int) -> dict[int, int]:
    """Memory in use, by process; shared memory is divided among its processes."""
    used: dict[int, int] = {}
    for pid in tree(root):
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        sizes = [int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")]
        used[pid] = sum(sizes) * 1024
    return used


class Peak:
    """The peak memory of a tree during the block, and the Python processes that used it."""

    def __init__(self, root: int) -> None:
        self.root = root
        self.python = 0
        self.java = 0
        self.processes: dict[str, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            used = memory_bytes(self.root)
            python = {pid: size for pid, size in used.items() if _is_python(pid)}
            self.java = max(self.java, sum(used.values()) - sum(python.values()))
            if sum(python.values()) > self.python:
                self.python = sum(python.values())
                self.processes = {f"{_words(pid)} [{pid}]": size for pid, size in python.items()}


def _words(pid: int) -> str:
    words = command_line(pid).decode(errors="replace").split("\0")
    return " ".join(words[1:4])[:60] or "ended"


def _is_python(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/exe").readlink().name.startswith("python")
    except OSError:
        return False
