"""A source whose files cannot be removed is not reported as reset."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace.errors import UnavailableError
from tailrace.option.table import TableOptions
from tailrace.source.source import Source
from tests.support.removal import removals_fail
from tests.support.source_making import make_polled, make_slatedb, make_sqlite


def polled(folder: Path) -> tuple[Source, Path]:
    return make_polled("sqlite:///app.db", folder, TableOptions()), folder / "poll/pipeline/schedule.json"


def taped(folder: Path) -> tuple[Source, Path]:
    return make_sqlite(folder / "app.db", folder, TableOptions()), folder / "tape" / "pipeline.cursor"


def stored(folder: Path) -> tuple[Source, Path]:
    store = {"type": "memory", "name": str(folder)}
    return make_slatedb(store, folder), folder / "slatedb/pipeline/status.json"


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
