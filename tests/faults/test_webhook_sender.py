"""Senders as real processes: endpoints that fail in every way, leaders killed or paused, secrets that stay so."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from psycopg import conninfo

from tailrace.destination.webhook.option import RetryOptions, WebhookOptions
from tailrace.destination.webhook.sender.leader import Leadership, open_engine
from tailrace.errors import ConfigError
from tailrace.system.child_process import BUSY
from tailrace.testing.certificate import Authority, make_authority
from tailrace.testing.endpoint import Reply, WebhookEndpoint, always, failing, ids_of_list
from tailrace.testing.wait import wait_until
from tests.support.database import PostgresDatabase
from tests.support.proxy import Proxy
from tests.support.webhook_sending import drain, fill, numbered, options, status

CANARY = "c4nary-Pa55"
TABLES = tuple(f"public.t{number}" for number in range(5))


class Node:
    """A sender process with its queue."""

    def __init__(self, chosen: WebhookOptions) -> None:
        self.folder = chosen.queue.path
        self._options = chosen
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        with (self.folder / "sender.log").open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tailrace.destination.webhook.sender"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
            )
        assert self._process.stdin is not None
        self._process.stdin.write(self._options.to_text("shop") + "\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._close()

    def stop(self, by: int | None = None) -> int:
        """Ask it to stop, by the end of its input or by a signal; its exit code."""
        assert self._process is not None
        self.resume()
        if by is not None:
            self._process.send_signal(by)
            self._process.wait()
        return self._close()

    def ended(self) -> int:
        """Wait for its end; its exit code."""
        assert self._process is not None
        return self._process.wait()

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def _close(self) -> int:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait()

    @property
    def leads(self) -> bool:
        said = status(self.folder)
        return said.get("pid") == self.pid and bool(said.get("leader"))


@contextmanager
def running(*nodes: Node) -> Iterator[None]:
    with ExitStack() as ending:
        for node in nodes:
            node.start()
            ending.callback(node.stop)
        yield


@pytest.fixture
def queue(tmp_path: Path) -> Path:
    return tmp_path / "queue"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("authority"))


def ids(count: int) -> list[str]:
    return [str(each) for each in numbered(1, count, TABLES).column("id").to_pylist()]


@pytest.mark.parametrize(
    ("faults", "repeats"),
    [
        ([Reply(500)] * 3, 0),
        ([Reply(503, {"Retry-After": "1"})], 0),
        ([Reply(429, {"Retry-After": "1"})], 0),
        ([Reply(hold_seconds=30, takes=False)], 0),
        ([Reply(hold_seconds=30)], 1),
        ([Reply(500, drip_seconds=0.1)], 0),
        ([Reply(302, {"Location": "http://localhost:9/"})] * 3, 0),
        ([Reply(410)] * 3, 0),
        ([Reply(cut=True)] * 3, 0),
        ([Reply(500, takes=True)] * 2, 2),
    ],
    ids=["500", "503", "429", "timeout", "late", "drip", "redirect", "gone", "cut", "took it and failed"],
)
def test_no_answer_of_an_endpoint_loses_an_event(
    tmp_path: Path, queue: Path, faults: list[Reply], repeats: int
) -> None:
    fill(queue, numbered(1, 30, TABLES))
    with WebhookEndpoint() as endpoint:
        endpoint.script(Reply(), *faults)
        chosen = options(
            queue, endpoint.url, tmp_path, timeout=3.0, retry=RetryOptions(policy="exponential", min=0.05, max=0.2)
        )
        with running(Node(chosen)):
            wait_until(lambda: len(endpoint.requests) == 3 + len(faults))
            wait_until(lambda: status(queue).get("delivered") == 30)
        failed = endpoint.requests[1 : 2 + len(faults)]
        gaps = [after.at - before.at for before, after in pairwise(failed)]
        least = 1.0 if "Retry-After" in faults[0].headers else 0.05
        assert min(gaps) >= least
        assert list(dict.fromkeys(endpoint.ids())) == ids(30)
        assert endpoint.duplicates() == 10 * repeats
    assert status(queue)["failures"] == len(faults)


@pytest.mark.parametrize("fault", ["expired", "unknown", "no client certificate", "plain"])
def test_nothing_is_sent_to_an_endpoint_whose_certificate_is_not_trusted_and_nothing_is_lost_meanwhile(
    tmp_path: Path, queue: Path, authority: Authority, fault: str
) -> None:
    fill(queue, numbered(1, 30, TABLES))
    stranger = make_authority(tmp_path / "stranger")
    kinds: dict[str, dict[str, Any]] = {
        "expired": {"tls": authority, "expired": True},
        "unknown": {"tls": stranger},
        "no client certificate": {"tls": stranger, "mutual": True},
        "plain": {},
    }
    trusted = stranger if fault == "no client certificate" else authority
    with WebhookEndpoint(**kinds[fault]) as endpoint:
        port = endpoint.port
        url = f"https://localhost:{port}/hook"
        chosen = options(
            queue,
            url,
            tmp_path,
            tls={"ca": str(trusted.ca_file)},
            retry=RetryOptions(policy="exponential", min=0.05, max=0.1),
        )
        node = Node(chosen)
        node.start()
        wait_until(lambda: status(queue).get("failures", 0) >= 3)
        assert status(queue)["error"]["kind"] == "UnavailableError"
        assert endpoint.requests == []
    with WebhookEndpoint(tls=trusted, port=port) as fixed:
        wait_until(lambda: status(queue).get("delivered") == 30)
        assert fixed.ids() == ids(30)
        node.stop()


def follow_order(endpoint: WebhookEndpoint, count: int) -> None:
    """Nothing is missing, and of each table every event came for the first time only after those before it."""
    seen = list(dict.fromkeys(endpoint.ids()))
    assert len(seen) == count
    assert set(seen) == set(ids(count))
    for table in TABLES:
        commits = [int(each.split(":")[1]) for each in seen if each.startswith(f"{table}:")]
        assert commits == sorted(commits)


def repetitions(endpoint: WebhookEndpoint) -> Iterator[tuple[float, float]]:
    """For each event that was taken again, when it was taken before and when again."""
    taken: dict[str, float] = {}
    for request in endpoint.taken:
        for each in ids_of_list(request.body):
            if each in taken:
                yield taken[each], request.at
            taken[each] = request.at


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_leaders_that_are_killed_or_paused_lose_nothing_and_repeat_only_what_they_had_not_stored(
    tmp_path: Path, request: pytest.FixtureRequest, store: str
) -> None:
    count, chance = 20_000, random.Random(store)
    lease = str(tmp_path / "shared") if store == "sqlite" else request.getfixturevalue("database").dsn
    with WebhookEndpoint() as endpoint:
        endpoint.rule = always(Reply(hold_seconds=0.02))
        nodes = []
        for name in ("one", "two", "three"):
            chosen = options(
                tmp_path / name,
                endpoint.url,
                lease,
                max_events=50,
                seconds=3.0,
                interval=0.2,
                headers={"X-Node": name},
            )
            fill(tmp_path / name, *(numbered(first, 1000, TABLES) for first in range(1, count, 1000)))
            nodes.append(Node(chosen))
        kills = pauses = 0
        disturbed: list[tuple[float, float]] = []
        with running(*nodes):
            while len(set(endpoint.ids())) < count:
                wait_until(lambda: any(node.leads for node in nodes) or len(set(endpoint.ids())) == count)
                time.sleep(chance.uniform(0.0, 1.0))
                leader = next((node for node in nodes if node.leads), None)
                if leader is None:
                    continue
                began = time.monotonic()
                if (kills + pauses) % 2:
                    leader.kill()
                    leader.start()
                    kills += 1
                else:
                    leader.pause()
                    time.sleep(chance.uniform(0.6, 4.5))
                    leader.resume()
                    pauses += 1
                disturbed.append((began, time.monotonic()))
            wait_until(lambda: all(not status(node.folder).get("pending", 1) for node in nodes))
        follow_order(endpoint, count)
        repeats = endpoint.duplicates()
        for before, again in repetitions(endpoint):
            assert any(began <= again and ended >= before - 0.5 for began, ended in disturbed)
        senders = {each.headers["x-node"] for each in endpoint.requests}
    leadership = Leadership(open_engine(lease), "shop", node="test", queue="test", seconds=1)
    standing = leadership.claim()
    leadership.close()
    assert standing is not None
    print(
        f"{store}: {kills} kills, {pauses} pauses, {standing.epoch} epochs, {repeats} repeats, {len(senders)} senders"
    )
    assert kills + pauses >= 4
    assert len(senders) > 1
    # What a leader can deliver between two times of storing, and the request that a pause or a kill cut short.
    assert repeats <= standing.epoch * 50 * (0.2 / 0.02 + 2)
    for table, position in standing.watermarks.items():
        assert position.commit == max(int(each.split(":")[1]) for each in ids(count) if each.startswith(f"{table}:"))


def test_without_a_change_of_leader_nothing_is_sent_twice(tmp_path: Path) -> None:
    with WebhookEndpoint() as endpoint:
        nodes = []
        for name in ("one", "two", "three"):
            fill(tmp_path / name, numbered(1, 2000, TABLES))
            nodes.append(Node(options(tmp_path / name, endpoint.url, tmp_path / "shared", headers={"X-Node": name})))
        with running(*nodes):
            wait_until(lambda: all(not status(node.folder).get("pending", 1) for node in nodes))
        assert len({request.headers["x-node"] for request in endpoint.requests}) == 1
        assert endpoint.ids() == ids(2000)


def test_a_hundred_thousand_events_go_in_order_through_an_endpoint_that_fails_now_and_then(
    tmp_path: Path, queue: Path
) -> None:
    fill(queue, *(numbered(first, 10_000, TABLES) for first in range(1, 100_000, 10_000)))
    with WebhookEndpoint() as endpoint:
        endpoint.rule = failing(0.05, seed=8)
        began = time.monotonic()
        drain(options(queue, endpoint.url, tmp_path, max_events=100))
        took = time.monotonic() - began
        assert endpoint.ids() == ids(100_000)
        assert len(endpoint.requests) > 1020
    print(f"100,000 events in {took:.1f} s, {len(endpoint.requests)} requests")


def test_a_leader_that_cannot_reach_the_store_stops_before_its_lease_ends_and_goes_on_later(
    tmp_path: Path, queue: Path, database: PostgresDatabase
) -> None:
    parts = conninfo.conninfo_to_dict(database.dsn)
    with Proxy(str(parts["host"]), int(str(parts["port"]))) as proxy, WebhookEndpoint() as endpoint:
        dsn = conninfo.make_conninfo(database.dsn, host="127.0.0.1", port=proxy.port)
        fill(queue, numbered(1, 10, TABLES))
        with running(Node(options(queue, endpoint.url, dsn, seconds=3.0))):
            wait_until(lambda: status(queue).get("delivered") == 10)
            proxy.refuse()
            proxy.cut()
            wait_until(lambda: not status(queue)["leader"])
            assert status(queue)["error"]["kind"] == "UnavailableError"
            fill(queue, numbered(11, 10, TABLES))
            time.sleep(0.5)
            assert endpoint.ids() == ids(10)
            proxy.restore()
            wait_until(lambda: status(queue)["delivered"] == 20)
        assert endpoint.ids() == ids(20)


@pytest.mark.parametrize("how", [None, signal.SIGTERM], ids=["the end of its input", "SIGTERM"])
def test_a_sender_that_is_asked_to_stop_stores_what_it_delivered_and_lets_the_lease_go(
    tmp_path: Path, queue: Path, how: int | None
) -> None:
    fill(queue, numbered(1, 30, TABLES))
    with WebhookEndpoint() as endpoint:
        node = Node(options(queue, endpoint.url, tmp_path, interval=60.0, seconds=60.0))
        node.start()
        wait_until(lambda: len(endpoint.ids()) == 30)
        assert node.stop(how) == 0
        drain(options(queue, endpoint.url, tmp_path))
        assert endpoint.ids() == ids(30)
    leadership = Leadership(open_engine(str(tmp_path)), "shop", node="test", queue="test", seconds=1)
    assert leadership.leader() is None
    leadership.close()


@pytest.mark.parametrize("fault", ["none", "500", "dead", "tls", "store"])
def test_secrets_show_in_no_log_status_state_or_list_of_processes(
    tmp_path: Path, queue: Path, database: PostgresDatabase, authority: Authority, fault: str
) -> None:
    fill(queue, numbered(1, 30, TABLES))
    dsn = conninfo.make_conninfo(database.dsn, password=CANARY)
    if fault == "store":
        dsn = conninfo.make_conninfo(database.dsn, password=CANARY, user="stranger", dbname="nowhere")
    with WebhookEndpoint(tls=authority) as endpoint:
        if fault == "500":
            endpoint.rule = always(Reply(500, body=CANARY.encode()))
        if fault == "dead":
            endpoint.stop()
        url = f"https://{CANARY}:{CANARY}@localhost:{endpoint.port}/{CANARY}?key={CANARY}"
        chosen = options(
            queue,
            url,
            dsn,
            tls={} if fault == "tls" else {"ca": str(authority.ca_file)},
            headers={"Authorization": f"Bearer {CANARY}"},
            secret=CANARY,
            retry=RetryOptions(policy="linear", min=0.01, max=0.01, limit=3),
        )
        node = Node(chosen)
        node.start()
        assert CANARY not in Path(f"/proc/{node.pid}/cmdline").read_text()
        assert CANARY not in Path(f"/proc/{node.pid}/environ").read_text()
        counted = "delivered" if fault == "none" else "dropped"
        wait_until(lambda: bool(status(queue).get("error")) if fault == "store" else status(queue).get(counted) == 30)
        node.stop()
        if fault == "none":
            assert endpoint.requests[0].headers["authorization"] == f"Bearer {CANARY}"
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert any(file.name == "sender.log" for file in files)
    assert not [file for file in files if CANARY.encode() in file.read_bytes()]
    if fault != "store":
        rows = database.rows("SELECT * FROM tailrace.sender_lease")
        rows += database.rows("SELECT * FROM tailrace.sender_queue")
        rows += database.rows("SELECT * FROM tailrace.sender_watermark")
        assert rows
        assert CANARY not in str(rows)


def test_a_sender_that_cannot_begin_says_why_and_a_second_one_lets_the_first_work(tmp_path: Path, queue: Path) -> None:
    fill(queue, numbered(1, 5, TABLES))
    with WebhookEndpoint() as endpoint:
        broken = options(queue, endpoint.url.replace("http:", "https:"), tmp_path, tls={"ca": str(tmp_path / "no.pem")})
        node = Node(broken)
        node.start()
        wait_until(lambda: bool(status(queue)))
        assert node.stop() == ConfigError.exit_code
        assert status(queue)["error"]["kind"] == "ConfigError"
        chosen = options(queue, endpoint.url, tmp_path)
        first, second = Node(chosen), Node(chosen)
        with running(first):
            wait_until(lambda: first.leads)
            second.start()
            assert second.ended() == BUSY
            second.stop()
        assert endpoint.ids() == ids(5)
