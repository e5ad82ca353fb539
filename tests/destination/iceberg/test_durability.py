"""A power cut takes nothing of a table: every file that a commit names is durable before the catalog names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.destination.iceberg.destination import IcebergDestination
from tailrace.model.schema import Column
from tailrace.system import failpoint
from tailrace.testing.destination import ITEMS, delete, insert, update, with_columns
from tests.support.destination_writing import write
from tests.support.power_loss import Disk


def content(folder: Path) -> dict[str, bytes]:
    """The files of the tables. The catalog is SQLite's, and key files may be lost."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix in {".parquet", ".avro", ".json"})
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_power_cut_takes_no_file_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, warehouse = Disk(monkeypatch), tmp_path / "ice"
    ice = IcebergDestination(warehouse=str(warehouse))
    cuts: list[tuple[dict[str, bytes], dict[str, bytes]]] = []

    def cut(place: str) -> None:
        left = disk.left(tmp_path, tmp_path / f"left {len(cuts)} {place}")
        cuts.append((content(warehouse), content(left / "ice")))

    monkeypatch.setattr(failpoint, "reach", cut)
    write(ice, 0, *(insert(id=n, name="a", price=n) for n in range(20)))
    write(ice, 1, update(id=1, price=2), delete(id=2))
    write(ice, 2, delete(id=3), table=with_columns(ITEMS, Column("size", ITEMS.columns[2].type, number=9)))
    assert len(cuts) == 6
    for there, left in cuts:
        assert there
        assert left == there
