"""Decoding of messages made here, byte by byte: what comes out is what was put in, wherever the messages are cut."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.errors import DamagedError, SchemaChangedError, UnfitError
from tailrace.model.change import START, Changes, Op, Position
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.source.postgres.frame_builder import scan
from tailrace.source.postgres.pgoutput.decode import decode, only
from tailrace.source.postgres.pgoutput.message import (
    EPOCH_US,
    LogicalMessage,
    MalformedError,
    Relation,
    RelationColumn,
    Truncate,
    parse,
)
from tailrace.source.postgres.pgoutput.message_batch import MessageBatch, OpenTransaction

INT4, INT8, TEXT, NUMERIC = 23, 20, 25, 1700
UNSENT = "\0unsent"  # stands for a TOASTed value that did not change

Row = Sequence[str | None]


def begin(commit_lsn: int, at_us: int = EPOCH_US, xid: int = 7) -> bytes:
    return b"B" + struct.pack(">qqI", commit_lsn, at_us - EPOCH_US, xid)


def commit(commit_lsn: int, end_lsn: int | None = None, at_us: int = EPOCH_US) -> bytes:
    return b"C\0" + struct.pack(">qqq", commit_lsn, end_lsn or commit_lsn + 8, at_us - EPOCH_US)


def relation(shape: Relation) -> bytes:
    columns = b"".join(
        struct.pack("B", column.identifies)
        + column.name.encode()
        + b"\0"
        + struct.pack(">Ii", column.type_oid, column.typmod)
        for column in shape.columns
    )
    names = shape.schema.encode() + b"\0" + shape.name.encode() + b"\0"
    identity = shape.replica_identity.encode()
    return b"R" + struct.pack(">I", shape.oid) + names + identity + struct.pack(">H", len(shape.columns)) + columns


def image(row: Row) -> bytes:
    def cell(value: str | None) -> bytes:
        if value is None:
            return b"n"
        if value == UNSENT:
            return b"u"
        raw = value.encode()
        return b"t" + struct.pack(">I", len(raw)) + raw

    return struct.pack(">H", len(row)) + b"".join(map(cell, row))


def insert(oid: int, row: Row) -> bytes:
    return b"I" + struct.pack(">I", oid) + b"N" + image(row)


def update(oid: int, row: Row, *, key: Row | None = None, old: Row | None = None) -> bytes:
    before = b"K" + image(key) if key is not None else b"O" + image(old) if old is not None else b""
    return b"U" + struct.pack(">I", oid) + before + b"N" + image(row)


def delete(oid: int, *, key: Row | None = None, old: Row | None = None) -> bytes:
    return b"D" + struct.pack(">I", oid) + (b"K" + image(key) if key is not None else b"O" + image(old or ()))


def truncate(*oids: int) -> bytes:
    return b"T" + struct.pack(">IB", len(oids), 0) + struct.pack(f">{len(oids)}I", *oids)


def shape_of(
    oid: int, identity: str = "d", columns: Sequence[tuple[str, int]] = (("id", INT4), ("v", TEXT))
) -> Relation:
    marked = [RelationColumn(name, type_, -1, identity == "f" or name == "id") for name, type_ in columns]
    return Relation(oid, "public", f"t{oid}", identity, tuple(marked))


def table_of(oid: int, key: tuple[str, ...] = ("id",), **more: pa.DataType) -> TableSchema:
    columns = {"id": pa.int32(), "v": pa.string(), **more}
    return TableSchema(TableName("public", f"t{oid}"), tuple(Column(*each) for each in columns.items()), key)


def run(
    messages: Sequence[bytes],
    *tables: TableSchema | tuple[Position, TableSchema],
    relations: dict[int, Relation] | None = None,
    transaction: OpenTransaction | None = None,
) -> list[Changes]:
    by_oid: dict[int, list[tuple[Position, TableSchema]]] = {}
    for each in tables:
        begins, table = (START, each) if isinstance(each, TableSchema) else each
        by_oid.setdefault(int(table.table.name[1:]), []).append((begins, table))
    raw = pa.array(messages, pa.binary())
    return list(decode(raw, relations=relations or {}, transaction=transaction, tables=by_oid))


def flat(changes: Sequence[Changes]) -> list[tuple[Any, ...]]:
    """(table, op, commit, ordinal, txn, row, before, unchanged columns) of every change, by position."""
    found = []
    for each in changes:
        mask = each.unchanged_mask()
        for index, change in enumerate(each.batch.to_pylist()):
            unchanged = (
                ()
                if mask is None
                else tuple(c.name for c, bit in zip(each.table.columns, mask[index], strict=True) if bit)
            )
            where = (each.table.table.name, Op(change["op"]), change["commit"], change["ordinal"], change["txn"])
            found.append((*where, change["row"], change["before"], unchanged))
    return sorted(found, key=lambda change: (change[2], change[3], change[0]))


def brief(changes: Sequence[Changes]) -> list[tuple[Any, ...]]:
    return [(op, ordinal, tuple(row.values())) for _, op, _, ordinal, _, row, _, _ in flat(changes)]


def in_transaction(*messages: bytes) -> list[bytes]:
    return [begin(100), *messages, commit(100)]


def test_rows_come_with_their_transaction_and_an_even_ordinal() -> None:
    shape = relation(shape_of(1))
    messages = [
        begin(100, EPOCH_US + 5, 9),
        shape,
        insert(1, ["1", "a"]),
        update(1, ["1", None]),
        delete(1, key=["1", None]),
    ]
    (changes,) = run([*messages, commit(100)], table_of(1))
    assert flat([changes]) == [
        ("t1", Op.INSERT, 100, 0, 9, {"id": 1, "v": "a"}, None, ()),
        ("t1", Op.UPDATE, 100, 2, 9, {"id": 1, "v": None}, None, ()),
        ("t1", Op.DELETE, 100, 4, 9, {"id": 1, "v": None}, None, ()),
    ]
    assert changes.batch.column("committed_at").view(pa.int64()).to_pylist() == [EPOCH_US + 5] * 3
    changes.batch.validate(full=True)


def test_ordinals_do_not_depend_on_which_tables_are_wanted() -> None:
    shapes = [relation(shape_of(1)), relation(shape_of(2))]
    messages = in_transaction(*shapes, insert(1, ["1", "a"]), insert(2, ["2", "b"]), truncate(1), insert(2, ["3", "c"]))
    both, alone = run(messages, table_of(1), table_of(2)), run(messages, table_of(2))
    assert [change for change in flat(both) if change[0] == "t2"] == flat(alone)
    assert brief(alone) == [(Op.INSERT, 2, (2, "b")), (Op.INSERT, 6, (3, "c"))]


def test_a_changed_key_is_a_delete_and_an_insert_that_keeps_what_was_not_sent_marked() -> None:
    messages = in_transaction(relation(shape_of(1)), insert(1, ["0", ""]), update(1, ["2", UNSENT], key=["1", None]))
    assert flat(run(messages, table_of(1)))[1:] == [
        ("t1", Op.DELETE, 100, 2, 7, {"id": 1, "v": None}, None, ()),
        ("t1", Op.INSERT, 100, 3, 7, {"id": 2, "v": None}, None, ("v",)),
    ]


def test_two_keys_swapped_in_one_transaction_keep_their_order() -> None:
    moves = [update(1, [new, "x"], key=[old, None]) for old, new in (("1", "3"), ("2", "1"), ("3", "2"))]
    found = brief(run(in_transaction(relation(shape_of(1)), *moves), table_of(1)))
    assert [(op, ordinal, row[0]) for op, ordinal, row in found] == [
        (Op.DELETE, 0, 1), (Op.INSERT, 1, 3),
        (Op.DELETE, 2, 2), (Op.INSERT, 3, 1),
        (Op.DELETE, 4, 3), (Op.INSERT, 5, 2),
    ]  # fmt: skip


def test_an_old_key_equal_to_the_new_one_is_a_plain_update_that_fills_an_unsent_key() -> None:
    shape = shape_of(1, columns=(("id", TEXT), ("v", TEXT)))
    table = TableSchema(TableName("public", "t1"), (Column("id", pa.string()), Column("v", pa.string())), ("id",))
    messages = in_transaction(relation(shape), update(1, [UNSENT, UNSENT], key=["long key", None]))
    assert flat(run(messages, table)) == [
        ("t1", Op.UPDATE, 100, 0, 7, {"id": "long key", "v": None}, None, ("v",)),
    ]


def test_a_full_old_image_is_kept_as_before_and_fills_what_was_not_sent() -> None:
    messages = in_transaction(
        relation(shape_of(1, "f")),
        update(1, ["1", UNSENT], old=["1", "toasted"]),
        update(1, ["2", UNSENT], old=["1", "toasted"]),
        delete(1, old=["2", "toasted"]),
        insert(1, ["5", "e"]),
    )
    one, two = {"id": 1, "v": "toasted"}, {"id": 2, "v": "toasted"}
    assert [change[1:4] + change[5:] for change in flat(run(messages, table_of(1)))] == [
        (Op.UPDATE, 100, 0, one, one, ()),
        (Op.DELETE, 100, 2, one, one, ()),
        (Op.INSERT, 100, 3, two, None, ()),
        (Op.DELETE, 100, 4, two, two, ()),
        (Op.INSERT, 100, 6, {"id": 5, "v": "e"}, None, ()),
    ]


def test_an_update_of_a_table_without_key_is_a_delete_of_the_old_row_and_an_insert() -> None:
    messages = in_transaction(relation(shape_of(1, "f")), update(1, ["1", "b"], old=["1", "a"]))
    assert brief(run(messages, table_of(1, key=()))) == [(Op.DELETE, 0, (1, "a")), (Op.INSERT, 1, (1, "b"))]


def test_a_truncate_stands_between_the_rows_before_and_after_it_in_each_wanted_table() -> None:
    shapes = [relation(shape_of(1)), relation(shape_of(2))]
    messages = in_transaction(*shapes, insert(1, ["1", "a"]), truncate(1, 2, 3), insert(1, ["2", "b"]))
    assert [(change[0], *change[1:4]) for change in flat(run(messages, table_of(1), table_of(2)))] == [
        ("t1", Op.INSERT, 100, 0),
        ("t1", Op.TRUNCATE, 100, 2),
        ("t2", Op.TRUNCATE, 100, 2),
        ("t1", Op.INSERT, 100, 4),
    ]


def test_a_truncate_needs_no_relation_message() -> None:
    assert brief(run(in_transaction(truncate(1)), table_of(1))) == [(Op.TRUNCATE, 0, (None, None))]


def test_columns_are_matched_by_name_whatever_their_order() -> None:
    shape = shape_of(1, columns=(("v", TEXT), ("id", INT4)))
    assert brief(run(in_transaction(relation(shape), insert(1, ["a", "1"])), table_of(1))) == [(Op.INSERT, 0, (1, "a"))]


def test_rows_on_both_sides_of_a_changed_relation_are_read_by_their_own_version() -> None:
    wider = shape_of(1, columns=(("id", INT4), ("v", TEXT), ("w", INT8)))
    messages = in_transaction(relation(shape_of(1)), insert(1, ["1", "a"]), relation(wider), insert(1, ["2", "b", "9"]))
    first, second = table_of(1), table_of(1, w=pa.int64()).at_version(2)
    found = run(messages, first, (Position(100, 2), second))
    assert [changes.table.version for changes in found] == [1, 2]
    assert brief(found) == [(Op.INSERT, 0, (1, "a")), (Op.INSERT, 2, (2, "b", 9))]


@pytest.mark.parametrize(
    ("columns", "difference"),
    [
        ((("id", INT4), ("v", TEXT), ("w", INT4)), "column w is new"),
        ((("id", INT4),), "column v is gone"),
        ((("id", INT8), ("v", TEXT)), "column id is no longer int32"),
        ((("id", INT4), ("v", NUMERIC + (1 << 20))), None),
    ],
)
def test_a_relation_of_no_known_version_stops_its_table_and_no_other(
    columns: Sequence[tuple[str, int]], difference: str | None
) -> None:
    changed = shape_of(1, columns=columns)
    messages = in_transaction(
        relation(shape_of(1)), relation(shape_of(2)), insert(1, ["1", "a"]), relation(changed),
        insert(1, ["1"] * len(columns)), insert(2, ["2", "b"]),
    )  # fmt: skip
    found: list[Changes] = []
    by_oid = {1: only(table_of(1)), 2: only(table_of(2))}
    stream = decode(pa.array(messages, pa.binary()), relations={}, transaction=None, tables=by_oid)
    if difference is None:
        found.extend(stream)
        assert len(flat(found)) == 3
        return
    with pytest.raises(SchemaChangedError, match=difference) as raised:
        found.extend(stream)
    assert raised.value.table == "public.t1"
    assert raised.value.position == f"{100:016x}{2:016x}"
    assert brief(found) == [(Op.INSERT, 0, (1, "a")), (Op.INSERT, 4, (2, "b"))]


def test_an_identity_that_lacks_the_key_is_refused_for_updates_but_not_for_inserts() -> None:
    shape = Relation(
        1, "public", "t1", "i", (RelationColumn("id", INT4, -1, False), RelationColumn("v", TEXT, -1, True))
    )
    assert run(in_transaction(relation(shape), insert(1, ["1", "a"])), table_of(1))
    with pytest.raises(SchemaChangedError, match="replica identity"):
        run(in_transaction(relation(shape), delete(1, key=[None, "a"])), table_of(1))


def test_text_that_is_not_utf8_is_refused_with_its_column_and_without_its_value() -> None:
    broken = insert(1, ["1", "secret?"]).replace(b"?", b"\xff")
    with pytest.raises(UnfitError, match="column v") as raised:
        run(in_transaction(relation(shape_of(1)), broken), table_of(1))
    assert "secret" not in str(raised.value)


def test_text_that_is_not_of_the_columns_type_is_refused_without_its_value() -> None:
    with pytest.raises(UnfitError, match="column id") as raised:
        run(in_transaction(relation(shape_of(1)), insert(1, ["secret", "a"])), table_of(1))
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "message",
    [
        insert(1, ["1", "a"])[:-1],
        insert(1, ["1", "a"]) + b"x",
        insert(1, ["1"]),
        insert(1, ["1", "a"]).replace(b"t\0\0\0\1a", b"b\0\0\0\1a"),
        insert(1, ["1", "a"]).replace(b"t\0\0\0\1a", b"t\xff\0\0\1a"),
        insert(1, ["1", "a"]).replace(b"N", b"K"),
        delete(1, key=["1", None]).replace(b"K", b"N"),
        update(1, ["1", "a"], key=["1", None]).replace(b"N", b"X"),
        b"I\0\0\0\1",
        b"T\0\0\0\7\0",
        b"",
    ],
)
@pytest.mark.parametrize("last", [True, False])
def test_damaged_messages_are_refused(message: bytes, last: bool) -> None:
    messages = [begin(100), relation(shape_of(1)), insert(1, ["1", "b"]), message]
    with pytest.raises(DamagedError):
        run(messages if last else [*messages, insert(1, ["2", "b"])], table_of(1))


def test_rows_without_a_begin_or_a_relation_are_refused() -> None:
    with pytest.raises(DamagedError, match="Begin"):
        run([insert(1, ["1", "a"])], table_of(1), relations={1: shape_of(1)})
    with pytest.raises(DamagedError, match="Relation"):
        run(in_transaction(insert(1, ["1", "a"])), table_of(1))


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (relation(shape_of(3, "f")), shape_of(3, "f")),
        (truncate(1, 2**32 - 1), Truncate((1, 2**32 - 1))),
        (
            b"M\1" + struct.pack(">q", 9) + b"p\0" + struct.pack(">I", 2) + b"\0\1",
            LogicalMessage(True, "p", b"\0\1", lsn=9),
        ),
    ],
)
def test_control_messages_are_read_and_refused_when_cut_short(raw: bytes, value: object) -> None:
    assert parse(raw) == value
    with pytest.raises(MalformedError):
        parse(raw[:-1])


# -- any stream, cut anywhere --

VALUE = st.none() | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
NUMBER = st.integers(0, 5).map(str)


@dataclass
class Story:
    """Messages, and what they should become: (table, op, commit, ordinal, txn, row, before, unchanged)."""

    messages: list[bytes] = field(default_factory=list)
    changes: list[tuple[Any, ...]] = field(default_factory=list)


@st.composite
def stories(draw: st.DrawFn) -> Story:
    story = Story()
    identities = {1: "d", 2: "f"}
    known: set[int] = set()
    for number in range(1, draw(st.integers(2, 5))):
        lsn, ordinal = 1000 + number * 100, 0
        story.messages.append(begin(lsn, xid=number))

        def tell(oid: int, op: Op, row: Row, before: Row | None = None, half: int = 0) -> None:
            unchanged = ("v",) if row[1] == UNSENT else ()
            image = {"id": None if row[0] is None else int(row[0]), "v": None if unchanged else row[1]}
            old = None if before is None else {"id": int(before[0] or 0), "v": before[1]}
            story.changes.append((f"t{oid}", op, lsn, ordinal + half, number, image, old, unchanged))  # noqa: B023

        for _ in range(draw(st.integers(0, 6))):
            oid = draw(st.sampled_from([1, 2, 3]))
            if oid not in known or draw(st.integers(0, 9)) == 0:
                known.add(oid)
                story.messages.append(relation(shape_of(oid, identities.get(oid, "d"))))
            _change(draw, story, oid, identities.get(oid), tell)
            ordinal += 2
        story.messages.append(commit(lsn))
    return story


def _change(draw: st.DrawFn, story: Story, oid: int, identity: str | None, tell: Any) -> None:
    new, old = [draw(NUMBER), draw(VALUE)], [draw(NUMBER), draw(VALUE)]
    kind = draw(st.sampled_from("IUMDT"))
    wanted = tell if identity else lambda *_, **__: None
    if kind == "I":
        story.messages.append(insert(oid, new))
        wanted(oid, Op.INSERT, new)
    elif kind == "T":
        story.messages.append(truncate(oid))
        wanted(oid, Op.TRUNCATE, [None, None])
    elif kind == "D":
        story.messages.append(delete(oid, old=old) if identity == "f" else delete(oid, key=[old[0], None]))
        wanted(oid, Op.DELETE, old if identity == "f" else [old[0], None], old if identity == "f" else None)
    elif identity == "f":
        sent = [new[0], UNSENT if kind == "M" else new[1]]
        # What was not sent is not null: an old image that has none there is that of a partition, which has but the key.
        full = [new[0], sent[1] if old[1] is None or kind != "M" else old[1]]
        story.messages.append(update(oid, sent, old=old))
        if new[0] == old[0]:
            wanted(oid, Op.UPDATE, full, old)
        else:
            wanted(oid, Op.DELETE, old, old)
            wanted(oid, Op.INSERT, full, half=1)
    else:
        sent = [new[0], UNSENT if kind == "M" else new[1]]
        moved = new[0] != old[0]
        story.messages.append(update(oid, sent, key=[old[0], None] if moved else None))
        if moved:
            wanted(oid, Op.DELETE, [old[0], None])
        wanted(oid, Op.INSERT if moved else Op.UPDATE, sent, half=int(moved))


@settings(max_examples=150)
@given(stories(), st.booleans())
def test_any_stream_cut_at_any_message_gives_the_same_changes(story: Story, large: bool) -> None:
    tables = {1: only(table_of(1)), 2: only(table_of(2))}
    raw = pa.array([b"not ours", *story.messages], pa.large_binary() if large else pa.binary())[1:]
    looked = scan(MessageBatch.of(raw))
    assert looked.end is None
    for cut in range(len(raw) + 1):
        first, rest = raw[:cut], raw[cut:]
        assert scan(MessageBatch.of(raw).head(cut)).end == looked.open_at(cut)
        relations = {
            shape.oid: shape
            for at, found in looked.relations
            if at < cut and isinstance(shape := parse(found), Relation)
        }
        before = list(decode(first, relations={}, transaction=None, tables=tables))
        after = list(decode(rest, relations=relations, transaction=looked.open_at(cut), tables=tables))
        assert flat([*before, *after]) == sorted(story.changes, key=lambda change: (change[2], change[3], change[0]))


@given(stories())
def test_a_scan_counts_rows_and_finds_commits_without_decoding(story: Story) -> None:
    looked = scan(MessageBatch.of(pa.array(story.messages, pa.binary())))
    kinds = [message[:1] for message in story.messages]
    assert [kinds[index] for index in looked.commits] == [b"C"] * kinds.count(b"C")
    assert looked.end_lsn.tolist() == [lsn + 8 for lsn in looked.commit_lsn.tolist()]
    assert sum(looked.rows.values()) == sum(kind in b"IUD" for kind in kinds)
    assert looked.changes == sum(kind in b"IUDT" for kind in kinds)
    cut = int(looked.commits[0]) + 1
    assert cut == kinds.index(b"C") + 1
    assert looked.open_at(cut) is None


def test_a_scan_refuses_bytes_that_are_no_messages() -> None:
    for message in (b"Z123456789", commit(1)[:-1], insert(1, [])[:3], b""):
        with pytest.raises(MalformedError):
            scan(MessageBatch.of(pa.array([message], pa.binary())))


def test_a_skipped_change_is_left_out_where_it_is_and_no_other_one_elsewhere() -> None:
    def transaction(lsn: int) -> list[bytes]:
        rows = [insert(1, (str(lsn + number), "x")) for number in range(3)]
        return [begin(lsn), relation(shape_of(1)), *rows, commit(lsn)]

    def kept(messages: list[bytes]) -> list[int]:
        found = decode(
            pa.array(messages, pa.binary()),
            relations={},
            transaction=None,
            tables={1: only(table_of(1))},
            skips={1: [Position(200, 2)]},
        )
        return [row["id"] for changes in found for row in changes.batch.column("row").to_pylist()]

    assert kept(transaction(100)) == [100, 101, 102]
    assert kept(transaction(200)) == [200, 202]
    assert kept(transaction(300)) == [300, 301, 302]
    assert kept([*transaction(100), *transaction(200), *transaction(300)]) == [100, 101, 102, 200, 202, 300, 301, 302]
