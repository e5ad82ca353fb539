"""Failpoints: named places in the code where a test can make the process die, fail or hang.

TAILRACE_FAILPOINTS holds a comma-separated list of `name:action`, where the action is

    kill     SIGKILL to the process group, and to the groups of ancestors with the same variable (so the JVM dies too)
    raise    raise FailpointError
    hang     block until killed
    pause    SIGSTOP to the process itself; it continues when it receives SIGCONT

`name:kill@3` acts at the third time this process reaches the failpoint. When TAILRACE_FAILPOINTS_DIR names a directory,
each failpoint that acts creates a file `name` there. `name:kill!once` acts only while that file is missing, so it acts
once, even if the process is restarted.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "TAILRACE_FAILPOINTS"
DIRECTORY_VARIABLE = "TAILRACE_FAILPOINTS_DIR"

_ORDER = re.compile(r"(?P<name>[\w.-]+):(?P<action>kill|raise|hang|pause)(@(?P<nth>[1-9]\d*))?(?P<once>!once)?")


class FailpointError(RuntimeError):
    """Raised by the action `raise`. Not a TailraceError, so that no code expects it."""


@dataclass
class _Order:
    action: str
    nth: int
    once: bool
    reached: int = 0


_text = ""
_orders: dict[str, _Order] = {}
_lock = threading.Lock()


def reach(name: str) -> None:
    """Mark the failpoint `name`. Takes under a microsecond and does nothing unless a test has set an action for it."""
    text = os.environ.get(VARIABLE, "")
    if text or _text:
        _obey(name, text)


def _obey(name: str, text: str) -> None:
    global _text, _orders
    with _lock:
        if text != _text:
            _text, _orders = text, _parse(text)
        order = _orders.get(name)
        if order is None:
            return
        order.reached += 1
        if order.nth and order.reached != order.nth:
            return
        if not _leave_mark(name) and order.once:
            return
    if order.action == "kill":
        _kill()
    if order.action == "pause":
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    if order.action == "hang":
        threading.Event().wait()
    raise FailpointError(f"failpoint {name}")


def _parse(text: str) -> dict[str, _Order]:
    orders: dict[str, _Order] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        found = _ORDER.fullmatch(part)
        if not found:
            raise ValueError(f"{VARIABLE}: {part!r} is not name:kill|raise|hang|pause, with @n and !once as options")
        if found["once"] and not os.environ.get(DIRECTORY_VARIABLE):
            raise ValueError(f"{VARIABLE}: {part!r} needs {DIRECTORY_VARIABLE} to remember that it acted")
        orders[found["name"]] = _Order(found["action"], int(found["nth"] or 0), bool(found["once"]))
    return orders


def _leave_mark(name: str) -> bool:
    """Record that the failpoint acted; True if it had not acted before (always True without a directory)."""
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if not directory:
        return True
    try:
        Path(directory, name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _kill() -> None:
    # Spark's Python workers have a process group of their own; the JVM and the driver above it must die as well.
    for group in _ordered_groups() - {os.getpgrp()}:
        with suppress(ProcessLookupError):  # another process reached a failpoint and killed the group first
            os.killpg(group, signal.SIGKILL)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _ordered_groups() -> set[int]:
    """The process groups of every ancestor that was started with failpoints; needs /proc, else none."""
    groups: set[int] = set()
    pid = os.getppid()
    while pid > 1:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            parent, group = map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1:3])
        except OSError:
            break
        if f"{VARIABLE}=".encode() not in environment:
            break
        groups.add(group)
        pid = parent
    return groups
