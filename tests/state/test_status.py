from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console

from tailrace.cli.progress_view import LineView, LiveView, draw
from tailrace.errors import Finding
from tailrace.model.change import end_of
from tailrace.model.delivery_status import DeliveryStatus
from tailrace.model.quantity_text import format_bytes
from tailrace.state import (
    BatchRecord,
    Owner,
    RunnerLock,
    SourceStatus,
    SqliteStore,
    StateStore,
    TableState,
    TableUpdate,
)
from tailrace.state.activity import Sample
from tailrace.state.record import ChangeCounts
from tailrace.state.report import AlertRecord
from tailrace.state.state_machine import WAY
from tailrace.state.status import PipelineStatus, SlotForecast, TableReading

NOW = datetime(2026, 5, 4, 12, 0, 0, tzinfo=UTC)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StateStore]:
    with SqliteStore("shop", tmp_path).open() as opened:
        opened.add_table("1", "public.orders")
        yield opened


def ready(store: StateStore, *, commit: int, at: datetime = NOW) -> None:
    update = TableUpdate(
        "1",
        WAY[1:],
        rows_copied=10,
        changes_applied=5,
        position=str(end_of(commit)),
        last_change_committed_at=at - timedelta(seconds=30),
        counts=ChangeCounts(10, 3, 1, 1),
    )
    store.apply_batch(BatchRecord(0, {"lsn": commit}, str(end_of(commit)), 15, 100, 2.0, at), [update])


def shown(status: PipelineStatus, file: Path | None = None) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(draw(status, file))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_lag_is_what_the_server_has_and_the_table_has_not(store: StateStore) -> None:
    ready(store, commit=1000)
    store.put_source_status(SourceStatus("streaming", str(end_of(1500)), 77, str(end_of(3000))))
    table = PipelineStatus.read(store, at=NOW).tables[0]
    assert (table.lag_bytes, table.lag_seconds) == (2000, 30.0)


def test_a_table_without_news_does_not_lag(store: StateStore) -> None:
    ready(store, commit=1000)
    store.apply_batch(BatchRecord(1, {"lsn": 3000}, str(end_of(3000)), at=NOW))
    store.put_source_status(SourceStatus("streaming", str(end_of(3000)), 77, str(end_of(3000))))
    status = PipelineStatus.read(store, at=NOW + timedelta(hours=1))
    assert (status.tables[0].lag_bytes, status.tables[0].lag_seconds, status.lag_bytes) == (0, 0.0, 0)


def test_a_copying_table_lags_from_its_own_position(store: StateStore) -> None:
    copying = TableUpdate("1", (TableState.DATA_SYNC,), rows_copied=3, rows_total=10, position=str(end_of(100)))
    store.apply_batch(BatchRecord(0, {}, str(end_of(900))), [copying])
    store.put_source_status(SourceStatus(server=str(end_of(1000))))
    status = PipelineStatus.read(store)
    assert (status.tables[0].lag_bytes, status.lag_bytes) == (900, 100)
    assert "3 of ~10 30%" in shown(status)


def test_lag_is_unknown_before_the_source_has_a_status(store: StateStore) -> None:
    table = PipelineStatus.read(store).tables[0]
    assert (table.lag_bytes, table.lag_seconds) == (None, None)


def test_rates_come_from_the_batches_and_from_the_status_before(store: StateStore) -> None:
    first = PipelineStatus.read(store, at=NOW)
    ready(store, commit=1, at=NOW + timedelta(seconds=4))
    second = PipelineStatus.read(store, before=TableReading.of(first), at=NOW + timedelta(seconds=5))
    assert second.tables[0].rows_per_second == 3.0
    # A copy is not mixed into the rate of changes.
    assert (second.copied_per_second, second.changes_per_second) == (10 / 3, 5 / 3)
    assert (second.rows_per_second, second.bytes_per_second) == (5.0, 100 / 3)
    assert PipelineStatus.read(store, at=NOW + timedelta(hours=1)).rows_per_second == 0.0


def test_a_status_has_what_changed_by_kind_the_phases_and_what_became_of_requests(store: StateStore) -> None:
    ready(store, commit=1)
    store.apply_batch(BatchRecord(1, {}, None, 3, 777, 0.5, NOW, phases={"write": 0.25, "read": 0.5}))
    store.finish_request(store.ask("pause", "public.orders").id, "paused")
    values = PipelineStatus.read(store, at=NOW).to_dict()
    table = values["tables"][0]
    assert (table["inserts"], table["updates"], table["deletes"]) == (3, 1, 1)
    assert values["phases"] == {"write": 0.25, "read": 0.5}
    assert values["last_batch"] == {"at": NOW.isoformat(), "seconds": 0.5, "rows": 3, "bytes": 777}
    [request] = values["recent_requests"]
    assert (request["kind"], request["table"], request["outcome"]) == ("pause", "public.orders", "paused")
    assert request["done_at"] is not None


def samples(*slot_bytes: int | None, safe: int | None = 3000, status: str | None = "extended") -> list[Sample]:
    return [
        Sample(NOW + timedelta(seconds=10 * index), 10.0, slot_bytes=kept, safe_wal_bytes=safe, wal_status=status)
        for index, kept in enumerate(slot_bytes)
    ]


@pytest.mark.parametrize(
    ("found", "forecast"),
    [
        ([], None),
        (samples(1000, status=None), None),
        (samples(1000), SlotForecast("extended", 1000, 3000, None, None)),
        (samples(1000, None, 2000), SlotForecast("extended", 2000, 3000, 50.0, 60.0)),
        (samples(2000, 1000), SlotForecast("extended", 1000, 3000, -100.0, None)),
        (samples(1000, 2000, safe=None), SlotForecast("extended", 2000, None, 100.0, None)),
    ],
)
def test_when_a_slot_is_full_follows_from_how_it_grew(found: list[Sample], forecast: SlotForecast | None) -> None:
    assert SlotForecast.of(found) == forecast


def test_a_status_is_json(store: StateStore, tmp_path: Path) -> None:
    ready(store, commit=1000)
    store.put_source_status(SourceStatus("backlog", at=NOW))
    store.ask("resync", "public.orders")
    with RunnerLock(tmp_path):
        values = PipelineStatus.read(store, at=NOW).to_dict()
    assert json.loads(json.dumps(values)) == values
    assert (values["pipeline"], values["tables"][0]["state"], values["source"]["gear"]) == ("shop", "Ready", "backlog")
    assert values["requests"] == ["resync public.orders"]
    assert values["runner"]["pid"] > 0


def test_an_error_is_shown_with_its_fix_and_markup_in_it_stays_text(store: StateStore) -> None:
    store.add_table("2", "public.[red]odd")
    store.fail_table("2", "column [bold]x[/bold] is gone", fix="ALTER TABLE …")
    text = shown(PipelineStatus.read(store))
    assert "public.[red]odd" in text
    assert "column [bold]x[/bold] is gone" in text
    assert "fix: ALTER TABLE …" in text
    assert "is not running" in text


def test_a_pause_and_the_next_try_are_shown(store: StateStore) -> None:
    store.pause_table("1")
    store.add_table("2", "public.b")
    store.fail_table("2", "the disk is full", retry="timed", attempts=3, next_try=NOW)
    status = PipelineStatus.read(store)
    assert "Init, paused" in shown(status)
    assert "it was tried 3 times; the next attempt is at 12:00:00 UTC" in shown(status)
    table = status.to_dict()["tables"][0]
    assert (table["name"], table["retry"], table["attempts"]) == ("public.b", "timed", 3)
    assert datetime.fromisoformat(table["next_try"]) == NOW


def test_waiting_changes_and_the_version_of_the_columns_are_shown(store: StateStore) -> None:
    store.add_table("2", "public.b")
    store.fail_table("2", "a value does not fit", retry="manual", attempts=1)
    store.put_dead_letter("2", "public.b", "0" * 32, kind="UnfitError", reason="a value does not fit", raw=b"x")
    status = PipelineStatus.read(store)
    assert [table.letters for table in status.tables if table.name == "public.b"] == [1]
    assert "it was tried once, and waits for `tailrace retry`" in shown(status)
    assert "1 of its changes waiting: tailrace errors list FILE" in shown(status)
    assert "schema" in shown(status).splitlines()[1]


def test_a_pause_is_a_line_of_its_own(store: StateStore) -> None:
    lines = list[str]()
    view = LineView(lines.append)
    view.show(PipelineStatus.read(store))
    store.pause_table("1")
    view.show(PipelineStatus.read(store))
    view.show(PipelineStatus.read(store))
    assert [("event=table" in line, "paused_at=" in line) for line in lines] == [
        (True, False),
        (False, False),
        (True, True),
    ]


def test_a_runner_on_another_machine_is_shown_with_it(store: StateStore) -> None:
    status = replace(PipelineStatus.read(store), runner=Owner(7, "another-host", NOW))
    assert "shop · process 7 on another-host" in shown(status)


def test_a_request_is_shown_with_its_argument(store: StateStore) -> None:
    store.ask("skip", "public.orders", "12")
    assert PipelineStatus.read(store).requests == ("skip public.orders 12",)


def test_lines_are_written_for_changes_of_state_and_now_and_then(store: StateStore) -> None:
    clock, lines = [0.0], list[str]()
    view = LineView(lines.append, clock=lambda: clock[0])
    with view:
        view.show(PipelineStatus.read(store, at=NOW))
        clock[0] = 1.0
        view.show(PipelineStatus.read(store, at=NOW))
        store.fail_table("1", "no key", fix="ADD PRIMARY KEY")
        view.show(PipelineStatus.read(store, at=NOW))
        clock[0] = 9.0
        view.show(PipelineStatus.read(store, at=NOW))
    begins = [line.split()[:4] for line in lines]
    assert begins == [
        ["at=2026-05-04T12:00:00.000+00:00", "pipeline=shop", f"event={event}", f"level={level}"]
        for level, event in (("info", "table"), ("info", "progress"), ("error", "table"), ("info", "progress"))
    ]
    assert 'table=public.orders state=Errored rows_copied=0 changes_applied=0 reason="no key"' in lines[2]


def test_json_lines_are_json(store: StateStore) -> None:
    lines = list[str]()
    LineView(lines.append, as_json=True).show(PipelineStatus.read(store))
    assert [json.loads(line)["event"] for line in lines] == ["table", "progress"]


def test_the_live_view_draws_what_it_is_shown(store: StateStore) -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with LiveView(console) as view:
        view.show(PipelineStatus.read(store))
    assert isinstance(console.file, io.StringIO)
    assert "public.orders" in console.file.getvalue()


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2 * 10**12, "2.0 TB")])
def test_bytes_are_readable(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_tables_in_error_come_first_and_are_counted(store: StateStore) -> None:
    for number in range(2, 6):
        store.add_table(str(number), f"public.z{number}")
    store.fail_table("5", "no")
    lines = shown(PipelineStatus.read(store, at=NOW)).splitlines()
    assert "1 of 5 tables in error" in lines[0]
    assert lines[2].startswith("public.z5")


def test_events_that_are_not_delivered_are_shown_with_the_reason(store: StateStore) -> None:
    ready(store, commit=1000)
    oldest = (NOW - timedelta(seconds=90)).isoformat()
    store.put_delivery(DeliveryStatus(7, oldest, 0, 0, 3, "the endpoint answers 500", "look at its log"))
    status = PipelineStatus.read(store, at=NOW)
    said = shown(status)
    assert "7 events not delivered, the oldest 90 s old" in said
    assert "delivery: the endpoint answers 500" in said
    assert "fix: look at its log" in said
    values = status.to_dict()["delivery"]
    assert (values["pending"], values["lag_seconds"], values["failures"]) == (7, 90.0, 3)
    written: list[str] = []
    LineView(written.append).show(status)
    assert "pending=7 delivery_lag_seconds=90.0 delivery_failures=3" in written[-1]
    store.put_delivery(DeliveryStatus(0))
    assert PipelineStatus.read(store, at=NOW).delivery_lag == 0.0


def test_what_a_run_leaves_out_is_shown_with_the_fix(store: StateStore) -> None:
    notice = Finding("warning", "publication", "lacks public.c", "ALTER PUBLICATION shop ADD TABLE c;")
    store.put_notices([notice])
    status = PipelineStatus.read(store, at=NOW)
    assert "publication: lacks public.c" in shown(status)
    written: list[str] = []
    view = LineView(written.append)
    for _ in range(2):
        view.show(status)
    assert [line for line in written if "event=notice" in line] == [
        f"at={status.at.isoformat(timespec='milliseconds')} pipeline=shop event=notice level=warning"
        ' subject=publication message="lacks public.c" fix="ALTER PUBLICATION shop ADD TABLE c;"'
    ]


def test_a_note_goes_above_the_live_table_and_not_into_it(store: StateStore) -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True, force_interactive=True, highlight=False)
    with LiveView(console) as view:
        view.show(PipelineStatus.read(store))
        view.note("finishing [bold]now[/bold]")
        view.show(PipelineStatus.read(store))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().split("\n")
    [noted] = [line for line in lines if "finishing" in line]
    # The table is erased first, and drawn again below.
    assert noted.endswith("\x1b[2Kfinishing [bold]now[/bold]")
    assert any("public.orders" in line for line in lines[lines.index(noted) + 1 :])


def test_the_lag_of_a_pipeline_is_that_of_its_newest_change_while_more_waits(store: StateStore) -> None:
    assert PipelineStatus.read(store).lag_seconds is None
    store.add_table("2", "public.quiet")
    changes = {"1": NOW - timedelta(seconds=30), "2": NOW - timedelta(hours=3)}
    updates = [TableUpdate(each, WAY[1:], last_change_committed_at=at) for each, at in changes.items()]
    store.apply_batch(BatchRecord(1, {}, str(end_of(1000)), at=NOW), updates)
    for received, lag in ((1000, 0.0), (2000, 30.0)):
        store.put_source_status(SourceStatus("streaming", str(end_of(received))))
        status = PipelineStatus.read(store, at=NOW)
        assert status.lag_seconds == status.to_dict()["lag_seconds"] == lag


def test_an_alert_that_was_sent_is_shown_and_so_is_one_that_could_not_be(store: StateStore) -> None:
    told = AlertRecord("stopped", True, NOW, NOW, "the pipeline stopped: run `tailrace reset FILE`")
    store.put_alerts([told, AlertRecord("lag", True, NOW, failure="http://hook:1 refuses connections")])
    status = PipelineStatus.read(store)
    text = shown(status, Path("my shop.yaml"))
    assert "alert stopped, sent at 2026-05-04 12:00:00 UTC: the pipeline stopped:" in text
    assert "tailrace reset 'my shop.yaml'" in text
    assert "the alert lag could not be sent: http://hook:1 refuses connections" in text
    assert [each["name"] for each in status.to_dict()["alerts"]] == ["stopped", "lag"]
    assert store.alerts()[0] == told
