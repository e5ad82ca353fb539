"""Changes as lines: one for each, in order, whatever a value holds; printed by the driver once the batch is written."""

from __future__ import annotations

import io
import json
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tailrace.destination import Batch, Stage, Written
from tailrace.destination.capability import Printing
from tailrace.destination.console.destination import ConsoleDestination
from tailrace.destination.console.line import lines_of
from tailrace.destination.event import event_stream
from tailrace.errors import UnavailableError
from tailrace.model.change import Changes
from tailrace.testing.destination import ITEMS, LOG, TRUNCATE, changes_of, delete, insert, moved, read, update

TIME = "2024-01-01T00:00:00.000000Z"


def text(*changes: Any, table: Any = ITEMS, width: int = 120) -> list[str]:
    [chunk] = changes_of(table, *changes)
    return [line.removeprefix(f"{TIME} ") for line in lines_of(chunk, "text", width)]


def objects(chunk: Changes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines_of(chunk, "json", 1)]


def with_column(chunk: Changes, name: str, values: pa.Array[Any]) -> Changes:
    at = chunk.batch.schema.get_field_index(name)
    return Changes(chunk.table, chunk.batch.set_column(at, chunk.batch.schema.field(at), values))


def test_a_line_has_time_table_operation_key_and_columns() -> None:
    [chunk] = changes_of(ITEMS, insert(id=1, name="a", price=None))
    assert list(lines_of(chunk, "text", 120)) == [f'{TIME} shop.items insert id=1 name="a" price=null']


def test_an_update_shows_what_it_set_and_a_delete_its_key() -> None:
    assert text(update(id=1, price=2), delete(id=1), moved(id=2, price=2), TRUNCATE, read(id=3, name="c", price=4)) == [
        "shop.items update id=1 price=2",
        "shop.items delete id=1",
        "shop.items insert id=2 price=2",
        "shop.items truncate",
        'shop.items read id=3 name="c" price=4',
    ]


def test_with_the_row_as_it_was_an_update_shows_what_differs() -> None:
    [chunk] = changes_of(ITEMS, update(id=1, name="a", price=2), update(id=2, name="b", price=5))
    before = pa.array([{"id": 1, "name": "a", "price": 1}, None], ITEMS.row_type)
    lines = list(lines_of(with_column(chunk, "before", before), "text", 120))
    assert [line.partition("update ")[2] for line in lines] == ["id=1 price=2", 'id=2 name="b" price=5']


def test_a_table_without_a_key_shows_whole_rows() -> None:
    assert text(insert(line="a"), delete(line="a"), table=LOG) == [
        'shop.log insert line="a"',
        'shop.log delete line="a"',
    ]


def test_a_long_value_is_cut_in_text_and_whole_in_json() -> None:
    long = insert(id=1, name="x" * 500, price=1)
    assert text(long, width=20) == [f'shop.items insert id=1 name="{"x" * 19}… price=1']
    [one] = objects(changes_of(ITEMS, long)[0])
    assert one["columns"]["name"] == "x" * 500


def test_a_value_that_its_type_cannot_hold_is_shown_as_its_exact_text() -> None:
    [chunk] = changes_of(ITEMS, insert(id=1, name="a", price=None))
    [one] = objects(with_column(chunk, "exact", pa.array(['{"price": "1e99"}'])))
    assert one["columns"] == {"name": "a", "price": "1e99"}


def test_an_object_has_the_position_and_is_one_line() -> None:
    assert objects(changes_of(ITEMS, update(id=1, name='a "b"\n', price=2), commit=8)[0]) == [
        {
            "table": "shop.items",
            "op": "update",
            "committed_at": TIME,
            "position": f"{9:016x}{0:016x}",
            "key": {"id": 1},
            "columns": {"name": 'a "b"\n', "price": 2},
        }
    ]


def test_a_change_without_a_commit_time_shows_when_it_was_seen() -> None:
    [chunk] = changes_of(ITEMS, delete(id=1))
    none = with_column(chunk, "committed_at", pa.nulls(1, pa.timestamp("us", "UTC")))
    [line] = lines_of(none, "text", 120)
    assert line.startswith("20")
    assert line.endswith("Z shop.items delete id=1")
    assert objects(none)[0]["committed_at"] is None


def deliver(destination: ConsoleDestination, number: int, log: Sequence[Changes] = (), copied: Any = ()) -> Written:
    """A batch as a pipeline writes it: the task has only what it was sent."""
    batch = Batch("shop/0", number, 1)
    with destination.committer("shop") as committer, committer.batch(batch):
        sent: ConsoleDestination = pickle.loads(pickle.dumps(destination))
        return sent.write_events(event_stream(copied, log), batch)


@pytest.fixture
def destination(tmp_path: Path) -> ConsoleDestination:
    return ConsoleDestination(path=tmp_path / "console")


def test_changes_of_several_tables_are_printed_in_the_order_of_commits(
    destination: ConsoleDestination, capsys: pytest.CaptureFixture[str]
) -> None:
    items = changes_of(ITEMS, insert(id=1, name="a", price=1), delete(id=1), commit=10)
    log = changes_of(LOG, insert(line="x"), commit=11)
    [last] = log
    between = with_column(last, "ordinal", pa.array(np.array([5])))
    written = deliver(destination, 0, [between, *items])
    printed = [" ".join(line.split()[1:3]) for line in capsys.readouterr().out.splitlines()]
    # The line of the log is a part of the second commit, after its delete.
    assert printed == ["shop.items insert", "shop.items delete", "shop.log insert"]
    assert written == Written(3, 3)
    assert list(destination.path.iterdir()) == []


def test_a_value_cannot_forge_a_line_or_move_the_cursor(
    destination: ConsoleDestination, capsys: pytest.CaptureFixture[str]
) -> None:
    forged = "\nshop.items delete id=1\r\x1b[2K\x9b31m\u202e\u2028"
    deliver(destination, 0, changes_of(ITEMS, insert(id=1, name=forged, price=1)))
    deliver(destination.as_json(), 1, changes_of(ITEMS, insert(id=1, name=forged, price=1)))
    out = capsys.readouterr().out
    assert out.count("\n") == 2
    assert not set(out) & set("\r\x1b\x9b\u202e\u2028")
    assert json.loads(out.splitlines()[1])["columns"]["name"] == forged


def test_what_a_failed_attempt_left_is_not_printed(
    destination: ConsoleDestination, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = Batch("shop/0", 3, 1)
    with destination.committer("shop") as committer:
        destination.write_events(event_stream([], changes_of(ITEMS, delete(id=1))), batch)
        with committer.batch(Batch("shop/0", 3, 2)):
            pass
    assert capsys.readouterr().out == ""


def test_a_batch_that_is_repeated_is_printed_again(
    destination: ConsoleDestination, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # a crash between the print and Spark's log
        assert deliver(destination, 4, changes_of(ITEMS, delete(id=1))) == Written(1, 1)
    assert [line.removeprefix(TIME) for line in capsys.readouterr().out.splitlines()] == [" shop.items delete id=1"] * 2


def test_copied_rows_are_printed_on_request_only(destination: ConsoleDestination, tmp_path: Path) -> None:
    stage, rows = Stage(tmp_path / "staged", "shop"), changes_of(ITEMS, read(id=1, name="a", price=1))
    assert destination.write_rows(ITEMS, iter(rows), stage).rows == 0
    wants = replace_options(destination, copied_rows=True)
    assert wants.write_rows(ITEMS, iter(rows), stage).rows == 1
    assert deliver(wants, 0, copied=rows) == Written()


def replace_options(destination: ConsoleDestination, **more: Any) -> ConsoleDestination:
    return destination.model_copy(update=more)


@pytest.mark.parametrize("ending", [BrokenPipeError(), SystemExit(141)], ids=["of a program", "of a command"])
def test_a_run_ends_when_its_output_is_closed(
    destination: ConsoleDestination, monkeypatch: pytest.MonkeyPatch, ending: BaseException
) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise ending

    batch = Batch("shop/0", 0, 1)
    monkeypatch.setattr(sys, "stdout", Closed())
    with destination.committer("shop") as committer:
        committer.poll()
        failing = committer.batch(batch)
        failing.__enter__()
        destination.write_events(event_stream([], changes_of(ITEMS, delete(id=1))), batch)
        with pytest.raises(UnavailableError):
            failing.__exit__(None, None, None)
        with pytest.raises(type(ending)):
            committer.poll()


def test_it_prints() -> None:
    assert issubclass(ConsoleDestination, Printing)
