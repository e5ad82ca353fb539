"""A database's changes at an endpoint, end to end: copied, followed, killed, held up; all there and in order."""

from __future__ import annotations

import json
import signal
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from tailrace.destination.webhook.queue import QueueReader
from tailrace.destination.webhook.sender.status import STATUS
from tailrace.destination.webhook.signature import verify
from tailrace.model.change import START, Position
from tailrace.state.status import PipelineStatus
from tailrace.system.child_process import read_status
from tailrace.testing.endpoint import Reply, WebhookEndpoint, always, failing
from tailrace.testing.wait import wait_until
from tests.support.database import PostgresDatabase
from tests.support.invocation import apply
from tests.support.process import descendants
from tests.support.runner import RunningPipeline, all_ready

TABLES = ("orders", "items")
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"

# In the order in which runs reach them; each kills once.
STEPS = ["queue.appended", "sender.delivered"]


def write_file(
    folder: Path, database: PostgresDatabase, endpoint: WebhookEndpoint, *, slot: str | None = None, **more: Any
) -> Path:
    file = folder / "pipeline.yaml"
    destination = {
        "type": "webhook",
        "url": endpoint.url,
        "allow_private": True,
        "secret": SECRET,
        "retry": {"min": "10ms", "max": "200ms"},
        "leader": {"seconds": "1s"},
        **more,
    }
    content = {
        "name": "hooked",
        "source": {"type": "postgres", "dsn": database.dsn, **({"slot": slot} if slot else {})},
        "destination": destination,
        "state": "state",
        "spark": {"master": "local[2]"},
    }
    file.write_text(yaml.safe_dump(content))
    return file


def events(endpoint: WebhookEndpoint) -> list[dict[str, Any]]:
    return [event for request in list(endpoint.taken) for event in json.loads(request.body)]


def replay(found: list[dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    """What a careful receiver makes of the events: ids it has seen and copies it is past are dropped.

    The rest must be in order.
    """
    tables: dict[str, dict[int, dict[str, Any]]] = {}
    seen: set[str] = set()
    reached: dict[str, Position] = {}
    for event in found:
        if event["id"] in seen:
            continue
        seen.add(event["id"])
        table, data = event["subject"], event["data"]
        position = Position.parse(data["position"])
        if event["type"] != "tailrace.read":
            assert position > reached.get(table, Position(0, 0)), f"{table} went back"
            reached[table] = position
        elif position.commit < reached.get(table, Position(0, 0)).commit:
            # A copy of another node; the changes that came before it are newer.
            continue
        rows = tables.setdefault(table, {})
        if event["type"] == "tailrace.delete":
            rows.pop(data["key"]["id"], None)
            continue
        if (before := data.get("before")) and before["id"] != data["key"]["id"]:
            rows.pop(before["id"], None)
        rows[data["key"]["id"]] = {**rows.get(data["key"]["id"], {}), **data["after"]}
    return tables


def rows_of(database: PostgresDatabase, table: str) -> dict[int, dict[str, Any]]:
    with database.connect() as connection:
        found = connection.execute(f"SELECT id, note, total FROM {table}").fetchall()
    return {number: {"id": number, "note": note, "total": total} for number, note, total in found}


def test_every_change_reaches_the_endpoint_in_order_though_runs_were_killed_before_and_after_they_sent_it(
    tmp_path: Path, database: PostgresDatabase
) -> None:
    with database.connect() as connection, WebhookEndpoint() as endpoint:
        for table in ("orders", "items"):
            connection.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, note text, total bigint)")
            connection.execute(f"INSERT INTO {table} SELECT n, 'n' || n, n FROM generate_series(1, 700) n")
        endpoint.rule = failing(0.05, seed=7, takes=True)
        file = write_file(tmp_path, database, endpoint)
        orders = ",".join(f"{step}:kill!once" for step in STEPS)
        for round_ in range(len(STEPS)):
            with connection.transaction():
                connection.execute("UPDATE orders SET total = total + 1 WHERE id %% 5 = %s", [round_ % 5])
                connection.execute("DELETE FROM items WHERE id %% 50 = %s", [round_])
                connection.execute("UPDATE items SET note = 'round ' || %s WHERE id %% 9 = 0", [str(round_)])
            with RunningPipeline(file, once=True, failpoints=orders) as run:
                assert run.wait() == -signal.SIGKILL
        with RunningPipeline(file) as run:
            run.wait_until(all_ready)
            connection.execute("UPDATE orders SET id = id + 10000 WHERE id <= 3")
            connection.execute("INSERT INTO orders VALUES (9000, 'last', 9)")
            wait_until(lambda: any(event["data"]["key"].get("id") == 9000 for event in events(endpoint)))
            run.kill()
        apply(file)
        found = events(endpoint)
        state = replay(found)
        for table in ("orders", "items"):
            assert state[f"public.{table}"] == rows_of(database, table)
        for request in endpoint.taken:
            assert verify([SECRET], request.headers, request.body, tolerance_seconds=3600)
        assert endpoint.duplicates() < len(found) / 2


def _is_held_up(status: PipelineStatus) -> bool:
    return status.source is not None and status.source.gear == "waiting"


def _is_refused(status: PipelineStatus) -> bool:
    return status.delivery is not None and bool(status.delivery.pending) and status.delivery.failures > 0


def test_a_dead_endpoint_fills_the_queue_and_does_not_hold_up_the_source(
    tmp_path: Path, database: PostgresDatabase
) -> None:
    with database.connect() as connection, WebhookEndpoint() as endpoint:
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY, note text, total bigint)")
        connection.execute("INSERT INTO orders VALUES (0, 'first', 0)")
        endpoint.rule = always(Reply(503))
        file = write_file(
            tmp_path,
            database,
            endpoint,
            queue={"max_bytes": 1_000_000, "segment_bytes": 1_000_000},
            batch={"max_events": 500},
        )
        with RunningPipeline(file) as run:
            # Tables are Ready once their events are in the queue, and the status says that none is delivered.
            ready = run.wait_until(lambda status: all_ready(status) and _is_refused(status))
            assert ready.delivery is not None
            assert "503" in (ready.delivery.error or "")
            seen: list[int | None] = []

            def insert_until_full(status: PipelineStatus) -> bool:
                """Some rows after every batch, so that no more of them wait than fill the queue."""
                if status.batch not in seen:
                    first = 1 + 500 * len(seen)
                    seen.append(status.batch)
                    connection.execute(
                        "INSERT INTO orders SELECT n, repeat('x', 300), n FROM generate_series(%s::int, %s::int) n",
                        [first, first + 499],
                    )
                return _is_held_up(status)

            status = run.wait_until(insert_until_full)
            assert status.source is not None
            assert "full" in (status.source.error or "")
            # The source's side goes on: what is committed now is received, and the slot moves.
            connection.execute("INSERT INTO orders VALUES (-1, 'received', 0)")
            is_close = (
                "SELECT pg_current_wal_lsn() - confirmed_flush_lsn < 20000 FROM pg_replication_slots"
                " WHERE database = current_database()"
            )
            wait_until(lambda: bool(connection.execute(is_close).fetchall()[0][0]))
            assert not endpoint.taken
            endpoint.rule = always(Reply())
            wait_until(lambda: any(event["data"]["key"]["id"] == -1 for event in events(endpoint)))
            run.wait_until(lambda status: status.delivery_lag == 0.0 and not _is_refused(status))
            run.terminate()
            assert run.wait() == 0
        assert replay(events(endpoint))["public.orders"] == rows_of(database, "orders")


def _sender(run: RunningPipeline) -> dict[str, Any]:
    return read_status(run.file.parent / "state" / "queue", STATUS)


def _leads(run: RunningPipeline) -> bool:
    said = _sender(run)
    return bool(said.get("leader")) and said["pid"] in descendants(run.pid)


def test_of_two_nodes_one_posts_and_when_it_is_killed_the_other_goes_on_without_a_loss(
    tmp_path: Path, database: PostgresDatabase
) -> None:
    with ExitStack() as ending:
        connection = ending.enter_context(database.connect())
        endpoint = ending.enter_context(WebhookEndpoint())
        for table in TABLES:
            connection.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, note text, total bigint)")
            connection.execute(f"INSERT INTO {table} SELECT n, 'n' || n, n FROM generate_series(1, 300) n")
        nodes = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            file = write_file(
                tmp_path / name,
                database,
                endpoint,
                slot=f"hooked_{name}",
                leader={"lease": str(tmp_path / "shared"), "seconds": "10s", "interval": "200ms"},
                headers={"X-Node": name},
                node_id=name,
            )
            nodes.append(ending.enter_context(RunningPipeline(file)))
            # The first one makes the publication that both use.
            wait_until(lambda: bool(connection.execute("SELECT FROM pg_publication").fetchall()))
        for run in nodes:
            run.wait_until(all_ready)
        made: set[tuple[str, int, int]] = set()

        def change() -> None:
            """One transaction over all tables; no two changes in it are alike."""
            number = 1000 + len(made)
            with connection.transaction():
                for table in TABLES:
                    for key in (number, number % 300 + 1):
                        connection.execute(
                            f"INSERT INTO {table} VALUES (%s, 'made', %s) ON CONFLICT (id) DO UPDATE SET total = %s",
                            [key, number, number],
                        )
                        made.add((f"public.{table}", key, number))

        def missing() -> set[tuple[str, int, int]]:
            changes = (event for event in events(endpoint) if event["type"] != "tailrace.read")
            return made - {
                (each["subject"], each["data"]["key"]["id"], each["data"]["after"]["total"]) for each in changes
            }

        for _ in range(20):
            change()
        wait_until(lambda: not missing())
        wait_until(lambda: any(map(_leads, nodes)))
        leader, follower = sorted(nodes, key=_leads, reverse=True)
        assert {request.headers["x-node"] for request in endpoint.requests} == {leader.file.parent.name}
        queue = QueueReader(follower.file.parent / "state" / "queue")
        wait_until(lambda: START < queue.released == queue.head)
        # The leader dies with a request of which it does not know that it was taken, and others that no one took.
        endpoint.rule = always(Reply(503))
        endpoint.script(Reply(500, takes=True))
        before = len(endpoint.requests)
        for _ in range(20):
            change()
        wait_until(lambda: len(endpoint.requests) > before + 1)
        leader.kill()
        endpoint.rule = always(Reply())
        for _ in range(20):
            change()
        wait_until(lambda: not missing())
        posted = [request.headers["x-node"] for request in endpoint.requests]
        assert [name for name, _ in groupby(posted)] == [leader.file.parent.name, follower.file.parent.name]
        wait_until(lambda: _leads(follower))
        state = replay(events(endpoint))
        for table in TABLES:
            assert state[f"public.{table}"] == rows_of(database, table)
        wait_until(lambda: queue.released == queue.head)
        follower.terminate()
        assert follower.wait() == 0
        assert endpoint.duplicates()
        print(f"{len(made)} changes, {endpoint.duplicates()} repeats, {len(posted)} requests")


def test_the_event_stream_has_transactions_columns_and_messages_in_the_order_of_the_log(
    tmp_path: Path, database: PostgresDatabase
) -> None:
    with database.connect() as connection, WebhookEndpoint() as endpoint:
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY)")
        connection.execute("CREATE TABLE items (id int PRIMARY KEY)")
        file = write_file(tmp_path, database, endpoint, events=True)
        content = yaml.safe_load(file.read_text())
        content["source"]["messages"] = True
        file.write_text(yaml.safe_dump(content))
        apply(file)
        with connection.transaction():
            connection.execute("INSERT INTO orders VALUES (1)")
            connection.execute("SELECT pg_logical_emit_message(true, 'audit', 'paid')")
            connection.execute("INSERT INTO items VALUES (7)")
        connection.execute("SELECT pg_logical_emit_message(false, 'audit', 'alone')")
        connection.execute("ALTER TABLE orders ADD COLUMN note text")
        connection.execute("INSERT INTO orders VALUES (2, 'n')")
        with RunningPipeline(file, once=True, failpoints="queue.appended:kill!once") as run:
            assert run.wait() == -signal.SIGKILL
        apply(file)
        found = events(endpoint)
    assert [" ".join([event["type"][9:], event.get("subject", "")]).strip() for event in found] == [
        *("begin", "relation public.orders", "insert public.orders"),
        *("relation pg_logical.message", "insert pg_logical.message"),
        *("relation public.items", "insert public.items", "commit"),
        *("begin", "insert pg_logical.message", "commit"),
        *("begin", "relation public.orders", "insert public.orders", "commit"),
    ]
    assert found[0]["data"]["txn"] == found[7]["data"]["txn"] == found[2]["data"]["txn"]
    assert [
        event["data"]["after"]["content"]
        for event in found
        if event.get("subject") == "pg_logical.message" and event["type"] == "tailrace.insert"
    ] == ["cGFpZA==", "YWxvbmU="]
    assert [column["name"] for column in found[12]["data"]["columns"]] == ["id", "note"]
