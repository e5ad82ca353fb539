"""What is sent: rqlite's own bytes, CloudEvents and Debezium's envelopes, with ids that stay the same."""

from __future__ import annotations

import base64
import json
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from decimal import Decimal
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from tailrace.destination.webhook.format.event import QUEUE_SCHEMA, format_of
from tailrace.destination.webhook.signature import sign
from tailrace.errors import ConfigError
from tailrace.model.change import Changes, Op, Position, pack_unchanged
from tailrace.model.schema import Column, TableName, TableSchema

PAGE = Path(__file__).parents[4] / "docs" / "webhook-formats.md"
RECORDED = Path(__file__).parents[3] / "source" / "rqlite" / "recorded"
FORMATS = ("rqlite", "cloudevents", "debezium")
INSTANT = 1_700_000_000_123_456

INT, TEXT, REAL, BLOB = pa.int64(), pa.string(), pa.float64(), pa.binary()
UPSTREAM = {
    "t": {"id": INT, "n": TEXT, "v": REAL, "b": BLOB, "k": TEXT},
    "tx": {"rowid": INT, "k": TEXT, "v": INT, "bigi": INT, "z": TEXT},
    "wr": {"k": TEXT, "v": INT},
    "tb": {"rowid": INT, "a": INT, "d": TEXT, "j": TEXT},
    "qq": {"id": INT, "v": INT},
    **{f"a{number}": {"id": INT, "v": INT, "z": TEXT} for number in range(3)},
}
"""The tables of the recorded requests; the first column is the key."""

ORDERS = TableSchema(
    TableName("public", "orders"),
    (
        Column("id", INT),
        Column("note", TEXT),
        Column("amount", pa.decimal128(12, 2)),
        Column("until", pa.timestamp("us", "UTC")),
    ),
    ("id",),
)


def build(table: TableSchema, *rows: tuple[Op, Position, dict[str, Any]], **given: Any) -> Changes:
    """Changes from (op, position, values); `before`, `unchanged` and `exact` may be among the values, as `_before` …"""
    names = table.row_type.names
    mask = np.array([[name in row.get("_unchanged", ()) for name in names] for _, _, row in rows])
    exact = [json.dumps(row["_exact"]) if "_exact" in row else None for _, _, row in rows]
    return Changes.build(
        table,
        pa.array([{name: row.get(name) for name in names} for _, _, row in rows], table.row_type),
        op=np.array([op for op, _, _ in rows], np.int8),
        commit=np.array([at.commit for _, at, _ in rows], np.int64),
        ordinal=np.array([at.ordinal for _, at, _ in rows], np.int64),
        before=pa.array([row.get("_before") for _, _, row in rows], table.row_type),
        unchanged=pack_unchanged(mask),
        exact=pa.array(exact, pa.string()),
        **{"committed_at": pa.array([INSTANT] * len(rows), pa.timestamp("us", "UTC")), **given},
    )


def encode(name: str, *changes: Changes) -> pa.Table:
    batches = [format_of(name).encode(each, source="shop") for each in changes]
    for batch in batches:
        batch.validate(full=True)
    return pa.Table.from_batches(batches, QUEUE_SCHEMA)


def send(name: str, *changes: Changes) -> Any:
    return json.loads(format_of(name).body(encode(name, *changes), service_id="", node_id="n1"))


def events(name: str, *changes: Changes) -> list[dict[str, Any]]:
    sent = send(name, *changes)
    return [event for entry in sent["payload"] for event in entry["events"]] if name == "rqlite" else sent


class Recorded(NamedTuple):
    """An event that rqlite posted, with the index it has or inherits."""

    commit: int
    ordinal: int
    milliseconds: int
    event: dict[str, Any]

    def shape(self) -> tuple[str, list[str]]:
        image = self.event.get("after") or self.event.get("before") or {}
        return self.event["table"], sorted(image)

    def changes(self) -> Iterator[tuple[Op, Position, dict[str, Any], int]]:
        """Its change, or its two when the key was changed, as a source gives them."""
        event, at = self.event, Position(self.commit, self.ordinal)
        old, new = (self._values(image, event.get(f"{which}_row_id")) for which, image in self._images())
        match event["op"]:
            case "INSERT":
                yield Op.INSERT, at, new, self.milliseconds
            case "DELETE":
                yield Op.DELETE, at, {**old, "_before": plain(old)}, self.milliseconds
            case "UPDATE" if event.get("new_row_id") != event.get("old_row_id"):
                yield Op.DELETE, at, {**old, "_before": plain(old)}, self.milliseconds
                yield Op.INSERT, Position(self.commit, self.ordinal + 1), new, self.milliseconds
            case _:
                yield Op.UPDATE, at, {**new, "_before": plain(old)}, self.milliseconds

    def _images(self) -> list[tuple[str, dict[str, Any]]]:
        return [("old", self.event.get("before", {})), ("new", self.event.get("after", {}))]

    def _values(self, image: dict[str, Any], row_id: int | None) -> dict[str, Any]:
        types = UPSTREAM[self.event["table"]]
        values: dict[str, Any] = {"rowid": row_id} if "rowid" in types else {}
        exact = {}
        for name, value in image.items():
            if types[name] == BLOB:
                values[name] = None if value is None else base64.b64decode(value)
            elif types[name] == TEXT and isinstance(value, int):
                exact[name] = str(value)
            else:
                values[name] = value
        return {**values, "_exact": exact} if exact else values


def plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not name.startswith("_")}


def recorded_table(name: str, columns: list[str]) -> TableSchema:
    types = UPSTREAM[name]
    there = {column: kind for column, kind in types.items() if column in columns or column == "rowid"}
    return TableSchema(
        TableName("svc1", name), tuple(Column(*each) for each in there.items()), (next(iter(types)),) if there else ()
    )


def requests(file: str) -> Iterator[tuple[bytes, list[Recorded]]]:
    """Each body with its events that have images; an index of 0 is that of the entry before."""
    index, ordinal = 0, 0
    for line in (RECORDED / file).read_text("utf-8").splitlines():
        body = json.loads(line)["body"]
        found = []
        for entry in json.loads(body)["payload"]:
            if entry["index"]:
                index, ordinal = entry["index"], 0
            for event in entry["events"]:
                found.append(Recorded(index, ordinal, entry["commit_timestamp"], event))
                ordinal += 2
        yield body.encode(), [each for each in found if "error" not in each.event]


def sent_again(recorded: list[Recorded]) -> pa.Table:
    """The events after they went in as changes."""
    parts = []
    for (name, columns), run in groupby(recorded, key=Recorded.shape):
        changes = [change for each in run for change in each.changes()]
        at = pa.array([milliseconds * 1000 for *_, milliseconds in changes], pa.timestamp("us", "UTC"))
        rows = [change[:3] for change in changes]
        parts.append(build(recorded_table(name, columns), *rows, committed_at=at))
    return encode("rqlite", *parts)


@pytest.mark.parametrize("file", ["single-node.jsonl", "alter-and-transactions.jsonl"])
def test_recorded_requests_go_out_as_they_came_in(file: str) -> None:
    whole = 0
    for body, recorded in requests(file):
        if not recorded:
            continue
        said = json.loads(body)
        sent = format_of("rqlite").body(
            sent_again(recorded), service_id=said.get("service_id", ""), node_id=said["node_id"]
        )
        if b'"index":0' in body or b'"error"' in body:
            # Entries have inherited their index, and events without images are no changes yet: the rest is the same.
            flat = [
                (e["index"], e["commit_timestamp"], event) for e in json.loads(sent)["payload"] for event in e["events"]
            ]
            assert flat == [(each.commit, each.milliseconds, each.event) for each in recorded]
        else:
            assert sent == body
            whole += 1
    assert whole >= 20


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.0, "2"),
        (-0.0, "-0"),
        (0.1, "0.1"),
        (1e-6, "0.000001"),
        (9.5e-7, "9.5e-7"),
        (1.5e-10, "1.5e-10"),
        (5e-324, "5e-324"),
        (1e10, "10000000000"),
        (-12345678901.25, "-12345678901.25"),
        (123456789012345680.0, "123456789012345680"),
        (999999999999999900000.0, "999999999999999900000"),
        (1e21, "1e+21"),
        (-1.7976931348623157e308, "-1.7976931348623157e+308"),
        (float("nan"), '"NaN"'),
        (float("-inf"), '"-Infinity"'),
    ],
)
def test_the_rqlite_format_writes_numbers_as_go_does(value: float, text: str) -> None:
    table = TableSchema(TableName("s", "t"), (Column("f", REAL),))
    [event] = encode("rqlite", build(table, (Op.INSERT, Position(1, 0), {"f": value})))["event"].to_pylist()
    assert event == f'{{"op":"INSERT","table":"t","after":{{"f":{text}}}}}'


def test_the_rqlite_format_escapes_text_as_go_does() -> None:
    table = TableSchema(TableName("s", "a<b"), (Column("n&", TEXT),))
    value = '<>&"\\\b\f\n\r\t\x00\x1f\x7f\u2028\u2029é🦫'
    [event] = encode("rqlite", build(table, (Op.INSERT, Position(1, 0), {"n&": value})))["event"].to_pylist()
    escaped = r"\u003c\u003e\u0026" + r"\"\\" + r"\b\f\n\r\t\u0000\u001f" + "\x7f" + r"\u2028\u2029" + "é🦫"
    assert event == f'{{"op":"INSERT","table":"a\\u003cb","after":{{"n\\u0026":"{escaped}"}}}}'


def test_row_ids_come_from_their_own_column_or_a_whole_key_and_0_is_left_out() -> None:
    named = TableSchema(TableName("s", "t"), (Column("k", TEXT), Column("rowid", INT)), ("k",))
    moved = build(
        named,
        (Op.INSERT, Position(1, 0), {"k": "a", "rowid": 7}),
        (Op.UPDATE, Position(1, 2), {"k": "a", "rowid": 8, "_before": {"k": "a", "rowid": 7}}),
        (Op.DELETE, Position(1, 4), {"k": "a", "rowid": 8}),
        (Op.INSERT, Position(1, 6), {"k": "b", "rowid": 0}),
    )
    assert events("rqlite", moved) == [
        {"op": "INSERT", "table": "t", "new_row_id": 7, "after": {"k": "a"}},
        {"op": "UPDATE", "table": "t", "new_row_id": 8, "old_row_id": 7, "before": {"k": "a"}, "after": {"k": "a"}},
        {"op": "DELETE", "table": "t", "old_row_id": 8, "before": {"k": "a"}},
        {"op": "INSERT", "table": "t", "after": {"k": "b"}},
    ]
    by_text = TableSchema(TableName("s", "t"), (Column("k", TEXT),), ("k",))
    assert events("rqlite", build(by_text, (Op.INSERT, Position(1, 0), {"k": "a"}))) == [
        {"op": "INSERT", "table": "t", "after": {"k": "a"}}
    ]


def test_events_of_one_commit_are_one_entry_for_rqlite_also_over_pieces_of_the_queue() -> None:
    table = TableSchema(TableName("s", "t"), (Column("id", INT),), ("id",))
    one = build(table, (Op.INSERT, Position(5, 0), {"id": 1}), (Op.INSERT, Position(5, 2), {"id": 2}))
    two = build(table, (Op.INSERT, Position(5, 4), {"id": 3}), (Op.INSERT, Position(6, 0), {"id": 4}))
    sent = send("rqlite", one, two)
    assert sent.keys() == {"node_id", "payload"}, "an empty service_id is left out"
    assert [(entry["index"], len(entry["events"])) for entry in sent["payload"]] == [(5, 3), (6, 1)]
    assert {entry["commit_timestamp"] for entry in sent["payload"]} == {INSTANT // 1000}


def every_operation() -> Changes:
    return build(
        ORDERS,
        (Op.READ, Position(4, 0), {"id": 9, "note": "copied"}),
        (Op.INSERT, Position(5, 0), {"id": 1, "note": "a", "_exact": {"until": "infinity"}}),
        (Op.UPDATE, Position(5, 2), {"id": 1, "_unchanged": ["note"]}),
        (Op.COMMIT, Position(5, 3), {}),
        (Op.DELETE, Position(6, 0), {"id": 1}),
        (Op.INSERT, Position(6, 1), {"id": 2, "note": "b"}),
        (Op.SCHEMA, Position(6, 2), {}),
        (Op.DELETE, Position(7, 0), {"id": 2}),
        (Op.TRUNCATE, Position(8, 0), {}),
    )


NOTHING = {"note": None, "amount": None, "until": None}


def test_every_operation_is_an_event_for_rqlite() -> None:
    assert events("rqlite", every_operation()) == [
        {"op": "INSERT", "table": "orders", "new_row_id": 9, "after": {**NOTHING, "id": 9, "note": "copied"}},
        {
            "op": "INSERT",
            "table": "orders",
            "new_row_id": 1,
            "after": {**NOTHING, "id": 1, "note": "a", "until": "infinity"},
        },
        {
            "op": "UPDATE",
            "table": "orders",
            "new_row_id": 1,
            "old_row_id": 1,
            "after": {"id": 1, "amount": None, "until": None},
        },
        {
            "op": "UPDATE",
            "table": "orders",
            "new_row_id": 2,
            "old_row_id": 1,
            "before": {"id": 1},
            "after": {**NOTHING, "id": 2, "note": "b"},
        },
        {"op": "DELETE", "table": "orders", "old_row_id": 2, "before": {"id": 2}},
        {"op": "TRUNCATE", "table": "orders"},
    ]


def test_every_operation_is_a_cloud_event() -> None:
    sent = events("cloudevents", every_operation())
    assert [event["type"].removeprefix("tailrace.") for event in sent] == [
        "read",
        "insert",
        "update",
        "update",
        "delete",
        "truncate",
    ]
    read, insert, update, move, delete, truncate = (event["data"] for event in sent)
    assert read["after"] == {**NOTHING, "id": 9, "note": "copied"}
    assert insert["after"]["until"] == "infinity"
    assert (update["after"], update["unchanged"]) == ({"id": 1, "amount": None, "until": None}, ["note"])
    assert (move["old_key"], move["key"], move["before"]) == ({"id": 1}, {"id": 2}, {"id": 1})
    assert (delete["key"], delete["before"], delete["after"]) == ({"id": 2}, {"id": 2}, None)
    assert (truncate["key"], truncate["before"], truncate["after"]) == (None, None, None)
    assert ["old_key" in event["data"] for event in sent].count(True) == 1
    assert {key: value for key, value in sent[1].items() if key not in ("id", "data")} == {
        "specversion": "1.0",
        "source": "shop",
        "type": "tailrace.insert",
        "subject": "public.orders",
        "time": "2023-11-14T22:13:20.123456Z",
        "datacontenttype": "application/json",
    }
    assert insert["position"] == str(Position(5, 0))
    assert format_of("cloudevents").content_type == "application/cloudevents-batch+json"


def test_every_operation_is_an_envelope_of_debezium() -> None:
    sent = events("debezium", every_operation())
    assert [event["op"] for event in sent] == ["r", "c", "u", "d", "c", "d", "t"]
    read, insert, update, moved_from, moved_to, delete, truncate = sent
    assert (read["source"]["snapshot"], insert["source"]["snapshot"]) == ("true", "false")
    assert update["after"]["note"] == "__debezium_unavailable_value"
    assert (moved_from["key"], moved_from["headers"]) == ({"id": 1}, {"__debezium.newkey": {"id": 2}})
    assert (moved_to["key"], moved_to["headers"]) == ({"id": 2}, {"__debezium.oldkey": {"id": 1}})
    assert ("headers" in delete, delete["before"], delete["after"]) == (False, {"id": 2}, None)
    assert (truncate["key"], truncate["before"], truncate["after"]) == (None, None, None)
    assert insert["source"] == {
        "connector": "tailrace",
        "name": "shop",
        "schema": "public",
        "table": "orders",
        "position": str(Position(5, 0)),
        "txId": None,
        "ts_ms": INSTANT // 1000,
        "snapshot": "false",
    }


def test_an_old_image_is_sent_whole_where_the_upstream_gives_it() -> None:
    old = {"id": 1, "note": "was", "amount": None, "until": None}
    changes = build(
        ORDERS,
        (Op.UPDATE, Position(5, 0), {"id": 1, "note": "is", "_before": old}),
        (Op.DELETE, Position(5, 2), {**old, "_before": old, "_exact": {"until": "infinity"}}),
    )
    for name in FORMATS:
        update, delete = (event.get("data", event) for event in events(name, changes))
        assert update["before"] == old
        assert delete["before"] == {**old, "until": "infinity"}


@pytest.mark.parametrize("name", FORMATS)
def test_an_id_is_the_same_however_the_changes_are_cut(name: str) -> None:
    whole = every_operation()
    pieces = [Changes(ORDERS, whole.batch.slice(start, count)) for start, count in ((0, 2), (2, 4), (6, 3))]
    assert encode(name, *pieces).equals(encode(name, whole))
    ids = encode(name, whole)["id"].to_pylist()
    assert len(set(ids)) == len(ids)
    assert f"shop:public.orders:{Position(5, 2)}" in ids


def test_a_copied_row_is_known_by_its_key_and_the_snapshot_not_by_its_place_in_a_chunk() -> None:
    def ids(table: TableSchema, *rows: tuple[int, int, int]) -> list[str]:
        found = build(table, *((Op.READ, Position(commit, at), {"id": key, "note": "x"}) for commit, at, key in rows))
        listed: list[str] = encode("cloudevents", found)["id"].to_pylist()
        return listed

    first, second = ids(ORDERS, (4, 0, 1), (4, 1, 2))
    assert ids(ORDERS, (4, 0, 2), (4, 5, 1)) == [second, first]
    assert first.startswith(f"shop:public.orders:read:{4:016x}")
    assert first not in ids(ORDERS, (5, 0, 1))
    keyless = TableSchema(ORDERS.table, ORDERS.columns)
    assert len(set(ids(keyless, (4, 0, 1), (4, 1, 1)))) == 2


@pytest.mark.parametrize("name", FORMATS)
def test_the_queue_knows_where_an_event_stands_and_whether_it_was_copied(name: str) -> None:
    queued = encode(name, every_operation())
    assert queued["copied"].to_pylist() == [True] + [False] * (len(queued) - 1)
    assert not any(queued["marker"].to_pylist())
    places = list(zip(queued["commit"].to_pylist(), queued["ordinal"].to_pylist(), strict=True))
    assert places == sorted(places)
    assert (6, 1) in places, "a changed key is done where its second half is"


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_no_change_of_a_row_is_no_event(name: str) -> None:
    boundary = build(ORDERS, (Op.COMMIT, Position(5, 0), {}), (Op.SCHEMA, Position(5, 1), {}))
    assert len(encode(name, boundary)) == 0


def test_a_changed_row_of_a_table_without_key_is_one_update() -> None:
    keyless = TableSchema(TableName("s", "log"), (Column("note", TEXT),))
    changes = build(keyless, (Op.DELETE, Position(5, 0), {"note": "a"}), (Op.INSERT, Position(5, 1), {"note": "b"}))
    [event] = events("cloudevents", changes)
    assert event["data"]["key"] is None
    assert (event["data"]["before"], event["data"]["after"]) == ({"note": "a"}, {"note": "b"})


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"rqlite \| cloudevents \| debezium"):
        format_of("xml")


def on_the_page(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def test_the_examples_on_the_page_are_what_is_sent() -> None:
    kinds = {"id": INT, "status": TEXT, "amount": pa.decimal128(12, 2), "note": TEXT}
    table = TableSchema(ORDERS.table, tuple(Column(*each) for each in kinds.items()), ("id",))
    old = {"id": 7, "status": "new", "amount": Decimal("19.90"), "note": None}
    change = (Op.UPDATE, Position(26733192, 2), {**old, "status": "paid", "_before": old})
    changes = build(table, change, txn=pa.array([771]))
    for name, shown in zip(FORMATS, on_the_page("json")[: len(FORMATS)], strict=True):
        sent = format_of(name).body(encode(name, changes), service_id="shop", node_id="n1").decode()
        assert sent == re.sub(r"\n *", "", shown)


def test_the_receiver_on_the_page_stores_events_once_and_only_if_signed_with_the_secret() -> None:
    [snippet] = on_the_page("python")
    receiver: dict[str, Any] = {}
    exec(snippet, receiver)
    secret, other = (f"whsec_{base64.b64encode(key * 32).decode()}" for key in (b"a", b"b"))
    whole = encode("cloudevents", every_operation())
    bodies = [format_of("cloudevents").body(part, service_id="", node_id="n") for part in (whole[:4], whole[2:])]
    now = int(time.time())
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute("CREATE TABLE seen (id PRIMARY KEY)")
        database.execute("CREATE TABLE events (event)")
        for number, body in enumerate(bodies):
            assert receiver["receive"](database, secret, sign([other, secret], f"m{number}", now, body), body) == 200
        assert receiver["receive"](database, secret, sign([other], "m3", now, bodies[0]), bodies[0]) == 401
        assert receiver["receive"](database, secret, sign([secret], "m3", now - 301, bodies[0]), bodies[0]) == 401
        stored = [json.loads(text)["id"] for (text,) in database.execute("SELECT event FROM events")]
    assert stored == whole["id"].to_pylist()
