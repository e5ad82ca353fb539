"""What the server says of a pipeline in words: health, the way of a change, events, fixes, columns, series."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from tailrace.advice import Retry
from tailrace.dashboard.event import SHOWN, events_of
from tailrace.dashboard.fix import commands_in, fix_of
from tailrace.dashboard.health import Health, duration, size
from tailrace.dashboard.row import RowLog, group_of, row_of
from tailrace.dashboard.series import POINTS, series_of
from tailrace.dashboard.slot import slot_to_dict
from tailrace.dashboard.table import compare
from tailrace.dashboard.way import way_of
from tailrace.errors import UnavailableError
from tailrace.model.change import end_of
from tailrace.model.delivery_status import DeliveryStatus
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.state import BatchRecord, OperatorRequest, Owner, RunRecord, SourceStatus, TableState
from tailrace.state.activity import Sample
from tailrace.state.record import ChangeCounts
from tailrace.state.state_machine import WAY
from tailrace.state.status import PipelineStatus, SlotForecast, TableStatus

NOW = datetime(2026, 5, 4, 12, 0, 0, tzinfo=UTC)
RUNNER = Owner(48213, "db1", NOW)
FILE = Path("shop.yaml")


def table(name: str, state: TableState = TableState.READY, *, lag: float | None = 0.0) -> TableStatus:
    return TableStatus(name, name, state, {state: NOW}, lag_seconds=lag)


def status(*tables: TableStatus, runner: Owner | None = RUNNER) -> PipelineStatus:
    return PipelineStatus("shop", NOW, runner, tables)


def errored(name: str, retry: Retry = "manual") -> TableStatus:
    return replace(table(name, TableState.ERRORED, lag=None), reason="no key", fix="do it", retry=retry)


def slot(full_in: float | None, state: str = "extended") -> SlotForecast:
    return SlotForecast(state, 3_000_000_000, 1_000_000_000, 100.0, full_in)


GOOD = status(table("public.a"), table("public.b"))


@pytest.mark.parametrize(
    ("shown", "level", "sentence"),
    [
        (GOOD, "healthy", "All 2 tables follow"),
        (status(table("public.a")), "healthy", "The table follows"),
        (status(), "healthy", "The pipeline has begun; no table is known yet"),
        (status(table("a"), table("b", TableState.DATA_SYNC)), "healthy", "1 of 2 tables follow, 1 are on their way"),
        (status(table("a"), replace(table("b"), paused_at=NOW)), "healthy", "1 of 2 tables follow, 1 is paused"),
        (status(table("a"), errored("b")), "failing", "1 of 2 tables needs you: b"),
        (status(errored("a"), errored("b"), table("c")), "failing", "2 of 3 tables need you"),
        (status(table("a"), errored("b", "timed")), "degraded", "1 of 2 tables is tried again: b"),
        (status(errored("a", "timed"), errored("b")), "failing", "1 of 2 tables needs you: b"),
        (replace(GOOD, runner=None), "stopped", "shop does not run"),
        (replace(GOOD, runner=None, last_run=RunRecord(NOW)), "failing", "The process that ran shop has died"),
        (replace(GOOD, runner=None, last_run=RunRecord(NOW, NOW)), "stopped", "shop does not run"),
        (
            replace(GOOD, runner=None, last_run=RunRecord(NOW, NOW, "LostError", "the slot is gone")),
            "failing",
            "shop stopped: the slot is gone",
        ),
        (status(errored("a"), runner=None), "failing", "shop does not run, and a is in error"),
        (replace(GOOD, source=SourceStatus("waiting", error="no route")), "degraded", "The source: no route"),
        (
            replace(GOOD, source=SourceStatus("full", error="the journal is full")),
            "failing",
            "The source: the journal is full",
        ),
        (replace(GOOD, delivery=DeliveryStatus(error="HTTP 500")), "degraded", "Nothing is delivered: HTTP 500"),
        (replace(GOOD, slot=slot(None, "lost")), "failing", "The server has given up the slot: changes are lost"),
        (replace(GOOD, slot=slot(1800.0)), "failing", "The slot is full in 30 min"),
        (replace(GOOD, slot=slot(13_200.0)), "degraded", "The slot is full in 3 h 40 min"),
        (replace(GOOD, slot=slot(200_000.0)), "healthy", "All 2 tables follow"),
        (
            replace(GOOD, slot=slot(None, "unreserved")),
            "failing",
            "The server may give up the slot at its next checkpoint",
        ),
    ],
)
def test_health_is_the_most_serious_of_what_there_is_to_say(shown: PipelineStatus, level: str, sentence: str) -> None:
    health = Health.of(shown)
    assert (health.level, health.sentence) == (level, sentence)


def test_health_says_how_large_the_lag_is_and_where_to_look() -> None:
    health = Health.of(status(table("a", lag=72.0), table("b", lag=3.0), errored("c")))
    assert health.detail == "The others go on. The last applied change is 1 min 12 s old."
    assert (health.table, health.fix) == ("c", "do it")
    assert Health.of(GOOD).detail == "They are up to date."


def test_a_slot_that_fills_up_comes_with_what_helps() -> None:
    filling = replace(GOOD, slot=slot(13_200.0))
    shown = slot_to_dict(filling, "tailrace_shop", FILE)
    assert shown is not None
    assert (shown["limit_bytes"], shown["full_at"]) == (4_000_000_000, "2026-05-04T15:40:00+00:00")
    assert shown["fix"]["commands"] == [
        "ALTER SYSTEM SET max_slot_wal_keep_size = '8GB';",
        "SELECT pg_reload_conf();",
    ]
    assert Health.of(filling).fix == shown["fix"]["text"]
    lost = slot_to_dict(replace(GOOD, slot=slot(None, "lost")), None, FILE)
    assert lost is not None
    assert lost["fix"]["commands"] == ["tailrace reset shop.yaml", "tailrace run shop.yaml"]
    quiet = slot_to_dict(replace(GOOD, slot=slot(200_000.0)), None, FILE)
    assert quiet is not None
    assert quiet["fix"] is None
    assert slot_to_dict(GOOD, None, FILE) is None


def test_a_state_that_cannot_be_read_is_unknown_with_the_fix() -> None:
    health = Health.of_error(UnavailableError("it is locked", fix="wait"))
    assert (health.level, health.sentence, health.fix) == ("unknown", "it is locked", "wait")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (1.24, "1.2 s"), (59.6, "1 min"), (13_200, "3 h 40 min"), (90_061, "1 d 1 h"), (86_400, "1 d")],
)
def test_durations_have_their_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (2_900_000_000, "2.9 GB"), (84_000_000, "84.0 MB"), (5e15, "5000.0 TB")],
)
def test_sizes_are_short(count: float, text: str) -> None:
    assert size(count) == text


# The way of a change.


def batches(seconds: float, count: int = 40) -> list[BatchRecord]:
    return [BatchRecord(count - i, {}, seconds=seconds, at=NOW - timedelta(seconds=i * seconds)) for i in range(count)]


def slow(shown: PipelineStatus, done: list[BatchRecord]) -> dict[str, str]:
    return {stage.stage: stage.why for stage in way_of(shown, done, "postgres", "delta") if stage.why}


def busy(phases: Mapping[str, float], lag: float = 0.0) -> PipelineStatus:
    return replace(status(table("a", lag=lag)), phases=phases)


def test_a_pipeline_that_keeps_up_has_no_slow_stage() -> None:
    assert slow(busy({"write": 0.2, "read": 0.1}), batches(0.3, 5)) == {}


def test_when_batches_take_all_the_time_the_longest_phase_is_the_slow_stage() -> None:
    at_the_destination = slow(busy({"read": 0.1, "write": 0.7, "commit": 0.2}), batches(1.5))
    assert at_the_destination == {"destination": "write takes 70% of a batch, and batches 100% of the time"}
    assert slow(busy({"read": 0.1, "decode": 0.7, "write": 0.2}), batches(1.5)).keys() == {"batch"}
    # What waits for the decoder is time of the decoder.
    assert slow(busy({"wait": 0.6, "decode": 0.1, "write": 0.3}), batches(1.5)).keys() == {"batch"}


def test_a_lag_makes_a_stage_slow_as_well() -> None:
    assert slow(busy({"write": 0.7}, lag=30.0), batches(0.3, 5)).keys() == {"destination"}
    assert slow(replace(busy({"write": 0.7}, lag=30.0), runner=None), []) == {}


def test_what_stands_still_is_the_slow_stage_with_its_reason() -> None:
    full = SourceStatus("full", journal_bytes=9, error="the journal is full")
    assert slow(replace(GOOD, source=full), []) == {"journal": "the journal is full"}
    waiting = SourceStatus("waiting", error="no route")
    assert slow(replace(GOOD, source=waiting), []) == {"source": "no route"}
    failing = DeliveryStatus(3, NOW.isoformat(), error="HTTP 500")
    assert slow(replace(GOOD, delivery=failing), []) == {"destination": "HTTP 500"}
    late = DeliveryStatus(3, (NOW - timedelta(minutes=2)).isoformat())
    assert slow(replace(GOOD, delivery=late), []) == {"destination": "the oldest event waits 2 min"}
    unreceived = SourceStatus("stream", str(end_of(0)), 9, str(end_of(100_000_000)))
    assert slow(replace(GOOD, source=unreceived), []) == {"journal": "100 MB of the server's log are not received yet"}


def test_a_stage_that_an_upstream_lacks_is_left_out() -> None:
    assert [stage.stage for stage in way_of(GOOD, [], "poll", "delta")] == ["source", "batch", "destination"]
    with_slot = replace(GOOD, slot=slot(None), source=SourceStatus("stream", journal_bytes=84_000_000))
    way = {stage.stage: stage for stage in way_of(with_slot, batches(1.4, 1), "postgres", "delta")}
    assert (way["slot"].value, way["slot"].detail) == ("3.0 GB", "kept by the server, 75% of what it may")
    assert (way["journal"].value, way["batch"].value) == ("84.0 MB", "1.4 s")
    assert way["destination"].value == "up to date"


# Events.


def test_events_are_the_newest_first_and_no_more_than_a_page_shows() -> None:
    tables = [replace(table(f"t{i}"), since={state: NOW + timedelta(seconds=i) for state in WAY}) for i in range(SHOWN)]
    request = OperatorRequest(1, "retry", "t1", NOW + timedelta(hours=1), None, NOW + timedelta(hours=2), "retried")
    found = events_of(tables, [request], [], RunRecord(NOW, NOW + timedelta(hours=3), "LostError", "gone"))
    assert len(found) == SHOWN
    assert [event.text for event in found[:3]] == [
        "the run ended: gone",
        "retry of t1 is done: retried",
        "retry of t1 was asked for",
    ]
    assert [event.at for event in found] == sorted((event.at for event in found), reverse=True)


# Fixes.


@pytest.mark.parametrize(
    ("text", "commands"),
    [
        ("start it with `tailrace run FILE`", ["tailrace run shop.yaml"]),
        (
            "tailrace reset FILE, then tailrace run FILE: all is copied",
            ["tailrace reset shop.yaml", "tailrace run shop.yaml"],
        ),
        ("tailrace resync FILE public.a", ["tailrace resync shop.yaml public.a"]),
        (
            "fix the row and tailrace retry FILE public.a; or tailrace skip FILE public.a",
            ["tailrace retry shop.yaml public.a", "tailrace skip shop.yaml public.a"],
        ),
        ("tailrace errors skip FILE ID skips it", []),
        ("tailrace errors list FILE lists them", ["tailrace errors list shop.yaml"]),
        (
            "ALTER TABLE a ADD PRIMARY KEY (id);  -- then tailrace reset FILE",
            ["ALTER TABLE a ADD PRIMARY KEY (id);", "tailrace reset shop.yaml"],
        ),
        ("pip install 'tailrace[webhook]'", ["pip install 'tailrace[webhook]'"]),
        ("free some space", []),
        ("tailrace sqlite enable FILE", []),
    ],
)
def test_the_commands_of_a_fix_can_be_run_as_they_are(text: str, commands: list[str]) -> None:
    assert commands_in(text, FILE, "public.a") == commands


def test_names_in_commands_are_quoted_for_a_shell() -> None:
    name = 'public."a b; rm -rf $HOME"'
    found = commands_in(f"tailrace resync FILE {name}", Path("my shop.yaml"), name)
    assert found == [f"tailrace resync 'my shop.yaml' '{name}'"]


def test_a_fix_keeps_its_words() -> None:
    assert fix_of(None, FILE) is None
    assert fix_of("run `tailrace check FILE`", FILE) == {
        "text": "run `tailrace check shop.yaml`",
        "commands": ["tailrace check shop.yaml"],
    }


# Rows, columns, series.


def test_a_table_is_in_one_group() -> None:
    paused = replace(table("a"), paused_at=NOW)
    assert [group_of(each) for each in (table("a"), paused, errored("a"), table("a", TableState.INIT))] == [
        "following",
        "paused",
        "errored",
        "copying",
    ]


def test_the_time_left_of_a_copy_comes_from_its_rate() -> None:
    copying = replace(table("a", TableState.DATA_SYNC), rows_copied=400, rows_total=1000, rows_per_second=20.0)
    assert row_of(copying)["seconds_left"] == 30
    assert row_of(replace(copying, rows_per_second=0.0))["seconds_left"] is None
    assert row_of(replace(copying, rows_total=None))["seconds_left"] is None
    assert row_of(replace(copying, rows_copied=2000))["seconds_left"] == 0


def test_a_row_that_comes_back_is_no_longer_gone() -> None:
    log = RowLog()
    log.update({"1": '{"id":"1"}'})
    begin = log.version
    log.update({})
    log.update({"1": '{"id":"1"}'})
    assert b'"gone":[]' in log.since(begin).body
    assert b'"tables":[{"id":"1"}]' in log.since(begin).body
    before = log.version
    log.update({"1": '{"id":"1"}'})
    assert log.version == before


def test_two_servers_never_give_the_same_version() -> None:
    one, other = RowLog(), RowLog()
    one.update({"1": "{}"})
    other.update({"2": "{}"})
    assert b'"complete":true' in other.since(one.version).body


def schema(*columns: Column, key: tuple[str, ...] = ("id",), name: str = "public.a") -> TableSchema:
    return TableSchema(TableName.parse(name), columns, key)


def test_a_new_version_says_what_became_of_the_columns() -> None:
    key, text = Column("id", pa.int64(), False, "bigint", 1), Column("note", pa.string(), True, "text", 2)
    before = schema(key, text)
    assert compare(before, schema(key)) == ["note dropped"]
    assert compare(before, schema(key, replace(text, name="remark"))) == ["note renamed to remark"]
    assert compare(before, schema(key, replace(text, nullable=False))) == ["note must not be null"]
    assert compare(before, schema(key, replace(text, number=3))) == ["note text added", "note dropped"]
    assert compare(before, schema(key, text, key=())) == ["key (id) became ()"]
    assert compare(before, schema(key, text, name="public.b")) == ["table public.a renamed to public.b"]
    assert compare(before, before) == ["nothing that columns show"]
    # Without numbers, which not every upstream has, columns are known by their names.
    bare = replace(text, number=0)
    assert compare(schema(key, bare), schema(key, replace(bare, name="remark"))) == [
        "remark text added",
        "note dropped",
    ]


def test_a_long_series_keeps_its_peaks_and_its_averages() -> None:
    samples = [
        Sample(NOW + timedelta(seconds=10 * i), 10.0, ChangeCounts(0, 100), lag_seconds=99.0 if i == 4000 else 1.0)
        for i in range(24 * POINTS)
    ]
    series = series_of(samples)
    assert {len(column) for column in series.values()} == {POINTS}
    assert set(series["changes_per_second"]) == {10.0}
    assert sorted(set(series["lag_seconds"])) == [1.0, 99.0]
    assert series["at"] == sorted(series["at"])
    assert series["pending"] == [None] * POINTS
    assert series_of([])["at"] == []
