"""Changes that no node sent: what a leader had got with a snapshot is found and copied again, whenever it happened."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tailrace.source.follower import Limit, TableDirectives
from tailrace.source.rqlite.option import RqliteCopyOptions
from tailrace.testing.replay import SourceReplay
from tests.support.rqlite_following import LIMIT, free_port, make_source, node_and_replay, rows
from tests.support.rqlite_node import RqliteNode

ITEMS = "CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT, price REAL)"
WORDS = "CREATE TABLE words (w TEXT NOT NULL PRIMARY KEY, n INTEGER)"


def test_changes_that_the_new_leader_got_with_a_snapshot_are_repaired(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with node_and_replay(tmp_path, WORDS, ITEMS, "INSERT INTO words VALUES ('a', 1), ('b', 2)") as (node, replay):
        node.execute("INSERT INTO words VALUES ('c', 3)")
        replay.catch_up()
        node.pause()
        node.execute("DELETE FROM words WHERE w = 'a'")
        node.execute("UPDATE words SET n = 20 WHERE w = 'b'")
        node.execute("INSERT INTO items VALUES (1, 'one', 1.5)")
        node.fail_over_to_restored()
        node.resume()
        node.execute("INSERT INTO words VALUES ('d', 4)")
        replay.catch_up()
        assert rows(replay, "svc.words") == [{"w": "b", "n": 20}, {"w": "c", "n": 3}, {"w": "d", "n": 4}]
        assert [one["id"] for one in rows(replay, "svc.items")] == [1]
        assert "every table is copied again" in caplog.text


def test_a_gap_after_a_failover_costs_nothing_where_the_node_took_over_no_snapshot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with node_and_replay(tmp_path, WORDS, "INSERT INTO words VALUES ('a', 1)") as (node, replay):
        node.execute("INSERT INTO words VALUES ('b', 2)")
        replay.catch_up()
        for _ in range(5):
            node.execute("CREATE TABLE IF NOT EXISTS words (w)")  # uses an index, and changes no row
        node.fail_over()
        node.execute("INSERT INTO words VALUES ('c', 3)")
        replay.catch_up()
        assert "copied again" not in caplog.text
        assert len(rows(replay, "svc.words")) == 3


def test_changes_that_a_leader_got_with_a_snapshot_between_those_it_sends_are_repaired(tmp_path: Path) -> None:
    with node_and_replay(tmp_path, WORDS, "INSERT INTO words VALUES ('a', 1)") as (node, replay):
        node.execute("INSERT INTO words VALUES ('b', 2)")
        replay.catch_up()
        node.pause()
        node.execute("DELETE FROM words WHERE w = 'a'")
        node.execute("UPDATE words SET n = 20 WHERE w = 'b'")
        node.take_over_snapshot()  # another node led meanwhile, and sent nothing
        node.resume()
        node.execute("INSERT INTO words VALUES ('c', 3)")
        replay.catch_up()
        assert rows(replay, "svc.words") == [{"w": "b", "n": 20}, {"w": "c", "n": 3}]


def test_a_snapshot_is_not_forgotten_when_its_node_was_started_again(tmp_path: Path) -> None:
    with node_and_replay(tmp_path, WORDS, "INSERT INTO words VALUES ('a', 1), ('b', 2)") as (node, replay):
        node.execute("INSERT INTO words VALUES ('c', 3)")
        replay.catch_up()
        node.pause()
        node.execute("DELETE FROM words WHERE w = 'a'")
        node.execute("UPDATE words SET n = 20 WHERE w = 'b'")
        node.fail_over_to_restored()
        node.restart()
        node.resume()
        node.execute("INSERT INTO words VALUES ('d', 4)")
        replay.catch_up()
        assert [row["w"] for row in rows(replay, "svc.words")] == ["b", "c", "d"]


def test_the_first_events_of_a_journal_may_follow_a_snapshot_too(tmp_path: Path) -> None:
    with node_and_replay(tmp_path, WORDS, node={"max_batch_size": 1}) as (node, replay):
        node.pause()
        node.execute("INSERT INTO words VALUES ('a', 1)")
        node.fail_over_to_restored()
        replay.crash()
        node.resume()
        node.execute("INSERT INTO words VALUES ('b', 2)")
        replay.catch_up()
        assert [row["w"] for row in rows(replay, "svc.words")] == ["a", "b"]


def test_a_gap_during_a_copy_begins_it_again_and_one_of_a_paused_table_is_kept_for_later(tmp_path: Path) -> None:
    port = free_port()
    with RqliteNode(f"http://127.0.0.1:{port}/cdc", service="svc") as node:
        node.execute(WORDS)
        node.execute(ITEMS)
        node.execute("INSERT INTO items VALUES (1, 'one', 1), (2, 'two', 2), (3, 'three', 3)")
        source = make_source(tmp_path, port, api=node.url, copying=RqliteCopyOptions(chunk_rows=1))
        with SourceReplay(source, Limit(1, 1_000_000)) as replay:
            replay.catch_up()
            node.execute("INSERT INTO words VALUES ('a', 1)")
            replay.catch_up()
            ids = {table.table.name: table.upstream_id for table in source.tables()}
            replay.directives = TableDirectives(resync={ids["items"]: 1}, paused={ids["words"]})
            assert replay.step()  # the first of three chunks
            node.pause()
            node.execute("DELETE FROM items WHERE id = 1")
            node.execute("UPDATE words SET n = 2")
            node.fail_over_to_restored()
            node.resume()
            node.execute("INSERT INTO items VALUES (4, 'four', 4)")
            node.settle()
            replay.catch_up()
            assert [row["id"] for row in rows(replay, "svc.items")] == [2, 3, 4]
            assert rows(replay, "svc.words") == [{"w": "a", "n": 1}]
            replay.crash()
            replay.directives = TableDirectives(resync={ids["items"]: 1})
            replay.catch_up()
            assert rows(replay, "svc.words") == [{"w": "a", "n": 2}]


def test_changes_that_a_node_dropped_while_it_caught_up_are_repaired_when_it_leads(tmp_path: Path) -> None:
    with node_and_replay(tmp_path, WORDS, "INSERT INTO words VALUES ('a', 1), ('b', 2)") as (node, replay):
        node.execute("INSERT INTO words VALUES ('c', 3)")
        replay.catch_up()
        node.pause()
        node.execute("DELETE FROM words WHERE w = 'a'")
        node.execute("UPDATE words SET n = 20 WHERE w = 'b'")
        node.fail_over_to_overflowed()
        node.resume()
        node.execute("INSERT INTO words VALUES ('d', 4)")
        replay.catch_up()
        assert [row["w"] for row in rows(replay, "svc.words")] == ["b", "c", "d"]


def test_a_leader_that_once_took_over_a_snapshot_makes_no_copy_for_gaps_that_come_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.source.rqlite.missed_change.SKEW_MS", 0)
    port = free_port()
    with RqliteNode(f"http://127.0.0.1:{port}/cdc", service="svc") as node:
        node.restores, node.snapshot = 1, 1_000_000
        node.started = datetime.now(UTC) - timedelta(days=1)
        node.execute(WORDS)
        with SourceReplay(make_source(tmp_path, port, api=node.url), LIMIT) as replay:
            replay.catch_up()
            for number in range(3):
                for _ in range(5):
                    node.execute("CREATE TABLE IF NOT EXISTS words (w)")  # uses an index, and changes no row
                node.execute(["INSERT INTO words VALUES (?, 1)", str(number)])
                replay.catch_up()
            assert len(rows(replay, "svc.words")) == 3
    assert caplog.text.count("copied again") <= 1
