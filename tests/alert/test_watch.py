"""A state store that is watched, and an endpoint that is told, across restarts of the watch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tailrace.alert import watch as module
from tailrace.alert.option import AlertOptions
from tailrace.alert.watch import AlertWatch, tell_refusal
from tailrace.errors import LostError, OwnedError, PreflightError
from tailrace.model.change import end_of
from tailrace.state import BatchRecord, SourceStatus, SqliteStore, StateStore, TableState, TableUpdate
from tailrace.state.activity import Sample
from tailrace.state.state_machine import WAY
from tailrace.state.status import PipelineStatus
from tailrace.testing.endpoint import Reply, WebhookEndpoint, always
from tailrace.testing.wait import wait_until

APPLIED, RECEIVED = str(end_of(1000)), str(end_of(9000))


class Scene:
    """A store with the Ready table public.a, which is up to date, and a watch with a clock that is set."""

    def __init__(self, store: StateStore, endpoint: WebhookEndpoint, **options: Any) -> None:
        self.store = store
        self.endpoint = endpoint
        self.now = datetime.now(UTC)
        self.options = AlertOptions.model_validate({"webhook": {"url": endpoint.url}, "timeout": "5s", **options})
        store.add_table("1", "public.a")
        update = TableUpdate("1", WAY[1:], changes_applied=1, position=APPLIED, last_change_committed_at=self.now)
        store.apply_batch(BatchRecord(1, {}, APPLIED, 1, 1, 1.0, self.now), [update])
        store.put_source_status(SourceStatus("streaming", APPLIED, 0, APPLIED))
        self.restart()

    def restart(self, *, once: bool = False) -> None:
        self.watch = AlertWatch(self.options, self.store, once=once, clock=lambda: self.now)

    def look(self, seconds: float = 0.0) -> None:
        self.now += timedelta(seconds=seconds)
        self.watch.look()

    @property
    def told(self) -> list[tuple[str, str]]:
        """The alerts that arrived, each with its status."""
        sent = [json.loads(request.body) for request in self.endpoint.taken]
        return [(each["alert"], each["status"]) for each in sent]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with WebhookEndpoint() as endpoint, SqliteStore("shop", tmp_path).open() as store:
        yield Scene(store, endpoint)


def test_a_pipeline_that_is_well_alerts_no_one(scene: Scene) -> None:
    for _ in range(3):
        scene.look(3600)
    assert scene.told == []
    assert scene.store.alerts() == []


def test_a_table_in_error_is_told_with_its_fix_and_so_is_its_recovery(scene: Scene) -> None:
    scene.store.fail_table("1", "the key is gone", fix="ALTER TABLE a ADD PRIMARY KEY (id)")
    scene.look()
    scene.look(60)
    (alert,) = [json.loads(request.body) for request in scene.endpoint.taken]
    assert alert["text"] == "shop: a table is in error: public.a: the key is gone"
    assert alert["fix"] == "ALTER TABLE a ADD PRIMARY KEY (id)"
    assert alert["tables"] == ["public.a"]
    assert [each.name for each in PipelineStatus.read(scene.store).alerts] == ["errored"]
    scene.store.recover_table("1")
    scene.look(5)
    scene.look(60)
    assert scene.told == [("errored", "firing"), ("errored", "resolved")]
    assert scene.store.alerts() == []


def test_a_restart_tells_nothing_twice_and_waits_no_longer(scene: Scene) -> None:
    scene.store.fail_table("1", "the key is gone")
    scene.look()
    scene.restart()
    scene.look(60)
    scene.restart()
    scene.look(60)
    scene.store.recover_table("1")
    scene.look()
    scene.restart()
    scene.look(60)
    assert scene.told == [("errored", "firing"), ("errored", "resolved")]


def test_an_alert_that_did_not_arrive_is_sent_again_later_with_the_same_id(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.endpoint.script(Reply(500), Reply(503))
    scene.store.fail_table("1", "the key is gone")
    scene.look()
    scene.look(60)
    (record,) = scene.store.alerts()
    assert record.told_at is None
    assert record.failure == f"http://localhost:{scene.endpoint.port} answers with status 500"
    for _ in range(9):
        scene.look(4)
    assert scene.told == [("errored", "firing")]
    assert len({json.loads(request.body)["id"] for request in scene.endpoint.requests}) == 1
    assert scene.store.alerts()[0].failure is None
    assert len([each for each in caplog.records if "could not be sent" in each.message]) == 1


def test_an_endpoint_that_fails_is_not_asked_at_every_look(scene: Scene) -> None:
    scene.endpoint.rule = always(Reply(500))
    scene.store.fail_table("1", "the key is gone")
    scene.look()
    for _ in range(100):
        scene.look(5)
    assert len(scene.endpoint.requests) == 5  # at once, and after 5, 15, 60 and 300 seconds


def test_lag_is_told_in_seconds_and_in_bytes_while_more_waits(tmp_path: Path) -> None:
    with WebhookEndpoint() as endpoint, SqliteStore("shop", tmp_path).open() as store:
        scene = Scene(store, endpoint, lag={"above": "5m", "for": 0}, lag_bytes={"above": "1 kB", "for": 0})
        scene.look(400)
        assert scene.told == []
        store.put_source_status(SourceStatus("streaming", RECEIVED, 0, RECEIVED))
        scene.look()
        assert scene.told == [("lag", "firing"), ("lag_bytes", "firing")]
        assert "6 min behind the source; the limit is 5 min" in endpoint.taken[0].body.decode()


def test_a_slot_that_fills_is_told_before_it_is_full(scene: Scene) -> None:
    for seconds, size in ((0, 10_000_000), (10, 11_000_000)):
        at = scene.now + timedelta(seconds=seconds)
        scene.store.put_sample(Sample(at, 10, slot_bytes=size, safe_wal_bytes=360_000_000, wal_status="reserved"))
    scene.look(10)
    scene.look(60)
    assert scene.told == [("slot", "firing")]
    assert "the replication slot is full in 1 h 0 min" in scene.endpoint.taken[0].body.decode()


def test_a_source_that_does_not_answer_is_told_and_off_is_off(tmp_path: Path) -> None:
    with WebhookEndpoint() as endpoint, SqliteStore("shop", tmp_path).open() as store:
        scene = Scene(store, endpoint, errored=False)
        store.fail_table("1", "the key is gone")
        store.put_source_status(SourceStatus("waiting", APPLIED, 0, APPLIED, error="no server answers", fix="start it"))
        scene.look()
        scene.look(299)
        assert scene.told == []
        scene.look(1)
        assert scene.told == [("unavailable", "firing")]


def test_the_error_that_ends_a_run_is_told_once_until_a_run_goes_well(scene: Scene) -> None:
    for _ in range(3):  # a service manager that starts it again and again
        scene.restart()
        with pytest.raises(LostError), scene.watch:
            raise LostError("the slot is gone", fix="tailrace reset FILE")
    assert scene.told == [("stopped", "firing")]
    scene.restart()
    scene.look(5)
    scene.look(60)
    assert scene.told == [("stopped", "firing"), ("stopped", "resolved")]


def test_an_unexpected_error_is_told_without_its_text(scene: Scene) -> None:
    with pytest.raises(KeyError), scene.watch:
        raise KeyError("c4nary")
    assert scene.told == [("stopped", "firing")]
    assert "unexpected KeyError" in scene.endpoint.taken[0].body.decode()
    assert "c4nary" not in scene.endpoint.taken[0].body.decode()


def test_a_run_that_gives_way_to_another_or_to_a_signal_is_no_alert(scene: Scene) -> None:
    with pytest.raises(OwnedError), scene.watch:
        raise OwnedError("another one runs it")
    scene.restart()
    with pytest.raises(KeyboardInterrupt), scene.watch:
        raise KeyboardInterrupt
    assert scene.told == []


def test_a_short_run_tells_at_its_end_what_holds(scene: Scene) -> None:
    scene.store.fail_table("1", "the key is gone")
    scene.restart(once=True)
    with scene.watch:
        pass
    assert scene.told == [("errored", "firing")]
    scene.store.recover_table("1")
    scene.restart(once=True)
    with scene.watch:
        pass
    assert scene.told == [("errored", "firing"), ("errored", "resolved")]


def test_a_watch_looks_by_itself_and_an_endpoint_that_hangs_ends_it_not(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    scene.options = scene.options.model_copy(
        update={"errored": scene.options.conditions["errored"].model_copy(update={"for_": 0.0}), "timeout": 0.2}
    )
    scene.endpoint.script(Reply(hold_seconds=2))
    scene.store.fail_table("1", "the key is gone")
    scene.restart()
    with scene.watch:
        wait_until(lambda: bool(scene.store.alerts() and scene.store.alerts()[0].failure))
        assert scene.store.table("1").state is TableState.ERRORED  # type: ignore[union-attr]


def test_a_run_that_is_refused_is_told_only_of_a_pipeline_that_has_run(tmp_path: Path) -> None:
    refusal = PreflightError("the publication is gone", fix="CREATE PUBLICATION")
    with WebhookEndpoint() as endpoint:
        options = AlertOptions.model_validate({"webhook": {"url": endpoint.url}})
        address = SqliteStore("shop", tmp_path / "state")
        tell_refusal(options, address, refusal)
        assert not (tmp_path / "state").exists()
        address.open().close()
        tell_refusal(None, address, refusal)
        assert endpoint.taken == []
        for _ in range(2):
            tell_refusal(options, address, refusal)
        (request,) = endpoint.taken
        assert json.loads(request.body)["fix"] == "CREATE PUBLICATION"
