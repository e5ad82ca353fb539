"""How tables of rqlite clusters are followed: with an API, with a schema file, and with nothing but their events."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tailrace.errors import OwnedError, SchemaChangedError, TableError, UnavailableError
from tailrace.model.change import START, Op, Position
from tailrace.option.table import TableOptions
from tailrace.source.follower import TableDirectives
from tailrace.source.rqlite.receiver import STATUS, receiving_alone
from tailrace.source.schema_file import SchemaFile, follow_alone
from tailrace.source.sqlite.offset import SqliteOffset
from tailrace.system.child_process import read_status
from tailrace.testing.replay import SourceReplay
from tailrace.testing.wait import wait_until
from tests.support.rqlite_following import LIMIT, changes, fails, free_port, make_source, node_and_replay, post, rows
from tests.support.rqlite_node import RqliteNode
from tests.support.rqlite_posting import RECORDED, body, entry
from tests.support.source_making import with_tables

ITEMS = "CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT, price REAL)"
WORDS = "CREATE TABLE words (w TEXT NOT NULL PRIMARY KEY, n INTEGER)"


def recorded(name: str) -> list[bytes]:
    return [json.loads(line)["body"].encode() for line in (RECORDED / name).read_text().splitlines()]


def expected(bodies: list[bytes], table: str) -> dict[int, dict[str, Any]]:
    """The rows that recorded events lead to, one by one, but for those without images."""
    found: dict[int, dict[str, Any]] = {}
    for one in bodies:
        for each in json.loads(one)["payload"]:
            for event in each["events"]:
                if event["table"] == table and "error" not in event:
                    found.pop(event.get("old_row_id", 0), None) if event["op"] != "INSERT" else None
                    if "after" in event:
                        found[event.get("new_row_id", 0)] = event["after"]
    return found


@pytest.mark.parametrize(
    ("file", "service", "table"),
    [("single-node.jsonl", "svc1", "t"), ("alter-and-transactions.jsonl", "rqlite", "qq")],
)
def test_recorded_requests_become_tables_without_anything_else_being_known(
    file: str, service: str, table: str, tmp_path: Path
) -> None:
    source = make_source(tmp_path, free_port(), missing_images="pass")
    source = with_tables(source, TableOptions(include=[f"{service}.{table}"]))
    bodies = recorded(file)
    with SourceReplay(source, LIMIT) as replay:
        _ = replay.follower
        post(source, *bodies)
        wait_until(lambda: replay.step() or f"{service}.{table}" in replay.tables)
        replay.catch_up()
        found = {row.pop("rowid"): row for row in rows(replay, f"{service}.{table}")}
    assert found == expected(bodies, table)


def test_a_schema_file_gives_types_and_keys(tmp_path: Path) -> None:
    file = tmp_path / "schema.sql"
    file.write_text(
        "CREATE TABLE t (id INTEGER PRIMARY KEY, n TEXT, v REAL, b BLOB, k INTEGER);"
        "CREATE TABLE tx (k TEXT PRIMARY KEY, v INTEGER, bigi INTEGER, z TEXT);"
        "CREATE TABLE tb (a BOOLEAN, d DATETIME, j JSON);"
    )
    source = with_tables(
        make_source(tmp_path, free_port(), schema_file=file, missing_images="pass"),
        TableOptions(include=["svc1.t", "svc1.tb"]),
    )
    with SourceReplay(source, LIMIT) as replay:
        _ = replay.follower
        post(source, *recorded("single-node.jsonl")[:5])
        wait_until(lambda: replay.step() or "svc1.t" in replay.tables)
        replay.catch_up()
        assert rows(replay, "svc1.t")[-1] == {"id": 10, "n": "A", "v": 1.5, "b": b"\x00\xff", "k": None}


def test_an_outdated_schema_file_stops_its_table_until_it_is_fixed(tmp_path: Path) -> None:
    file = tmp_path / "schema.sql"
    file.write_text(ITEMS)
    source = make_source(tmp_path, free_port(), schema_file=file)
    with SourceReplay(source, LIMIT) as replay:
        _ = replay.follower
        post(source, body([entry(3, insert("items", 1, id=1, name="a", price=2))]))
        wait_until(lambda: replay.step() or "rqlite.items" in replay.tables)
        replay.catch_up()
        assert rows(replay, "rqlite.items") == [{"id": 1, "name": "a", "price": 2.0}]
        post(source, body([entry(4, insert("items", 2, id=2, name="b", price=2, size=3))]))
        error = fails(replay)
        assert "new: size" in error.message
        assert "schema file" in (error.fix or "")
        replay.planned = None
        replay.directives = TableDirectives(paused=["rqlite.items"])
        wait_until(lambda: not replay.step())
        file.write_text(ITEMS.replace("REAL", "REAL, size INTEGER"))
        replay.directives = TableDirectives()
        replay.catch_up()
        assert rows(replay, "rqlite.items")[-1] == {"id": 2, "name": "b", "price": 2.0, "size": 3}
        post(source, body([entry(5, insert("other", 2, id=2))]))
        assert "not in the schema file" in fails(replay).message


@contextmanager
def two_clusters(tmp_path: Path) -> Iterator[tuple[RqliteNode, RqliteNode, SourceReplay]]:
    """Two clusters, `one` and `two`, with a table each, and a pipeline that is level with both."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/cdc"
    with RqliteNode(url, service="one") as one, RqliteNode(url, service="two") as two:
        one.execute(ITEMS)
        two.execute(ITEMS)
        with SourceReplay(make_source(tmp_path, port, api={"one": one.url, "two": two.url}), LIMIT) as replay:
            replay.catch_up()
            yield one, two, replay


def test_a_cluster_that_does_not_answer_does_not_hold_up_the_others(tmp_path: Path) -> None:
    with two_clusters(tmp_path) as (one, two, replay):
        one.close()
        replay.directives = TableDirectives(resync={"one.items": 1})
        two.execute("INSERT INTO items VALUES (1, 'x', 1)")
        wait_until(lambda: replay.step() or (1,) in replay.tables["two.items"].rows)


def test_a_single_run_is_not_at_its_end_while_a_cluster_does_not_answer(tmp_path: Path) -> None:
    with two_clusters(tmp_path) as (one, _, replay):
        assert replay.offset is not None
        target = replay.follower.target()
        one.close()
        replay.directives = TableDirectives(resync={"one.items": 1})
        wait_until(lambda: not replay.step())
        with pytest.raises(UnavailableError):
            replay.follower.done(replay.offset, target)


def test_an_inferred_table_grows_with_its_events(tmp_path: Path) -> None:
    source = make_source(tmp_path, free_port())
    with SourceReplay(source, LIMIT) as replay:
        _ = replay.follower
        post(source, body([entry(3, insert("t", 1, a=1)), entry(4, insert("t", 2, a=2.5, b="x"))], service="svc"))
        wait_until(lambda: replay.step() or len(replay.tables) == 1)
        replay.catch_up()
        assert rows(replay, "svc.t") == [{"rowid": 1, "a": 1.0, "b": None}, {"rowid": 2, "a": 2.5, "b": "x"}]
        post(source, body([entry(5, insert("u", 1, a=1))], service="other"))
        wait_until(lambda: replay.step() or len(replay.tables) == 2)
        assert rows(replay, "other.u") == []
        replay.catch_up()
        assert rows(replay, "other.u") == [{"rowid": 1, "a": 1}]


def insert(table: str, rowid: int | None, **row: Any) -> dict[str, Any]:
    return {"op": "INSERT", "table": table, **({"new_row_id": rowid} if rowid else {}), "after": row}


def test_a_table_without_rowids_needs_to_be_known(tmp_path: Path) -> None:
    source = make_source(tmp_path, free_port())
    with SourceReplay(source, LIMIT) as replay:
        _ = replay.follower
        post(source, body([entry(3, insert("t", None, a=1))]))
        error = fails(replay)
        assert error.table == "rqlite.t"
        assert "WITHOUT ROWID" in error.message
        assert "source.api" in (error.fix or "")


def test_a_change_without_its_row_stops_its_table_where_there_is_no_api(tmp_path: Path) -> None:
    source = make_source(tmp_path, free_port())
    lacking = {"op": "UPDATE", "table": "t", "new_row_id": 1, "old_row_id": 1, "error": "mismatched column names"}
    with SourceReplay(source, LIMIT) as replay:
        _ = replay.follower
        post(source, body([entry(3, insert("t", 1, a=1))]))
        wait_until(lambda: replay.step() or len(replay.tables) == 1)
        replay.catch_up()
        post(source, body([entry(4, lacking)]))
        error = fails(replay)
        assert error.position == f"{4:016x}{0:016x}"
        assert b"mismatched" in (error.raw or b"")
        replay.planned = None
        replay.directives = TableDirectives(skips={"rqlite.t": [error.position]})
        replay.catch_up()
        assert rows(replay, "rqlite.t") == [{"rowid": 1, "a": 1}]


def test_rows_that_were_not_sent_are_fetched_from_the_api(tmp_path: Path) -> None:
    with node_and_replay(tmp_path, ITEMS, "INSERT INTO items VALUES (0, 'zero', 1), (1, 'one', 1)") as (node, replay):
        node.execute("ALTER TABLE items ADD COLUMN note TEXT DEFAULT 'none'")
        node.execute("UPDATE items SET note = 'seen', id = -id")
        found = changes(replay)
        assert [one["before"] for one in found] == [None] * 3
        replay.catch_up()
        assert rows(replay, "svc.items") == [
            {"id": -1, "name": "one", "price": 1.0, "note": "seen"},
            {"id": 0, "name": "zero", "price": 1.0, "note": "seen"},
        ]
        node.execute("ALTER TABLE items ADD COLUMN more TEXT")
        node.execute("UPDATE items SET more = 'x' WHERE id = -1", "DELETE FROM items WHERE id = -1", transaction=True)
        replay.catch_up()
        assert [row["id"] for row in rows(replay, "svc.items")] == [0]


def test_row_ids_alone_are_enough_with_an_api(tmp_path: Path) -> None:
    with node_and_replay(tmp_path, ITEMS, node={"row_ids_only": True}) as (node, replay):
        node.execute("INSERT INTO items VALUES (1, 'one', 2), (2, 'two', 3), (3, 'three', 4)")
        node.execute("UPDATE items SET id = 20 WHERE id = 2", "DELETE FROM items WHERE id = 1", transaction=True)
        replay.catch_up()
        assert rows(replay, "svc.items") == [
            {"id": 3, "name": "three", "price": 4.0},
            {"id": 20, "name": "two", "price": 3.0},
        ]


@pytest.mark.parametrize("change", ["UPDATE words SET w = 'b'", "DELETE FROM words WHERE w = 'a'"])
def test_a_table_whose_key_is_not_the_rowid_is_copied_again_after_a_change_without_its_row(
    tmp_path: Path, change: str
) -> None:
    with node_and_replay(tmp_path, WORDS, "INSERT INTO words VALUES ('a', 1), ('z', 2)") as (node, replay):
        node.execute("ALTER TABLE words ADD COLUMN note TEXT")
        node.execute(change)
        node.execute("INSERT INTO words VALUES ('c', 3, 'new')")
        replay.catch_up()
        found = node.rows("SELECT w, n, note FROM words ORDER BY w")
        assert rows(replay, "svc.words") == [{"w": w, "n": n, "note": note} for w, n, note in found]


def test_a_table_that_may_not_change_is_flagged_at_a_change_without_its_row(tmp_path: Path) -> None:
    port = free_port()
    tables = TableOptions.model_validate({"defaults": {"schema_changes": "stop"}})
    with RqliteNode(f"http://127.0.0.1:{port}/cdc") as node:
        node.execute(WORDS)
        node.execute("INSERT INTO words VALUES ('a', 1)")
        source = with_tables(make_source(tmp_path, port, api=node.url), tables)
        with SourceReplay(source, LIMIT) as replay:
            replay.catch_up()
            node.execute("ALTER TABLE words ADD COLUMN note TEXT")
            node.execute("UPDATE words SET w = 'b'")
            assert "words" in str(fails(replay))
            assert len(rows(replay, "rqlite.words")) == 1


def test_columns_follow_what_the_events_show(tmp_path: Path) -> None:
    with node_and_replay(tmp_path, ITEMS, "INSERT INTO items VALUES (1, 'one', 1)") as (node, replay):
        node.execute("ALTER TABLE items RENAME COLUMN name TO title")
        node.execute("ALTER TABLE items DROP COLUMN price")
        node.execute("ALTER TABLE items ADD COLUMN size INTEGER DEFAULT 3")
        node.execute("INSERT INTO items VALUES (2, 'two', 5)")
        node.execute("INSERT INTO items VALUES (3, 'three', 6)")
        replay.catch_up()
        assert rows(replay, "svc.items") == [
            {"id": 1, "title": "one", "size": 3},
            {"id": 2, "title": "two", "size": 5},
            {"id": 3, "title": "three", "size": 6},
        ]


def test_a_policy_may_stop_at_a_schema_change(tmp_path: Path) -> None:
    port = free_port()
    tables = TableOptions.model_validate({"defaults": {"schema_changes": "stop"}})
    with RqliteNode(f"http://127.0.0.1:{port}/cdc") as node:
        node.execute(ITEMS)
        source = with_tables(make_source(tmp_path, port, api=node.url), tables)
        with SourceReplay(source, LIMIT) as replay:
            replay.catch_up()
            node.execute("ALTER TABLE items ADD COLUMN more TEXT")
            node.execute("INSERT INTO items VALUES (1, 'one', 1, 'x')")
            assert isinstance(fails(replay), SchemaChangedError)


def test_a_table_recreated_with_other_types_is_copied_again(tmp_path: Path) -> None:
    with node_and_replay(tmp_path, ITEMS, "INSERT INTO items VALUES (1, 'one', 1)") as (node, replay):
        node.execute("DROP TABLE items", "CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT, price TEXT)")
        node.execute("INSERT INTO items VALUES (2, 'two', '2 EUR')")
        wait_until(lambda: replay.step() is False and replay.tables["svc.items"].rows.keys() == {(2,)})
        assert rows(replay, "svc.items") == [{"id": 2, "name": "two", "price": "2 EUR"}]


def test_a_rebuilt_cluster_stops_its_own_tables_and_no_others(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/cdc"
    with RqliteNode(url, service="one") as one, RqliteNode(url, service="two") as two:
        for node in (one, two):
            node.execute(ITEMS)
            for number in range(20):
                node.execute(["INSERT INTO items VALUES (?, 'x', 1)", number])
        source = make_source(tmp_path, port, api={"one": one.url, "two": two.url})
        with SourceReplay(source, LIMIT) as replay:
            replay.catch_up()
            one.rebuild()
            one.execute(ITEMS)
            one.execute("INSERT INTO items VALUES (500, 'another', 1)")
            two.execute("INSERT INTO items VALUES (600, 'more', 1)")
            failed: list[TableError] = []

            def should_stop() -> bool:
                try:
                    replay.step()
                except TableError as error:
                    failed.append(error)
                return bool(failed)

            wait_until(should_stop)
            assert failed[0].table == "one.items"
            replay.planned = None
            replay.directives = TableDirectives(stopped={"one.items": None})
            wait_until(lambda: replay.step() or (600,) in replay.tables["two.items"].rows)
            assert source.status().error is not None
            # A single run ends, though its goal is past the end of the stopped cluster's journal.
            goal = replay.follower.target()
            goal["services"]["one"]["log"] = str(Position(2**40, 0))
            wait_until(lambda: not replay.step() and replay.follower.done(replay.offset or {}, goal))


def test_events_arrive_once_after_a_failover(tmp_path: Path) -> None:
    with node_and_replay(tmp_path, ITEMS) as (node, replay):
        node.execute("INSERT INTO items VALUES (-1, 'first', 1)")
        replay.catch_up()
        seen: list[tuple[int, int]] = []
        for number in range(30):
            node.execute(
                ["INSERT INTO items VALUES (?, 'x', 1)", number], ["UPDATE items SET name = 'y' WHERE id = ?", number]
            )
            if number % 7 == 0:
                node.settle()
                node.fail_over(back=9)
        node.settle()
        while len(seen) < 60:
            seen += [(one["commit"], one["ordinal"]) for one in changes(replay) if one["op"] != Op.READ]
            replay.write()
            replay.commit()
        assert len(set(seen)) == len(seen) == 60


def test_a_paused_table_goes_on_where_it_was(tmp_path: Path) -> None:
    with node_and_replay(tmp_path, ITEMS, WORDS) as (node, replay):
        replay.directives = TableDirectives(paused=["svc.items"])
        node.execute("INSERT INTO items VALUES (1, 'one', 1)", "INSERT INTO words VALUES ('w', 1)", transaction=True)
        replay.catch_up()
        assert (rows(replay, "svc.items"), len(rows(replay, "svc.words"))) == ([], 1)
        replay.directives = TableDirectives()
        replay.catch_up()
        assert len(rows(replay, "svc.items")) == 1


def test_the_source_stands_alone_with_a_cursor_of_its_own(tmp_path: Path) -> None:
    port = free_port()
    with RqliteNode(f"http://127.0.0.1:{port}/cdc", service="svc") as node:
        node.execute(ITEMS)
        source = make_source(tmp_path, port, api=node.url).for_reader("other", "svc.items")
        follower = follow_alone(source)
        try:
            start = follower.start()
            end = follower.latest(start, LIMIT, TableDirectives())
            assert [one.upstream_id for one in source.progress(end)] == ["svc.items"]
        finally:
            follower.stop()
        again = follow_alone(source)
        try:
            assert again.plan(start, end)[0].copies is not None
        finally:
            again.stop()
        source.reset()
        assert not source.journal.exists()


def test_changes_of_tables_that_are_not_selected_do_not_fill_the_journal(tmp_path: Path) -> None:
    port = free_port()
    with RqliteNode(f"http://127.0.0.1:{port}/cdc", service="svc") as node:
        node.execute(ITEMS, "CREATE TABLE noise (v TEXT)")
        source = make_source(tmp_path, port, api=node.url, max_bytes=1_000_000)
        with SourceReplay(with_tables(source, TableOptions(include=["svc.items"])), LIMIT) as replay:
            replay.catch_up()
            for _ in range(40):
                node.execute(["INSERT INTO noise VALUES (?)", "x" * 100_000])
            wait_until(lambda: replay.step() or node.pending == 0)


class Silent(RqliteNode):
    """A node that does not report its service, like one that is starting."""

    def status(self) -> dict[str, Any]:
        return {}


def test_a_node_that_does_not_report_its_service_gets_the_service_that_posted(tmp_path: Path) -> None:
    with Silent("http://127.0.0.1:1/cdc", service="svc") as node:
        source = make_source(tmp_path, free_port(), api=node.url)
        assert source.services() == ["rqlite"]
        with source.receive():
            post(source, body([entry(4)], service="svc"))
        assert source.services() == ["svc"]
        assert source.api_of("svc") is not None


def test_a_batch_of_a_cluster_that_has_gone_silent_is_planned_again(tmp_path: Path) -> None:
    with Silent("http://127.0.0.1:1/cdc") as node:
        source = make_source(tmp_path, free_port(), api=node.url)
        source.prepare()
        follower = source.follow(SchemaFile(), is_receiving=True)
        try:
            offset = {"services": {"svc": SqliteOffset(START).to_json()}}
            assert follower.plan({"services": {}}, offset) == []
            assert follower.done(offset, offset) is True
        finally:
            follower.stop()


def test_a_killed_receiver_is_not_reported_as_receiving(tmp_path: Path) -> None:
    source = make_source(tmp_path, free_port())
    with source.receive():
        post(source)
        wait_until(lambda: source.status().gear == "receiving")
        os.kill(read_status(source.journal, STATUS)["pid"], signal.SIGKILL)
        wait_until(lambda: source.status().gear == "waiting", 5)


def test_a_reset_keeps_receivers_away_until_everything_is_gone(tmp_path: Path) -> None:
    source = make_source(tmp_path, free_port())
    journal = source.journal
    with source.receive():
        post(source, body([entry(4)], service="svc"))
        with pytest.raises(OwnedError, match="receives into"):
            source.reset()
    with receiving_alone(journal), pytest.raises(OwnedError, match="receives into"):
        source.reset()
    source.reset()
    assert not journal.exists()
    source.reset()
