"""A source whose files cannot be removed is not said to be reset."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace.errors import UnavailableError
from tailrace.option.table import TableOptions
from tailrace.source.poll.source import PollSource
from tailrace.source.slatedb.object_store import ObjectStore, SlateDbDatabase
from tailrace.source.slatedb.source import SlateDbSource
from tailrace.source.source import Source
from tailrace.source.sqlite.source import SqliteSource
from tests.support.removal import removals_fail


def polled(folder: Path) -> tuple[Source, Path]:
    return PollSource("p", "", str(folder / "poll"), TableOptions()), folder / "poll" / "schedule.json"


def taped(folder: Path) -> tuple[Source, Path]:
    return SqliteSource("p", "", str(folder / "tape"), TableOptions()), folder / "tape" / "pipeline.cursor"


def stored(folder: Path) -> tuple[Source, Path]:
    database = SlateDbDatabase(str(folder / "db"), ObjectStore("memory", ""))
    return SlateDbSource("p", database, TableOptions(), str(folder / "state")), folder / "state/pipeline/status.json"


@pytest.mark.parametrize("make", [polled, taped, stored])
def test_files_that_cannot_be_removed_are_an_error_with_a_fix(
    make: Callable[[Path], tuple[Source, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, kept = make(tmp_path)
    kept.parent.mkdir(parents=True)
    kept.write_text("7")
    with removals_fail(monkeypatch), pytest.raises(UnavailableError, match="cannot be removed") as raised:
        source.reset()
    assert raised.value.fix is not None
    assert "belongs to this user" in raised.value.fix
    for _ in range(2):
        source.reset()
    assert not kept.exists()
