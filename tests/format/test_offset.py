"""Offsets that Spark's checkpoints hold: read as they were meant, and written again to the byte."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tailrace.config.pipeline import from_dict
from tailrace.config.registry import open_source
from tailrace.model.change import Position
from tailrace.source.follower import TableProgress
from tailrace.source.poll.offset import PollOffset
from tailrace.source.poll.version_column import VersionKind
from tailrace.source.postgres.offset import PostgresOffset
from tailrace.source.slatedb.offset import SlateDbOffset
from tailrace.source.source import Source
from tailrace.source.sqlite.offset import SqliteOffset
from tests.support.format_fixture import FOLDER

SOURCES: dict[str, dict[str, Any]] = {
    "postgres": {"dsn": "postgresql://localhost/shop"},
    "sqlite": {"path": "app.db"},
    "rqlite": {"listen": "127.0.0.1:4001"},
    "slatedb": {"path": "db1", "store": {"type": "local", "path": "store"}},
    "poll": {"dsn": "sqlite:///app.db"},
}
LATE = 2**63 - 1
"""The ordinal after every change of a commit."""


def stored(source: str) -> str:
    return (FOLDER / f"offset-{source}.json").read_text()


def open_by_type(source: str) -> Source:
    options = {"type": source, **SOURCES[source]}
    return open_source(from_dict({"name": "shop", "source": options, "destination": {"type": "delta", "path": "lake"}}))


def at(table: str, phase: Any, commit: int, ordinal: int, **more: Any) -> TableProgress:
    return TableProgress(table, phase, Position(commit, ordinal), **more)


@pytest.mark.parametrize("offset", [PostgresOffset, SqliteOffset, SlateDbOffset, PollOffset])
def test_an_offset_is_rewritten_byte_for_byte(offset: Any) -> None:
    source = {PostgresOffset: "postgres", SqliteOffset: "sqlite", SlateDbOffset: "slatedb", PollOffset: "poll"}[offset]
    assert json.dumps(offset.from_json(json.loads(stored(source))).to_json()) == stored(source)


def test_the_offset_of_each_rqlite_service_is_rewritten_byte_for_byte() -> None:
    raw = json.loads(stored("rqlite"))["services"]
    own = {key: raw["shop"].pop(key) for key in ("failure", "failures")}
    assert own["failures"] == 2
    assert own["failure"]["kind"] == "LostError"
    for service in raw.values():
        assert json.dumps(SqliteOffset.from_json(service).to_json()) == json.dumps(service)


def test_a_postgres_offset_is_read_with_the_values_it_was_written_with() -> None:
    assert open_by_type("postgres").progress(json.loads(stored("postgres"))) == [
        at("16401", "init", 500, 1, request=4),
        at("16402", "copy", 399, LATE, chunks_done=2, chunks_total=5, request=3, copy=400),
        at("16403", "catchup", 50, 1, chunks_done=1, chunks_total=1, copy=400, catching_up=True),
        at("16404", "ready", 500, 1, chunks_done=1, copy=400),
        at("16405", "stopped", 50, 1, chunks_done=1, chunks_total=2, copy=400),
        at("16406", "stopped", 500, 1),
    ]
    offset = PostgresOffset.from_json(json.loads(stored("postgres")))
    assert (offset.low_water, offset.high_water) == (Position(50, 1), Position(500, 1))
    assert offset.tables[16402].skips == (Position(90, 1), Position(91, 0))


def test_an_offset_of_a_tape_is_read_with_the_values_it_was_written_with() -> None:
    expected = [
        at("a_init", "init", 60, 1, request=4, copy=2),
        at("b_copy", "copy", 40, 1, chunks_done=2, chunks_total=3, request=3, copy=1),
        at("c_catchup", "catchup", 50, 1, chunks_done=2, chunks_total=2, copy=1, catching_up=True),
        at("d_ready", "ready", 60, 1, copy=1),
        at("e_stopped", "stopped", 50, 1, chunks_done=1, chunks_total=2, copy=1),
        at("f_lost", "stopped", 60, 1, copy=1),
    ]
    assert open_by_type("sqlite").progress(json.loads(stored("sqlite"))) == expected
    found = open_by_type("rqlite").progress(json.loads(stored("rqlite")))
    assert [(each.phase, each.position, each.copy) for each in found] == [
        (each.phase, each.position, each.copy) for each in expected
    ]
    assert [each.upstream_id for each in found] == [f"rqlite.{each.upstream_id}" for each in expected]


def test_a_slatedb_offset_is_read_with_the_values_it_was_written_with() -> None:
    assert open_by_type("slatedb").progress(json.loads(stored("slatedb"))) == [
        at("slatedb.a_init", "init", 60, LATE, request=4),
        at("slatedb.b_copy", "copy", 40, LATE, chunks_done=1, chunks_total=3, request=3, copy=1),
        at("slatedb.c_catchup", "catchup", 50, LATE, chunks_done=1, chunks_total=1, copy=2, catching_up=True),
        at("slatedb.d_ready", "ready", 60, LATE, chunks_done=1, chunks_total=1, copy=3),
        at("slatedb.e_stopped", "stopped", 50, LATE, chunks_done=1, chunks_total=1, copy=4),
        at("slatedb.f_lost", "stopped", 60, LATE),
    ]


def test_an_offset_of_polls_is_read_with_the_values_it_was_written_with() -> None:
    found = open_by_type("poll").progress(json.loads(stored("poll")))
    assert [(each.upstream_id, each.phase, each.chunks_done, each.chunks_total) for each in found] == [
        ("a_init", "init", 0, 0),
        ("b_copy", "copy", 2, 3),
        ("c_poll", "ready", 0, 0),
        ("d_diff", "ready", 0, 0),
        ("e_refuse", "ready", 0, 0),
        ("f_stopped", "stopped", 0, 0),
        ("g_lost", "stopped", 0, 0),
    ]
    offset = PollOffset.from_json(json.loads(stored("poll")))
    assert offset.damaged == ()
    undone = offset.tables["d_diff"].stop(5)
    assert (undone.step, undone.base, undone.resume().phase) == (5, 4, "ready")
    assert offset.tables["b_copy"].stop(0).next == 1


def test_the_kinds_of_version_columns_keep_their_names() -> None:
    """An offset holds the kind of its version column by name: with another name every table would be copied again."""
    assert [kind.name for kind in VersionKind] == ["INSTANT", "LOCAL", "DAY", "NUMBER", "TEXT"]
