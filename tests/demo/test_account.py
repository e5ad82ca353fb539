"""What a server's account can reach."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tailrace.demo.account import Account


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Account:
    """An account that files are handed over to, with a cache of its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Account, "_reaches", lambda self, directory: False)
    return Account(os.geteuid(), os.getegid(), switched=True)


def test_data_goes_once_the_folder_it_was_meant_for_is_gone(account: Account, tmp_path: Path) -> None:
    first = account.place(tmp_path / "first")
    first.mkdir()
    (tmp_path / "first").unlink()

    second = account.place(tmp_path / "second")

    assert sorted(path.name for path in account.cache().iterdir()) == [f"{second.name}.origin"]
    assert (tmp_path / "second").readlink() == second


def test_two_processes_may_clear_away_the_same_data(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second"):
        account.place(tmp_path / name)
    for name in ("first", "second"):
        (tmp_path / name).unlink()

    def lose_all(*_: object, **__: object) -> None:
        for origin in account.cache().glob("*.origin"):
            origin.unlink()

    monkeypatch.setattr(shutil, "rmtree", lose_all)

    assert not account.place(tmp_path / "third").exists()
