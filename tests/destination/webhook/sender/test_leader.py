"""One of several nodes leads, and only it can record what was delivered."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tailrace.destination.webhook.sender.leader import Leadership, LeaderState, open_engine
from tailrace.errors import OwnedError
from tailrace.model.change import LAST_ORDINAL, START, Position
from tailrace.state import Owner, SqliteStore, StateStore
from tailrace.testing.wait import wait_until
from tests.support.database import PostgresDatabase

AT = datetime(2026, 1, 2, tzinfo=UTC)

Join = Callable[..., Leadership]


@pytest.fixture(params=["sqlite", "postgres"])
def lease(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "shared")
    database: PostgresDatabase = request.getfixturevalue("database")
    return database.dsn


@pytest.fixture
def join(lease: str) -> Iterator[Join]:
    """`join("a")` is node a, on a host of its own."""
    with ExitStack() as joined:

        def make(node: str, *, seconds: float = 60, owner: Owner | None = None, pipeline: str = "shop") -> Leadership:
            owner = owner or Owner(4711, node, AT)
            made = Leadership(
                open_engine(lease), pipeline, node=node, queue=f"queue of {node}", seconds=seconds, owner=owner
            )
            joined.callback(made.close)
            return made

        yield make


def claimed(leadership: Leadership) -> LeaderState:
    standing = leadership.claim()
    assert standing is not None
    return standing


def test_one_node_leads_until_it_lets_go(join: Join) -> None:
    a, b = join("a"), join("b")
    assert (a.leader(), claimed(a), b.claim(), a.holds(), b.holds()) == (
        None,
        LeaderState(1, START, {}),
        None,
        True,
        False,
    )
    assert (a.renew(), b.renew(), b.leader()) == (True, False, "a")
    b.release()
    assert b.claim() is None
    a.release()
    assert (a.holds(), a.leader()) == (False, None)
    assert claimed(b).epoch == 2
    a.release()
    assert b.renew()


def test_pipelines_have_leases_of_their_own(join: Join) -> None:
    assert claimed(join("a")).epoch == claimed(join("b", pipeline="office")).epoch == 1


def test_a_leader_that_is_silent_for_too_long_is_followed_by_another_and_can_store_nothing(join: Join) -> None:
    a, b = join("a", seconds=0.5), join("b")
    claimed(a)
    a.persist({"public.t": Position(5, 0)}, Position(3, 0))
    wait_until(lambda: b.claim() is not None)
    assert not a.holds()
    with pytest.raises(OwnedError, match="another node sends"):
        a.persist({"public.t": Position(9, 0)}, Position(4, 0))
    assert not a.renew()
    a.release()
    assert b.holds()
    assert b.watermarks() == {"public.t": Position(5, 0)}
    assert a.claim() is None


def test_an_expired_lease_is_renewed_where_no_other_node_took_it(join: Join) -> None:
    a = join("a", seconds=2.0)
    claimed(a)
    wait_until(lambda: not a.holds())
    a.persist({}, Position(1, 0))
    assert a.renew()
    assert a.holds()


def test_a_dead_process_of_this_machine_is_not_waited_for(join: Join) -> None:
    process = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    dead = replace(Owner.here(), pid=int(process.stdout))
    claimed(join("a", owner=dead))
    assert claimed(join("b", owner=replace(Owner.here(), pid=1))).epoch == 2


def test_a_process_that_lives_is_waited_for(join: Join) -> None:
    claimed(join("a", owner=replace(Owner.here(), pid=1)))
    assert join("b").claim() is None


def test_watermarks_only_ever_go_forward(join: Join) -> None:
    a = join("a")
    claimed(a)
    a.persist({"t": Position(5, 2), "u": Position(1, LAST_ORDINAL)}, Position(1, 0))
    a.persist({"t": Position(4, 9)}, Position(1, 0))
    assert a.watermarks() == {"t": Position(5, 2), "u": Position(1, LAST_ORDINAL)}
    a.persist({"t": Position(5, 10), "u": Position(2, 0)}, Position(2, 7))
    assert a.watermarks() == {"t": Position(5, 10), "u": Position(2, 0)}
    assert a.places() == {"a": Position(2, 7)}


def test_the_last_sender_continues_at_its_own_place_and_another_by_the_watermarks(join: Join) -> None:
    a, b = join("a"), join("b")
    claimed(a)
    a.persist({"t": Position(5, 0)}, Position(3, 7))
    a.release()
    assert claimed(a) == LeaderState(2, Position(3, 7), {})
    a.release()
    assert claimed(b) == LeaderState(3, START, {"t": Position(5, 0)})
    b.persist({"t": Position(6, 0)}, Position(1, 0))
    b.release()
    assert claimed(a) == LeaderState(4, Position(3, 7), {"t": Position(6, 0)})


def test_an_operator_can_move_the_place_past_events(join: Join) -> None:
    join("a").pass_over(Position(12, 0))
    assert claimed(join("a")).place == Position(12, 0)
    assert join("b").places() == {"a": Position(12, 0)}


def test_of_many_nodes_that_claim_a_lease_at_once_one_gets_it(join: Join) -> None:
    nodes = [join(f"node {number}") for number in range(6)]
    won: list[LeaderState | None] = []
    threads = [threading.Thread(target=lambda node=node: won.append(node.claim())) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [standing.epoch for standing in won if standing] == [1]
    assert len(won) == len(nodes)


def test_the_state_of_a_pipeline_holds_its_lease_and_a_new_life_of_it_begins_without_watermarks(
    tmp_path: Path,
) -> None:
    with SqliteStore("shop", tmp_path).open() as store:
        assert isinstance(store, StateStore)
        a = Leadership(open_engine(str(tmp_path)), "shop", node="a", queue="a", seconds=60)
        claimed(a)
        a.persist({"t": Position(5, 0)}, Position(3, 0))
        store.forget_pipeline()
        assert (a.watermarks(), a.places()) == ({}, {})
        a.release()
        assert claimed(a) == LeaderState(2, START, {})
        a.close()
