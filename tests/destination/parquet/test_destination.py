"""A changelog in Parquet files: every change once, whatever was written again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tailrace.changelog.entry import ChangelogLog
from tailrace.changelog.folder import open_folder
from tailrace.destination import Batch
from tailrace.destination.parquet.destination import ParquetDestination, _opened
from tailrace.errors import LostError, OwnedError
from tailrace.model.change import Changes, Op
from tailrace.model.schema import Column
from tailrace.testing.destination import (
    ITEMS,
    LOG,
    PLAIN,
    TRUNCATE,
    RowChange,
    changes_of,
    delete,
    insert,
    moved,
    read,
    update,
    values_of_every_type,
    with_columns,
)
from tests.support.changelog_writing import replayed, write_events


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "changes")


def entries(path: str) -> list[Any]:
    log = ChangelogLog(open_folder(path, {}))
    return [log.entry(number) for number in range(1, log.last() + 1)]


def rows(path: str, table: str) -> list[dict[str, Any]]:
    """The rows of all files that entries name, in order."""
    found = [
        row
        for entry in entries(path)
        for file in entry.files
        if file.table == table
        for row in pq.ParquetFile(Path(path, file.path)).read().to_pylist()
    ]
    return sorted(found, key=lambda row: row["_tailrace_position"])


def test_every_change_is_a_row_with_its_place_and_a_repeated_batch_adds_none(path: str) -> None:
    destination = ParquetDestination(path=path)
    log = changes_of(ITEMS, insert(id=1, name="a", price=1), update(id=1, price=2), delete(id=1), TRUNCATE)
    written = write_events(destination, 0, log)
    assert (written.changes, written.repeated) == (4, False)
    assert write_events(destination, 0, log).repeated
    found = rows(path, "shop.items")
    assert [(row["_tailrace_op"], row["id"], row["price"], row["_tailrace_unchanged"]) for row in found] == [
        ("insert", 1, 1, None),
        ("update", 1, 2, ["name"]),
        ("delete", 1, None, None),
        ("truncate", None, None, None),
    ]
    assert len({row["_tailrace_position"] for row in found}) == 4
    assert all(row["_tailrace_committed_at"].year == 2024 for row in found)
    assert [entry.mark for entry in entries(path)] == [Batch("p", 0, 7).mark]


def test_a_batch_without_changes_leaves_no_entry(path: str) -> None:
    destination = ParquetDestination(path=path)
    assert not write_events(destination, 0)
    write_events(destination, 5, changes_of(ITEMS, insert(id=1)))
    assert [entry.number for entry in entries(path)] == [1]


def test_files_of_a_batch_that_crashed_do_not_count_and_are_written_again_under_their_names(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = ParquetDestination(path=path)
    log = changes_of(ITEMS, insert(id=1, name="a", price=1))
    with monkeypatch.context() as patch:
        patch.setattr("tailrace.system.failpoint.reach", crash)
        with pytest.raises(RuntimeError):
            write_events(destination, 0, log)
    before = sorted(Path(path).rglob("*.parquet"))
    assert (len(before), entries(path)) == (1, [])
    _opened.cache_clear()
    assert not write_events(ParquetDestination(path=path), 0, log).repeated
    assert sorted(Path(path).rglob("*.parquet")) == before
    assert len(rows(path, "shop.items")) == 1


def crash(point: str) -> None:
    if point == "parquet.before_commit":
        raise RuntimeError("crashed")


def test_another_writer_and_an_earlier_state_are_noticed(path: str) -> None:
    destination = ParquetDestination(path=path)
    write_events(destination, 3, changes_of(ITEMS, insert(id=1)))
    with pytest.raises(LostError, match="does not fit the state"):
        write_events(destination, 2, changes_of(ITEMS, insert(id=2)))
    with destination.committer("p") as committer:
        assert committer.last_batch("p") is not None
        with pytest.raises(LostError):
            committer.require_fit(Batch("p", 2))
    other = ParquetDestination.model_construct(**{**dict(destination), "path": path})
    log = ChangelogLog(open_folder(path, {}))
    log.add(replace(log.entry(1), number=2))
    _opened.cache_clear()
    stale = ChangelogLog(open_folder(path, {}))
    stale._last = 1
    stale.last = lambda: 1  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParquetDestination, "_log", property(lambda _: stale))
        with pytest.raises(OwnedError, match="another runner"):
            write_events(other, 4, changes_of(ITEMS, insert(id=3)))


def test_a_reset_pipeline_goes_on_with_the_log_and_a_new_copy_takes_the_place_of_earlier_rows(
    path: str, tmp_path: Path
) -> None:
    destination = ParquetDestination(path=path)
    first = changes_of(ITEMS, read(id=1, name="a", price=1), read(id=2, name="b", price=2))
    write_events(destination, 0, copied=first, begun=[ITEMS], completed=[ITEMS])
    again = changes_of(ITEMS, read(id=2, name="c", price=2))
    write_events(destination, 0, copied=again, begun=[ITEMS], completed=[ITEMS], pipeline="p/2")
    write_events(destination, 1, changes_of(ITEMS, insert(id=3, name="d", price=3), commit=50), pipeline="p/2")
    found = replayed(path, tmp_path)["shop.items"]
    assert sorted((row["id"], row["name"]) for row in found) == [(2, "c"), (3, "d")]


def test_a_changed_key_a_new_column_and_a_table_without_a_key_come_back(path: str, tmp_path: Path) -> None:
    destination = ParquetDestination(path=path)
    old = changes_of(ITEMS, insert(id=1, name="large", price=1), delete(id=1), moved(id=7, price=2))
    wider = with_columns(ITEMS, Column("size", pa.int32(), number=9))
    new = changes_of(wider, update(id=7, name="large", price=2, size=4), commit=20)
    lines = changes_of(LOG, insert(line="x"), insert(line="x"), commit=30)
    write_events(destination, 0, [*old, *new, *lines])
    assert [(file.table, file.rows) for file in entries(path)[0].files] == [
        ("shop.items", 3),
        ("shop.items", 1),
        ("shop.log", 2),
    ]
    assert replayed(path, tmp_path)["shop.items"] == [{"id": 7, "name": "large", "price": 2, "size": 4}]
    assert [row["line"] for row in rows(path, "shop.log")] == ["x", "x"]


def test_every_type_comes_back(path: str, tmp_path: Path) -> None:
    table, values = values_of_every_type()
    write_events(ParquetDestination(path=path), 0, changes_of(table, *(RowChange(Op.INSERT, row) for row in values)))
    assert replayed(path, tmp_path)["shop.values"] == values


def test_files_lie_in_folders_of_their_days_and_keep_the_order_of_the_batch(path: str, tmp_path: Path) -> None:
    destination = ParquetDestination(path=path, partition_by="day")
    [chunk] = changes_of(ITEMS, *(update(id=n % 2, name=str(n), price=n) for n in range(6)))
    days = pa.array([1704067200 + 86400 * (n % 3) for n in range(6)], pa.timestamp("s", "UTC"))
    at = chunk.batch.schema.get_field_index("committed_at")
    field = chunk.batch.schema.field(at)
    write_events(destination, 0, [Changes(ITEMS, chunk.batch.set_column(at, field, days.cast(field.type)))])
    folders = {file.path.rsplit("/", 1)[0] for file in entries(path)[0].files}
    assert folders == {f"shop/items/day=2024-01-0{day}" for day in (1, 2, 3)}
    assert sorted(row["name"] for row in replayed(path, tmp_path)["shop.items"]) == ["4", "5"]
    with duckdb.connect() as connection:
        counted = connection.execute(
            f"SELECT day, count(*) FROM '{path}/shop/items/**/*.parquet' GROUP BY 1"
        ).fetchall()
    assert [count for _, count in counted] == [2, 2, 2]


def test_the_query_of_the_documentation_reads_what_the_log_names_and_nothing_else(path: str) -> None:
    page = (Path(__file__).parents[3] / "docs" / "parquet.md").read_text("utf-8")
    [query] = [block.split("```")[0] for block in page.split("```sql\n")[1:]]
    destination = ParquetDestination(path=path)
    write_events(destination, 0, changes_of(ITEMS, insert(id=1, name="a", price=1)))
    write_events(destination, 1, changes_of(ITEMS, update(id=1, name="b", price=1), commit=9))
    Path(path, "shop/items/left.parquet").write_bytes(Path(path, entries(path)[0].files[0].path).read_bytes())
    *first, last = [
        part
        for part in query.replace("./changes", path).replace("public.items", "shop.items").split(";")
        if part.strip()
    ]
    with duckdb.connect() as connection:
        for statement in first:
            connection.execute(statement)
        assert [row[1] for row in connection.execute(last).fetchall()] == ["a", "b"]


def test_names_that_readers_skip_or_folders_cannot_have_are_quoted(path: str) -> None:
    hidden = replace(PLAIN, table=replace(PLAIN.table, schema="..", name="_a/b"))
    write_events(ParquetDestination(path=path), 0, changes_of(hidden, insert(id=1, name="a", price=1)))
    assert [file.path.rsplit("/", 1)[0] for file in entries(path)[0].files] == ["%2E./%5Fa%2Fb"]
    assert len(rows(path, str(hidden.table))) == 1


def test_check_names_a_column_that_has_no_place(path: str) -> None:
    odd = with_columns(ITEMS, Column("span", pa.month_day_nano_interval()), Column("_tailrace_op", pa.string()))
    found = ParquetDestination(path=path).check([ITEMS, odd])
    assert [finding.level for finding in found] == ["ok", "error", "error"]
    assert not Path(path).exists()


def test_the_log_is_readable_text(path: str) -> None:
    write_events(ParquetDestination(path=path), 0, changes_of(ITEMS, insert(id=1)))
    [file] = Path(path, "_tailrace/log").iterdir()
    entry = json.loads(file.read_text())
    assert (entry["number"], entry["files"][0]["table"], entry["files"][0]["kind"]) == (1, "shop.items", "log")
