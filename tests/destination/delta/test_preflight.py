"""What `tailrace check` says about how changed rows of a Delta table are replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.destination.delta.destination import DeltaDestination
from tailrace.testing.destination import ITEMS, LOG, PLAIN, insert, update
from tests.support.delta_table import small_measures
from tests.support.destination_writing import write


def said(destination: DeltaDestination, subject: str = "shop.items") -> str:
    return " | ".join(one.message for one in destination.check([ITEMS, PLAIN, LOG]) if one.subject == subject)


def test_a_table_that_will_be_marked_is_named_with_the_readers_that_refuse_it(tmp_path: Path) -> None:
    destination = DeltaDestination(path=str(tmp_path), updates={"shop.items": "merge_on_read", "*.*": "copy_on_write"})
    assert ", by merge on read:" in said(destination)
    assert "DeltaTable.to_pandas and to_pyarrow_table refuse it" in said(destination)
    assert "merge on read" not in said(destination, "shop.plain") + said(destination, "shop.log")


def test_under_auto_a_table_is_named_once_it_is_marked(tmp_path: Path) -> None:
    destination = DeltaDestination(path=str(tmp_path))
    assert "by merge on read once rewriting its files costs too much (updates: auto)" in said(destination)
    with small_measures(file_rows=100):
        write(destination, 0, *(insert(id=number, name="a", price=1) for number in range(20)))
        assert "by merge on read once" in said(destination)
        write(destination, 1, update(id=1, price=2))
    assert ", by merge on read:" in said(destination)
    back = destination.model_copy(update={"updates": "copy_on_write"})
    assert "by copy on write; until maintenance has folded them, it has deletion vectors" in said(back)


@pytest.mark.parametrize("updates", [{"shop.none": "merge_on_read"}, {"other.*": "auto"}])
def test_a_pattern_that_matches_no_table_is_a_warning(tmp_path: Path, updates: dict[str, str]) -> None:
    destination = DeltaDestination.model_validate({"path": str(tmp_path), "updates": updates})
    assert f"updates names {next(iter(updates))}, but no table matches it" in said(destination, str(tmp_path))
