"""A changelog as a source, from any place in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError

from tailrace.destination.parquet.destination import ParquetDestination
from tailrace.errors import LostError
from tailrace.model.change import Changes, Op
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.source.source import Source
from tailrace.source.tape.option import TapeOptions
from tailrace.testing.destination import ITEMS, RowChange, changes_of, insert, read, update
from tailrace.testing.source import TransactionContract, Upstream
from tests.support.changelog_writing import replayed, tape, write_events

NOTES = TableSchema(
    TableName("main", "notes"),
    (Column("id", pa.int64(), False, number=1), Column("text", pa.string(), number=2)),
    ("id",),
)


@dataclass
class Tape:
    """A changelog that grows by a batch with each transaction."""

    source: Source
    destination: ParquetDestination
    kept: dict[int, str] = field(default_factory=dict)
    batches: int = 0

    def put(self, rows: Mapping[int, str]) -> None:
        self._write(
            [
                RowChange(Op.UPDATE if key in self.kept else Op.INSERT, {"id": key, "text": text})
                for key, text in rows.items()
            ]
        )
        self.kept |= rows

    def remove(self, *ids: int) -> None:
        self._write([RowChange(Op.DELETE, {"id": key}) for key in ids])
        for key in ids:
            self.kept.pop(key, None)

    def rows(self) -> dict[int, str]:
        return dict(self.kept)

    def _write(self, changes: list[RowChange]) -> None:
        changes = [change._replace(ordinal=at) for at, change in enumerate(changes)]
        write_events(self.destination, self.batches, changes_of(NOTES, *changes, commit=self.batches))
        self.batches += 1


class TestTape(TransactionContract):
    @pytest.fixture
    def upstream(self, tmp_path: Path) -> Upstream:
        path = str(tmp_path / "changes")
        there = Tape(tape(path, tmp_path), ParquetDestination(path=path))
        there.put({0: "there"})
        there.remove(0)
        return there


def at_time(changes: list[Changes], when: datetime) -> list[Changes]:
    found = []
    for one in changes:
        at = one.batch.schema.get_field_index("committed_at")
        times = pa.array([when] * len(one), pa.timestamp("us", "UTC"))
        found.append(Changes(one.table, one.batch.set_column(at, one.batch.schema.field(at), times)))
    return found


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Three batches with a row each, on three days."""
    path = str(tmp_path / "changes")
    destination = ParquetDestination(path=path)
    for day in (1, 2, 3):
        changes = changes_of(ITEMS, insert(id=day, name="x", price=day), commit=10 * day)
        write_events(destination, day, at_time(changes, datetime(2024, 3, day, tzinfo=UTC)))
    return path


@pytest.mark.parametrize(
    ("begin", "ids"),
    [
        (None, [1, 2, 3]),
        (1, [1, 2, 3]),
        (3, [3]),
        ("4", []),
        ("2024-03-02", [2, 3]),
        ("2024-03-02T00:00:01Z", [3]),
        ("2024-03-04T00:00:00+01:00", []),
        (f"{21:016x}{0:016x}", [2, 3]),
        (f"{21:016x}{1:016x}", [3]),
        (f"{99:016x}{0:016x}", []),
    ],
)
def test_a_reader_begins_with_a_batch_a_time_or_a_position(
    path: str, tmp_path: Path, begin: Any, ids: list[int]
) -> None:
    assert sorted(row["id"] for row in replayed(path, tmp_path, begin).get("shop.items", [])) == ids


@pytest.mark.parametrize("begin", ["yesterday", 0, True, "-3", 1.5])
def test_a_place_that_is_none_is_refused(begin: Any) -> None:
    with pytest.raises(ValidationError, match="must be the number of a batch"):
        TapeOptions.model_validate({"type": "tape", "path": "changes", "from": begin})


def test_a_reader_sees_each_transaction_as_a_commit_of_its_own(path: str, tmp_path: Path) -> None:
    changes = changes_of(ITEMS, *(update(id=1, name=str(n), price=n) for n in range(3)), commit=100)
    write_events(ParquetDestination(path=path), 9, changes)
    source = tape(path, tmp_path, begin=4)
    [table] = source.tables()
    found = [place for one in source.read_log(table, *ends(source)) for place in one.numpy("commit").tolist()]
    assert len(set(found)) == 3


def ends(source: Any) -> tuple[Any, Any]:
    from tailrace.model.change import START

    return START, source.head()


def test_a_folder_without_a_changelog_and_a_lost_file_are_named(path: str, tmp_path: Path) -> None:
    [finding] = tape(str(tmp_path / "nothing"), tmp_path).check()
    assert (finding.level, "there is no changelog" in finding.message) == ("error", True)
    assert [finding.level for finding in tape(path, tmp_path).check()] == ["ok"]
    lost = min(Path(path).rglob("*.parquet"))
    lost.unlink()
    with pytest.raises(LostError, match="is missing"):
        replayed(path, tmp_path)
    assert [row["id"] for row in replayed(path, tmp_path, 2)["shop.items"]] == [2, 3]


def test_a_copy_in_the_middle_clears_what_came_before_it_for_every_reader(path: str, tmp_path: Path) -> None:
    destination = ParquetDestination(path=path)
    copied = changes_of(ITEMS, read(id=3, name="new", price=3), commit=50)
    write_events(destination, 4, copied=copied, begun=[ITEMS], completed=[ITEMS])
    for begin in (None, 2, 4):
        assert [(row["id"], row["name"]) for row in replayed(path, tmp_path, begin)["shop.items"]] == [(3, "new")]
    # Copied rows have no commit time of their own: that of writing them counts.
    late = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    assert replayed(path, tmp_path, late).get("shop.items", []) == []
