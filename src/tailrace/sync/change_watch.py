"""Waits for the next change of either side of a sync: of the local file by looking at it, of the remote by asking it.

A server with a long poll answers when it has something new. One that answers at once is asked each second.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from tailrace.errors import TailraceError
from tailrace.sync.file_stamp import LOOK_SECONDS, FileStamp, read_stamp
from tailrace.sync.remote import Remote

_POLL_SECONDS = 20.0
_PAUSE_SECONDS = 1.0


class ChangeWatch:
    """Used by one thread, which repeats `begin`, a sync, `wait`."""

    def __init__(self, path: Path, remote: Remote) -> None:
        self._path, self._remote = path, remote
        self._before: FileStamp | None = None
        self._asking: threading.Thread | None = None
        self._has_answered = threading.Event()

    def begin(self) -> None:
        """A sync begins: what is committed from now on is a change."""
        self._before = read_stamp(self._path)

    def wait(self, revision: str, stop: threading.Event) -> None:
        """Return when the local file was written since `begin`, the remote has another revision, or `stop` is set."""
        # A thread that still asks about the last revision ends soon: the remote has another one.
        if self._asking is None or not self._asking.is_alive():
            self._has_answered = threading.Event()
            arguments = (revision, self._has_answered, stop)
            self._asking = threading.Thread(target=self._ask, args=arguments, daemon=True)
            self._asking.start()
        while not stop.wait(LOOK_SECONDS) and not self._has_answered.is_set():
            if self._before is None or read_stamp(self._path) != self._before:
                return

    def _ask(self, revision: str, has_answered: threading.Event, stop: threading.Event) -> None:
        try:
            began = time.monotonic()
            while not self._remote.wait(revision, _POLL_SECONDS):
                if stop.wait(max(0.0, began + _PAUSE_SECONDS - time.monotonic())):
                    return
                began = time.monotonic()
        except TailraceError:
            pass  # the sync that follows meets it too, and reports it
        finally:
            has_answered.set()
