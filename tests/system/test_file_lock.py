"""Locks on files: checking a lock keeps no one out, and a holder is seen."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tailrace.system.file_lock import is_locked, try_lock


@contextmanager
def opened(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield file
    finally:
        os.close(file)


def test_a_holder_is_seen_keeps_others_out_and_is_gone_when_its_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    with opened(path) as holder, opened(path) as other:
        assert try_lock(holder)
        assert is_locked(path)
        assert not try_lock(other)
    assert not is_locked(path)


def test_a_process_that_only_checks_a_lock_is_no_holder_and_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    with opened(path) as looking, opened(path) as wanting:
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert not is_locked(path)
        monkeypatch.setattr("tailrace.system.file_lock.time.sleep", lambda _: fcntl.flock(looking, fcntl.LOCK_UN))
        assert try_lock(wanting)
