"""What collapse promises beyond equality with a replay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tailrace.errors import SchemaChangedError, TableError
from tailrace.model.change import Changes, Op, pack_unchanged
from tailrace.model.collapse import collapse, fit
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.testing.destination import (
    ITEMS,
    TRUNCATE,
    RowChange,
    altered,
    changes_of,
    delete,
    insert,
    moved,
    read,
    update,
    with_columns,
)


def test_no_changes_leave_nothing() -> None:
    collapsed = collapse([], ITEMS)
    assert (collapsed.rows.num_rows, collapsed.deletes.num_rows, collapsed.truncated, collapsed.changes) == (
        0,
        0,
        False,
        0,
    )
    assert collapsed.rows.schema == ITEMS.arrow


def test_an_insert_and_partial_updates_fold_to_a_whole_row() -> None:
    collapsed = collapse(changes_of(ITEMS, insert(id=1, name="a", price=1), update(id=1, price=2)), ITEMS)
    assert collapsed.rows.to_pylist() == [{"id": 1, "name": "a", "price": 2}]
    assert collapsed.unchanged is None
    assert collapsed.marks.op.tolist() == [Op.UPDATE]


def test_what_no_change_holds_is_looked_up_under_the_key_the_row_had_before_the_batch() -> None:
    steps = [delete(id=1), moved(id=2, price=5), delete(id=2), moved(id=3)]
    collapsed = collapse(changes_of(ITEMS, *steps), ITEMS)
    assert collapsed.unchanged is not None
    assert collapsed.unchanged.tolist() == [[False, True, False]]
    assert collapsed.lookup.to_pylist() == [{"id": 1}]
    assert collapsed.rows.column("price").to_pylist() == [5]
    assert sorted(collapsed.deletes.column("id").to_pylist()) == [1, 2]


def test_a_row_deleted_in_the_batch_is_not_looked_up_at_the_destination() -> None:
    collapsed = collapse(changes_of(ITEMS, delete(id=1), update(id=1, price=2)), ITEMS)
    assert collapsed.lookup.to_pylist() == [{"id": None}]


def test_only_changes_after_the_last_truncate_count() -> None:
    steps = [
        insert(id=1, name="a", price=1),
        TRUNCATE,
        insert(id=2, name="b", price=2),
        TRUNCATE,
        insert(id=3, name="c", price=3),
    ]
    collapsed = collapse(changes_of(ITEMS, *steps), ITEMS)
    assert collapsed.truncated
    assert collapsed.truncate_marks.commit.tolist() == [5]
    assert collapsed.rows.column("id").to_pylist() == [3]
    assert collapsed.changes == 5


def test_transaction_and_schema_marks_are_no_rows() -> None:
    steps = [insert(id=1, name="a", price=1), RowChange(Op.COMMIT, {}), RowChange(Op.SCHEMA, {})]
    assert collapse(changes_of(ITEMS, *steps), ITEMS).rows.num_rows == 1


def test_a_merge_operand_is_refused() -> None:
    with pytest.raises(TableError, match="merge operand"):
        collapse(changes_of(ITEMS, RowChange(Op.MERGE, {"id": 1})), ITEMS)


@pytest.mark.parametrize(
    ("kind", "values", "distinct"),
    [
        (pa.float64(), [float("nan"), float("nan"), 0.0, -0.0, 1.0], 3),
        (pa.string(), [None, None, "", "n"], 3),
        (pa.int64(), [None, None, 0, 1], 3),
        (pa.dictionary(pa.int32(), pa.string()), ["a", "a", "b"], 2),
    ],
)
def test_odd_keys_stay_distinct_and_never_crash(kind: pa.DataType, values: list[object], distinct: int) -> None:
    table = TableSchema(TableName("s", "t"), (Column("k", kind),), ("k",))
    row = pa.StructArray.from_arrays([pa.array(values, kind)], fields=list(table.row_type))
    plain = replace(table)
    collapsed = collapse([Changes.build(table, row, op=Op.INSERT, commit=1)], plain)
    assert collapsed.rows.num_rows == distinct


def test_changes_of_an_older_version_are_fitted_by_number_and_type() -> None:
    columns = (ITEMS.columns[0], replace(ITEMS.columns[1], name="title"), replace(ITEMS.columns[2], type=pa.int64()))
    newer = TableSchema(ITEMS.table, (*columns, Column("size", pa.int32(), number=9)), ("id",), 2)
    old = changes_of(ITEMS, insert(id=1, name="a", price=1))
    new = changes_of(newer, update(id=1, size=4), commit=9)
    collapsed = collapse([*old, *new], newer)
    assert collapsed.rows.to_pylist() == [{"id": 1, "title": "a", "price": 1, "size": 4}]


def test_an_older_value_that_the_newer_type_cannot_hold_stops_the_table() -> None:
    newer = TableSchema(ITEMS.table, (*ITEMS.columns[:2], replace(ITEMS.columns[2], type=pa.int8())), ("id",), 2)
    with pytest.raises(SchemaChangedError) as caught:
        collapse(changes_of(ITEMS, insert(id=1, name="a", price=1000)), newer)
    assert caught.value.fix
    assert "1000" not in str(caught.value)


def test_a_row_changed_a_hundred_thousand_times_keeps_the_value_sent_once() -> None:
    count = 100_000
    names = pa.array(["kept"] + [None] * (count - 1))
    row = pa.StructArray.from_arrays(
        [pa.array(np.ones(count, np.int64)), names, pa.array(np.arange(count, dtype=np.int32))],
        fields=list(ITEMS.row_type),
    )
    op = np.full(count, Op.UPDATE, np.int8)
    op[0] = Op.INSERT
    mask = np.tile([False, True, False], (count, 1))
    mask[0] = False
    collapsed = collapse([Changes.build(ITEMS, row, op=op, commit=1, unchanged=pack_unchanged(mask))], ITEMS)
    assert collapsed.rows.to_pylist() == [{"id": 1, "name": "kept", "price": count - 1}]


def test_copied_rows_are_upserted_like_inserted_ones() -> None:
    collapsed = collapse(changes_of(ITEMS, read(id=1, name="a", price=1)), ITEMS)
    assert collapsed.marks.op.tolist() == [Op.READ]


def image(table: TableSchema, op: Op, row: dict[str, object], **more: Any) -> Changes:
    """One change, with its old image and exact texts."""
    before = more.pop("before", None)
    return Changes.build(
        table,
        pa.array([row], table.row_type),
        op=op,
        commit=1,
        before=pa.array([before], table.row_type),
        exact=pa.array([more.pop("exact", None)], pa.string()),
    )


def fitted(changes: Changes, table: TableSchema) -> dict[str, Any]:
    found: dict[str, Any] = fit(changes, table).batch.to_pylist()[0]
    return found


NEWER = with_columns(
    altered(ITEMS, name=Column("title", pa.string(), number=2), price=None),
    Column("price", pa.string(), number=4, initial=pa.scalar("?")),
)


def test_old_images_and_exact_texts_are_fitted_with_their_rows() -> None:
    old = {"id": 1, "name": "a", "price": 1}
    change = image(ITEMS, Op.UPDATE, old, before=old, exact='{"name": "n", "price": "p"}')
    found = fitted(change, NEWER)
    assert found["row"] == {"id": 1, "title": "a", "price": None}
    assert found["before"] == {"id": 1, "title": "a", "price": "?"}
    assert found["exact"] == '{"title": "n"}'
    assert fit(change, NEWER).unchanged_mask().tolist() == [[False, False, True]]  # type: ignore[union-attr]
    assert fitted(image(ITEMS, Op.INSERT, old, exact='{"price": "p"}'), NEWER)["exact"] is None


def test_a_new_row_of_an_older_version_has_the_initial_value_of_a_column_added_later() -> None:
    for op in (Op.INSERT, Op.READ):
        change = image(ITEMS, op, {"id": 1, "name": "a", "price": 1})
        assert fitted(change, NEWER)["row"] == {"id": 1, "title": "a", "price": "?"}
        assert fitted(change, NEWER)["before"] is None
        assert fit(change, NEWER).unchanged_mask() is None


def test_changes_of_a_newer_version_fit_an_older_one_without_what_that_lacks() -> None:
    older = with_columns(ITEMS, Column("gone", pa.int64(), number=7, initial=pa.scalar(5)))
    newer = with_columns(altered(NEWER, title=Column("label", pa.string(), number=2)), Column("more", pa.int8()))
    row = {"id": 1, "label": "a", "price": "x", "more": 1}
    change = image(newer, Op.INSERT, row, exact='{"label": "l", "more": "m"}')
    found = fitted(change, older)
    assert found["row"] == {"id": 1, "name": "a", "price": None, "gone": None}
    assert found["exact"] == '{"name": "l"}'
    updated = fit(image(newer, Op.UPDATE, row), older)
    assert updated.unchanged_mask().tolist() == [[False, False, True, True]]  # type: ignore[union-attr]


def test_a_column_added_again_under_its_old_name_and_type_is_not_the_old_one() -> None:
    again = altered(ITEMS, price=Column("price", pa.int32(), number=4))
    assert fitted(image(ITEMS, Op.INSERT, {"id": 1, "name": "a", "price": 1}), again)["row"]["price"] is None


def test_columns_without_numbers_are_known_by_their_names() -> None:
    plain = TableSchema(ITEMS.table, tuple(replace(column, number=0) for column in ITEMS.columns), ("id",), 2)
    row = {"id": 1, "name": "a", "price": 1}
    assert fitted(image(ITEMS, Op.INSERT, row), plain)["row"] == row
    assert fitted(image(plain, Op.INSERT, row), ITEMS)["row"] == row


def test_changes_whose_key_is_made_of_other_columns_stop_the_table() -> None:
    other = TableSchema(ITEMS.table, ITEMS.columns[:2], ("id", "name"), 2)
    same = TableSchema(ITEMS.table, ITEMS.columns, ("id", "name"), 2)
    for old, new in (
        (ITEMS, same),
        (ITEMS, other),
        (other, ITEMS),
        (ITEMS, replace(ITEMS, columns=ITEMS.columns[:2], key=())),
    ):
        with pytest.raises(SchemaChangedError, match="key") as caught:
            fit(image(old, Op.DELETE, {"id": 1}), new)
        assert caught.value.fix
