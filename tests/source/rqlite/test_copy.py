"""Copies through the API: chunks, storage classes, and tables that change meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tailrace.errors import StaleCopyError, UnavailableError, UnfitError
from tailrace.model.change import START, Op, Position
from tailrace.model.schema import TableSchema
from tailrace.source.rqlite import catalog
from tailrace.source.rqlite.api import Api
from tailrace.source.rqlite.copy import RqliteCopySplit, chunk_bounds, read_chunk
from tailrace.source.sqlite.catalog import describe
from tailrace.testing.replay import SourceReplay
from tests.support.rqlite_following import changes, node_and_replay, rows
from tests.support.rqlite_node import RqliteNode

NOWHERE = "http://127.0.0.1:1/cdc"


def table_of(sql: str) -> TableSchema:
    return catalog.begin(None, describe(sql), "svc", START, rowids=False)


def read(node: RqliteNode, split: RqliteCopySplit) -> list[dict[str, Any]]:
    return [row for part in read_chunk(Api(node.url), split) for row in part.batch.to_pylist()]


def test_chunks_hold_every_row_once() -> None:
    sql = "CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT)"
    with RqliteNode(NOWHERE) as node:
        node.execute(sql)
        for number in range(95):
            node.execute(["INSERT INTO t VALUES (?, 'v')", number * 3 - 50])
        bounds = chunk_bounds(Api(node.url), describe(sql), 10)
        assert len(bounds) == 10
        found = [
            row["row"]["id"]
            for low, high in zip([None, *bounds], bounds, strict=False)
            for row in read(node, RqliteCopySplit(copies=table_of(sql), low=low, high=high))
        ]
        assert found == [id_ for (id_,) in node.rows("SELECT id FROM t ORDER BY id")]


def test_an_empty_table_has_one_chunk() -> None:
    sql = "CREATE TABLE t (id INTEGER PRIMARY KEY)"
    with RqliteNode(NOWHERE) as node:
        node.execute(sql)
        assert chunk_bounds(Api(node.url), describe(sql), 10) == (0,)
        assert read(node, RqliteCopySplit(copies=table_of(sql))) == []


class Overloaded(RqliteNode):
    """A node that gives up on a query that takes it too long."""

    def query(self, sql: str, values: Sequence[Any]) -> dict[str, Any]:
        return {"error": "interrupted"} if "row_number" in sql else super().query(sql, values)


def test_a_table_whose_chunks_cannot_be_found_is_not_taken_for_an_empty_one() -> None:
    sql = "CREATE TABLE t (id INTEGER PRIMARY KEY)"
    with Overloaded(NOWHERE) as node:
        node.execute(sql, "INSERT INTO t VALUES (1), (2)")
        with pytest.raises(UnavailableError, match="interrupted"):
            chunk_bounds(Api(node.url), describe(sql), 10)


def test_a_table_without_rowids_is_copied_by_its_key() -> None:
    sql = "CREATE TABLE t (a BLOB, b INTEGER, v TEXT, PRIMARY KEY (b, a)) WITHOUT ROWID"
    with RqliteNode(NOWHERE) as node:
        node.execute(sql)
        for number in range(25):
            node.execute(["INSERT INTO t VALUES (?, ?, 'v')", [number, 255 - number], number // 4])
        found = read(node, RqliteCopySplit(copies=table_of(sql), rows=4, by_key=True))
        assert [(row["row"]["b"], row["row"]["a"]) for row in found] == node.rows("SELECT b, a FROM t ORDER BY b, a")


def test_values_are_copied_as_they_are_stored() -> None:
    sql = "CREATE TABLE t (id INTEGER PRIMARY KEY, d DATETIME, k BOOLEAN, b BLOB, s TEXT, r REAL, i INTEGER)"
    with RqliteNode(NOWHERE) as node:
        node.execute(
            sql,
            "INSERT INTO t VALUES (1, '2024-01-01 00:00:00', 7, x'00FF', 'inf', 2.0, 9223372036854775807)",
            "INSERT INTO t VALUES (2, 1700000000, 'yes', 'AP8=', x'AB', -9e999, 1.5)",
        )
        one, two = read(node, RqliteCopySplit(copies=table_of(sql), high=10, snapshot_position=Position(5, 1)))
        assert (one["op"], one["commit"], one["exact"]) == (Op.READ, 5, None)
        assert one["row"] == {
            "id": 1,
            "d": "2024-01-01 00:00:00",
            "k": 7,
            "b": b"\x00\xff",
            "s": "inf",
            "r": 2.0,
            "i": 2**63 - 1,
        }
        assert two["row"] == {"id": 2, "d": None, "k": None, "b": None, "s": None, "r": float("-inf"), "i": None}
        assert two["exact"] == ("""{"d": "1700000000", "k": "yes", "b": "AP8=", "s": "X'AB'", "i": "1.5"}""")


def test_a_table_that_lost_a_column_makes_its_copy_stale() -> None:
    sql = "CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT, w TEXT)"
    with RqliteNode(NOWHERE) as node:
        node.execute(sql, "INSERT INTO t VALUES (1, 'a', 'b')", "ALTER TABLE t ADD COLUMN x")
        assert read(node, RqliteCopySplit(copies=table_of(sql), high=10))[0]["row"] == {"id": 1, "v": "a", "w": "b"}
        node.execute("ALTER TABLE t RENAME COLUMN w TO other")
        with pytest.raises(StaleCopyError):
            read(node, RqliteCopySplit(copies=table_of(sql), high=10))


def test_a_null_in_a_key_is_refused() -> None:
    sql = "CREATE TABLE t (k TEXT PRIMARY KEY, v TEXT)"
    with RqliteNode(NOWHERE) as node:
        node.execute(sql, "INSERT INTO t VALUES (NULL, 'a')")
        with pytest.raises(UnfitError, match="key column k"):
            read(node, RqliteCopySplit(copies=table_of(sql), high=10))


def copied(replay: SourceReplay) -> list[int]:
    """The keys that the next batch copies."""
    return [row["row"]["id"] for row in changes(replay) if row["op"] == Op.READ]


def test_a_copy_is_resumed_at_its_next_chunk(tmp_path: Path) -> None:
    sql = "CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT)"
    with node_and_replay(tmp_path, sql, copying={"chunk_rows": 5}) as (node, replay):
        for number in range(20):
            node.execute(["INSERT INTO t VALUES (?, 'v')", number])
        replay.catch_up()
        node.execute("CREATE TABLE late (id INTEGER PRIMARY KEY, v TEXT)")
        for number in range(20):
            node.execute(["INSERT INTO late VALUES (?, 'v')", number])
        replay.limit = type(replay.limit)(5, 10_000_000)
        while not (first := copied(replay)):
            replay.write()
            replay.commit()
        replay.write()
        replay.commit()
        replay.crash()
        node.execute("DELETE FROM late WHERE id IN (1, 19)", "UPDATE late SET v = 'w' WHERE id = 0")
        second = copied(replay)
        assert first == [0, 1, 2, 3, 4]
        assert second == [5, 6, 7, 8, 9]
        replay.catch_up()
        assert [row["id"] for row in rows(replay, "svc.late")] == [0, *range(2, 19)]
        assert rows(replay, "svc.late")[0]["v"] == "w"
