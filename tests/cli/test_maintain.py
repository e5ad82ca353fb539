"""`tailrace maintain` on Delta tables and a replica file, as people call it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tailrace.config.pipeline import load
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.state import SqliteStore
from tailrace.testing.destination import ITEMS, PLAIN, insert, update
from tests.support.destination_writing import write
from tests.support.invocation import invoke


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The file of a pipeline that has written two tables, one of them with vectors."""
    path = tmp_path / "shop.yaml"
    path.write_text(
        "name: shop\nsource: {type: postgres, dsn: 'postgresql://shop@localhost/shop'}\n"
        "destination: {type: delta, path: ./lake, updates: merge_on_read}\nstate: ./state\n"
    )
    config = load(path)
    with SqliteStore(config.name, config.state).open() as store:
        for number, table in enumerate((ITEMS, PLAIN)):
            store.add_table(str(number), str(table.table))
    destination = DeltaDestination(path=str(tmp_path / "lake"), updates="merge_on_read")
    write(destination, 0, *(insert(id=number, name="a", price=1) for number in range(10)))
    write(destination, 1, update(id=3, name="b", price=2))
    write(destination, 0, insert(id=1, name="a", price=1), table=PLAIN)
    return path


def maintained(*arguments: object) -> tuple[int, dict[str, Any]]:
    result = invoke("maintain", *arguments, "--json")
    return result.exit_code, json.loads(result.stdout)


def test_all_tables_are_maintained_and_a_second_time_there_is_nothing_to_do(file: Path) -> None:
    code, found = maintained(file)
    assert code == 0
    assert [(table["table"], table["done"], table["error"]) for table in found["tables"]] == [
        ("shop.items", "merged 2 files into 1", None),
        ("shop.plain", None, None),
    ]
    _, again = maintained(file)
    assert [table["done"] for table in again["tables"]] == [None, None]


def test_as_text_each_table_has_a_line(file: Path) -> None:
    result = invoke("maintain", file)
    assert result.exit_code == 0
    items, plain = result.stdout.splitlines()
    assert items.startswith("done   shop.items: merged 2 files into 1 (")
    assert plain == "clean  shop.plain: nothing to do"


def test_only_the_tables_that_are_named_are_maintained(file: Path) -> None:
    assert [table["table"] for table in maintained(file, "shop.plain")[1]["tables"]] == ["shop.plain"]
    code, found = maintained(file, "shop.plain", "shop.itmes")
    assert (code, found["error"]["kind"]) == (2, "ConfigError")
    assert "shop.items" in found["error"]["message"]


def test_a_table_that_cannot_be_maintained_does_not_stop_the_others_and_exits_with_8(file: Path) -> None:
    next((file.parent / "lake/shop/items").glob("part-*.parquet")).unlink()
    code, found = maintained(file, "shop.items", "shop.plain")
    assert code == 8
    items, plain = found["tables"]
    assert "no longer in" in items["error"]
    assert f"tailrace resync {file} shop.items" in items["fix"]
    assert plain["error"] is None
    assert "failed shop.items: a file of the table is no longer in" in invoke("maintain", file).stdout
