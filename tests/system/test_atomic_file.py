"""A file gets its name once, on every file system that can promise it."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tailrace.destination.delta.destination import DeltaDestination
from tailrace.system.atomic_file import can_move_new, move_new


def refuse_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a file system without hard links."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_takes_a_free_name_and_never_that_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    if not has_links:
        refuse_links(monkeypatch)
    draft, file = tmp_path / "draft", tmp_path / "file"
    draft.write_text("first")
    move_new(draft, file)
    assert (file.read_text(), draft.exists()) == ("first", False)
    draft.write_text("second")
    with pytest.raises(FileExistsError):
        move_new(draft, file)
    assert (file.read_text(), draft.read_text()) == ("first", "second")


def test_a_file_system_that_can_promise_neither_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_links(monkeypatch)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    draft = tmp_path / "draft"
    draft.write_text("first")
    with pytest.raises(OSError, match="neither hard links nor renames"):
        move_new(draft, tmp_path / "file")
    assert draft.exists()
    assert not can_move_new(tmp_path)
    assert list(tmp_path.iterdir()) == [draft]
    [finding] = DeltaDestination(path=str(tmp_path / "lake")).check([])
    assert finding.level == "error"
    assert "neither hard links nor renames" in finding.message


def test_a_look_at_a_file_system_leaves_nothing_there(tmp_path: Path) -> None:
    assert can_move_new(tmp_path)
    assert can_move_new(tmp_path / "missing")
    assert list(tmp_path.iterdir()) == []
