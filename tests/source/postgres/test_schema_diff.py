"""Versions derived from Relation messages, and what a new version means for the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import SchemaChangedError
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.source.postgres.catalog import Published
from tailrace.source.postgres.fingerprint import ColumnMark, Fingerprint
from tailrace.source.postgres.pgoutput.message import Relation, RelationColumn
from tailrace.source.postgres.schema_diff import compare, derive

NAME = TableName("public", "t")
TYPES = {
    "integer": (23, pa.int32()),
    "bigint": (20, pa.int64()),
    "text": (25, pa.string()),
    "timestamp with time zone": (1184, pa.timestamp("us", "UTC")),
    "json": (114, pa.string()),
    "jsonb": (3802, pa.string()),
}


@dataclass(frozen=True)
class Model:
    """A table as its server keeps it: columns by number, with the highest number ever given."""

    columns: tuple[tuple[int, str, str], ...] = ((1, "id", "integer"),)
    highest: int = 1

    def add(self, name: str, declared: str = "integer") -> Model:
        number = self.highest + 1
        return Model((*self.columns, (number, name, declared)), number)

    def drop(self, name: str) -> Model:
        return replace(self, columns=tuple(column for column in self.columns if column[1] != name))

    def rename(self, name: str, to: str) -> Model:
        return replace(self, columns=tuple((n, to if c == name else c, t) for n, c, t in self.columns))

    def retype(self, name: str, to: str) -> Model:
        return replace(self, columns=tuple((n, c, to if c == name else t) for n, c, t in self.columns))

    @property
    def names(self) -> list[str]:
        return [name for _, name, _ in self.columns]

    @property
    def schema(self) -> TableSchema:
        columns = tuple(
            Column(name, TYPES[declared][1], number != 1, declared, number) for number, name, declared in self.columns
        )
        return TableSchema(NAME, columns, (self.columns[0][1],), upstream_id="7")

    @property
    def published(self) -> Published:
        return Published(self.schema)

    @property
    def relation(self) -> Relation:
        columns = tuple(RelationColumn(name, TYPES[type_][0], -1, number == 1) for number, name, type_ in self.columns)
        return Relation(7, NAME.schema, NAME.name, "d", columns)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "drop", "rename", "retype"]),
        st.integers(0, 9),
        st.sampled_from("abcdef"),
        st.sampled_from(["integer", "bigint", "text", "timestamp with time zone"]),
    ),
    max_size=12,
)


def play(steps: list[tuple[str, int, str, str]]) -> list[Model]:
    """The table after each step that could be taken. The key's column stays, though it may be renamed."""
    models = [Model()]
    for kind, at, name, declared in steps:
        model = models[-1]
        chosen = model.names[at % len(model.names)]
        if kind == "add" and name not in model.names:
            models.append(model.add(name, declared))
        elif kind == "drop" and chosen != model.names[0]:
            models.append(model.drop(chosen))
        elif kind == "rename" and name not in model.names:
            models.append(model.rename(chosen, name))
        elif kind == "retype" and chosen != model.names[0]:
            models.append(model.retype(chosen, declared))
    return models


def identities(schema: TableSchema) -> list[tuple[int, str, pa.DataType]]:
    return [(column.number, column.name, column.type) for column in schema.columns]


@given(STEPS)
def test_with_the_catalog_at_hand_every_column_gets_its_number(steps: list[tuple[str, int, str, str]]) -> None:
    models = play(steps)
    known = models[0].schema
    for model in models[1:]:
        derived = derive(known, model.relation, model.published)
        assert identities(derived.schema) == identities(model.schema)
        assert derived.schema.key == model.schema.key
        retyped = any(_types(known).get(number, type_) != type_ for number, type_ in _types(model.schema).items())
        assert (derived.recopy is not None) is retyped
        known = derived.schema


def _types(schema: TableSchema) -> dict[int, str]:
    return {column.number: column.upstream_type for column in schema.columns}


@given(STEPS, st.data())
def test_rows_are_read_by_the_relation_message_whatever_became_of_the_table_since(
    steps: list[tuple[str, int, str, str]], data: st.DataObject
) -> None:
    models = play(steps)
    first, then, last = sorted(data.draw(st.tuples(*[st.integers(0, len(models) - 1)] * 3)))
    now = models[last].published if data.draw(st.booleans()) else None
    known, sent = models[first].schema, models[then]
    try:
        derived = derive(known, sent.relation, now)
    except SchemaChangedError:
        assert first < last  # with the catalog of its own time, nothing is ever open
        return
    numbers = [column.number for column in derived.schema.columns]
    assert numbers == sorted(set(numbers))
    assert [(c.name, c.type) for c in derived.schema.columns] == [(c.name, c.type) for c in sent.schema.columns]


def test_a_rename_is_distinguished_from_a_drop_and_an_addition() -> None:
    before = Model().add("a")
    renamed, replaced = before.rename("a", "b"), before.drop("a").add("b")
    assert derive(before.schema, renamed.relation, renamed.published).changes == ("column a was renamed to b",)
    assert derive(before.schema, replaced.relation, replaced.published).changes == (
        "column a was dropped",
        "column b was added",
    )


def test_a_column_renamed_again_since_is_still_the_same_one() -> None:
    before = Model().add("a").add("z")
    sent = before.rename("a", "b")
    derived = derive(before.schema, sent.relation, sent.rename("b", "c").published)
    assert identities(derived.schema) == identities(sent.schema)


def test_a_column_added_and_dropped_again_since_gets_a_number_of_its_own_and_a_new_copy() -> None:
    before = Model()
    sent = before.add("gone")
    derived = derive(before.schema, sent.relation, sent.drop("gone").published)
    assert [column.name for column in derived.schema.columns] == ["id", "gone"]
    assert derived.recopy is not None


def test_whether_a_column_of_a_dropped_table_was_renamed_is_not_guessed() -> None:
    before = Model().add("a")
    sent = before.rename("a", "b")
    with pytest.raises(SchemaChangedError) as caught:
        derive(before.schema, sent.relation, None)
    assert "what became of" in caught.value.message
    assert "trigger" in (caught.value.fix or "")


def test_a_column_that_went_and_came_back_needs_a_new_copy() -> None:
    before = Model().add("a").add("b")
    sent = before.drop("a").add("a", "text")
    derived = derive(before.schema, sent.relation, sent.published)
    assert "column a was dropped and added again" in (derived.recopy or "")


def test_an_added_column_brings_what_older_rows_hold_in_it() -> None:
    before = Model()
    sent = before.add("a")
    [key, column] = sent.schema.columns
    now = Published(replace(sent.schema, columns=(key, replace(column, initial=pa.scalar(5, pa.int32())))))
    derived = derive(before.schema, sent.relation, now)
    assert derived.schema.column("a").initial == pa.scalar(5, pa.int32())
    assert derived.recopy is None
    # The same column has another type by now, and its initial value with it.
    retyped = replace(column, type=pa.int64(), upstream_type="bigint", initial=pa.scalar(5, pa.int64()))
    later = Published(replace(sent.schema, columns=(key, retyped)))
    assert "older rows" in (derive(before.schema, sent.relation, later).recopy or "")


def test_an_added_column_with_an_unknown_initial_value_needs_a_new_copy() -> None:
    before = Model()
    sent = before.add("a")
    derived = derive(before.schema, sent.relation, replace(sent.published, unknown=frozenset({2})))
    assert "older rows hold a value in the new column a" in (derived.recopy or "")


def test_a_message_that_changes_nothing_gives_the_known_version_itself() -> None:
    model = Model().add("a")
    known = model.schema.at_version(4)
    derived = derive(known, model.relation, model.published)
    assert derived.schema is known
    assert derived.changes == ()
    assert derive(known, model.rename("a", "b").relation, model.rename("a", "b").published).schema.version == 5


def test_a_renamed_or_moved_table_needs_a_new_copy() -> None:
    model = Model()
    for table in (TableName("public", "u"), TableName("other", "t")):
        relation = replace(model.relation, schema=table.schema, name=table.name)
        now = Published(replace(model.schema, table=table))
        derived = derive(model.schema, relation, now)
        assert derived.schema.table == table
        assert derived.recopy == f"the table public.t is now {table}"


def test_another_key_needs_a_new_copy_and_a_renamed_key_column_does_not() -> None:
    model = Model().add("a")
    schema = model.schema
    assert compare(schema, replace(schema, key=("id", "a"))).recopy == "the key (id) is now (id, a)"
    assert compare(schema, model.rename("id", "key").schema).recopy is None


def test_a_key_has_the_order_of_its_index() -> None:
    model = Model().add("a").add("b")
    known = replace(model.schema, key=("a", "id"))
    sent = model.add("c").relation
    marked = tuple(replace(column, identifies=column.name in known.key) for column in sent.columns)
    now = Published(replace(model.add("c").schema, key=known.key))
    assert derive(known, replace(sent, columns=marked), now).schema.key == ("a", "id")


def test_under_replica_identity_full_the_key_is_the_catalogs() -> None:
    model = Model().add("a")
    marked = tuple(replace(column, identifies=True) for column in model.add("b").relation.columns)
    relation = replace(model.relation, replica_identity="f", columns=marked)
    assert derive(model.schema, relation, model.add("b").published).schema.key == ("id",)


@pytest.mark.parametrize(
    ("old", "new", "copied"),
    [
        ("text", "character varying(10)", True),
        ("character varying(10)", "character varying(20)", False),
        ("character varying(20)", "character varying(10)", True),
        ("character varying(10)", "text", False),
        ("json", "jsonb", True),
        ("character(5)", "text", True),
        ("numeric(50,2)", "numeric(50,4)", True),
    ],
)
def test_a_changed_type_that_is_kept_as_text_is_copied_again_unless_its_values_stay(
    old: str, new: str, copied: bool
) -> None:
    def at(declared: str) -> TableSchema:
        return TableSchema(NAME, (Column("v", pa.string(), upstream_type=declared, number=1),), upstream_id="7")

    assert (compare(at(old), at(new)).recopy is not None) is copied
    assert compare(at(old), at(new)).changes == (f"column v changed from {old} to {new}",)


@pytest.mark.parametrize(
    ("old", "new", "copied"),
    [
        ("integer", "bigint", True),
        ("integer", "text", True),
        ("real", "double precision", True),
        ("timestamp without time zone", "timestamp with time zone", True),
        ("numeric(12,4)", "numeric(10,2)", True),
        ("numeric(12,2)", "numeric(14,4)", True),
        ("numeric(12,2)", "numeric(14,2)", False),
        ("numeric(12,2)", "numeric(10,2)", True),
    ],
)
def test_a_type_kept_as_another_is_copied_again_unless_it_has_every_value_unchanged(
    old: str, new: str, copied: bool
) -> None:
    def at(declared: str, kind: pa.DataType) -> TableSchema:
        return TableSchema(NAME, (Column("v", kind, upstream_type=declared, number=1),), upstream_id="7")

    assert (compare(at(old, pa.int32()), at(new, pa.int64())).recopy is not None) is copied


def printed(
    file: str, width: int, columns: dict[int, ColumnMark], **types: str
) -> Callable[[TableSchema], TableSchema]:
    fingerprint = str(Fingerprint(file, width, columns, {name.replace("_", " "): text for name, text in types.items()}))
    return lambda schema: replace(schema, fingerprint=fingerprint)


def test_rows_in_another_file_are_copied_again_if_a_column_changed_too() -> None:
    schema = Model().add("a").schema
    key, old, new = ColumnMark(23, -1, 5), ColumnMark(23, -1, 6), ColumnMark(23, -1, 7)
    before = printed("f", 2, {1: key, 2: old})(schema)
    assert compare(before, printed("g", 2, {1: key, 2: old})(schema)).recopy is None
    assert compare(before, printed("f", 2, {1: key, 2: new})(schema)).recopy is None
    both = compare(before, printed("g", 2, {1: key, 2: new})(schema))
    assert both.recopy == "column a was changed and the rows of the table were rewritten"
    added = compare(before, printed("g", 3, {1: key, 2: old, 3: new})(Model().add("a").add("b").schema))
    assert added.recopy == "the new column b was filled with a value for each row"


def test_a_column_up_to_the_widest_number_was_there_before() -> None:
    key, new = ColumnMark(23, -1, 5), ColumnMark(23, -1, 6)
    hidden = printed("f", 2, {1: key})(Model().schema)
    shown = printed("f", 2, {1: key, 2: new})(Model().add("a").schema)
    assert compare(hidden, shown).recopy == "column a was not published before"


def test_a_type_that_prints_its_values_otherwise_needs_a_new_copy_and_a_new_label_does_not() -> None:
    schema, key = Model().schema, {1: ColumnMark(23, -1, 5)}
    before = printed("f", 1, key, enum_7="calm", field_9_1="23 -1")(schema)
    reason = "a type of its columns changed the text of stored values"
    assert compare(before, printed("f", 1, key, enum_7="calm", enum_8="loud", field_9_1="23 -1")(schema)).recopy is None
    assert compare(before, printed("f", 1, key, enum_7="quiet", field_9_1="23 -1")(schema)).recopy == reason
    more = printed("f", 1, key, enum_7="calm", field_9_1="23 -1", field_9_2="25 -1")(schema)
    assert compare(before, more).recopy == reason
    assert compare(more, before).recopy == reason
    assert compare(before, printed("f", 1, key)(schema)).recopy is None  # the columns of these types are gone


def test_a_column_that_was_not_published_before_needs_a_new_copy() -> None:
    full = Model().add("a").add("b")
    assert compare(full.drop("a").schema, full.schema).recopy == "column a was not published before"


def test_a_change_of_nullability_is_reported_and_copies_nothing() -> None:
    schema = Model().add("a").schema
    [key, column] = schema.columns
    compared = compare(schema, replace(schema, columns=(key, replace(column, nullable=False))))
    assert compared.changes == ("column a may no longer be null",)
    assert compared.recopy is None
