"""A reset ends in a source that can begin again, or in an error that says what prevents it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.errors import OwnedError, UnavailableError
from tailrace.journal import Journal, JournalReader
from tailrace.source.postgres.slot import read_slot
from tailrace.source.postgres.source import PostgresSource
from tests.support.postgres_receiving import Session
from tests.support.removal import removals_fail


def test_a_reset_is_refused_while_a_process_writes_the_journal(source: PostgresSource, session: Session) -> None:
    with Journal.open_writer(source.journal):
        with pytest.raises(OwnedError, match="is written by"):
            source.reset()
        assert read_slot(session, source.options.slot) is not None
        assert Journal.is_written(source.journal)
    source.reset()
    assert read_slot(session, source.options.slot) is None
    assert not source.folder.exists()


def test_a_journal_that_lies_elsewhere_is_emptied_by_a_reset(source: PostgresSource, tmp_path: Path) -> None:
    elsewhere = source.folder.rename(tmp_path / "elsewhere")
    source.folder.symlink_to(elsewhere)
    source.reset()
    source.prepare()
    assert JournalReader(source.journal).mark() > JournalReader(tmp_path / "empty").mark()


def test_a_journal_that_cannot_be_removed_is_an_error_with_a_fix(
    source: PostgresSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    with removals_fail(monkeypatch), pytest.raises(UnavailableError, match="cannot be removed") as raised:
        source.reset()
    assert raised.value.fix is not None
    assert "belongs to this user" in raised.value.fix
    source.reset()
    source.prepare()
