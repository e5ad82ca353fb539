"""The JSON API over a real server and real state stores."""

from __future__ import annotations

import gzip
import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tailrace.config.pipeline import load
from tailrace.dashboard.openapi import describe
from tailrace.model.change import end_of
from tailrace.option.table import TableOptions
from tailrace.state import BatchRecord, RunnerLock, StateStore, TableState, TableUpdate
from tailrace.state.layout import FORMAT
from tailrace.state.postgres import PostgresStore
from tailrace.state.record import ChangeCounts
from tailrace.stream.supervisor import Supervisor
from tailrace.testing.wait import wait_until
from tests.support.dashboard import (
    AMOUNT,
    EVENTS,
    ITEMS,
    ORDERS,
    PAYMENTS,
    VALUE,
    Client,
    fill,
    fill_many,
    open_store,
    serving,
    write_file,
)
from tests.support.database import PostgresDatabase

HOSTILE = 'public."a/b?c#d%2F<img src=x>\n../retry"'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_file(tmp_path)


@pytest.fixture
def store(file: Path) -> Iterator[StateStore]:
    with open_store(file) as opened:
        fill(opened)
        yield opened


@pytest.fixture
def client(file: Path, store: StateStore) -> Iterator[Client]:
    with RunnerLock(load(file, connects=False).state), serving([file]) as served:
        yield served


# The answers are what the description says.


def check(value: Any, schema: dict[str, Any], place: str, schemas: dict[str, Any]) -> None:
    """Raises AssertionError, with the place, where a value is not what its schema says."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        if value is not None:
            check(value, schema["anyOf"][0], place, schemas)
        return
    types: dict[str, Any] = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "array": list,
        "object": dict,
    }
    assert isinstance(value, types[schema["type"]]), f"{place} is {value!r}, not a {schema['type']}"
    assert "enum" not in schema or value in schema["enum"], f"{place} is {value!r}, not one of {schema['enum']}"
    if schema.get("format") == "date-time":
        assert datetime.fromisoformat(value).tzinfo is not None, place
    if schema["type"] == "array":
        for index, one in enumerate(value):
            check(one, schema["items"], f"{place}[{index}]", schemas)
    if "properties" in schema:
        assert value.keys() == schema["properties"].keys(), f"{place} has other keys"
        for key, one in value.items():
            check(one, schema["properties"][key], f"{place}.{key}", schemas)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/api/v1/pipelines", "Pipelines"),
        ("/api/v1/pipelines/shop", "Pipeline"),
        ("/api/v1/pipelines/shop?hours=24", "Pipeline"),
        ("/api/v1/pipelines/shop/tables", "Tables"),
        (f"/api/v1/pipelines/shop/tables/{ORDERS}", "Table"),
        (f"/api/v1/pipelines/shop/tables/{PAYMENTS}", "Table"),
        (f"/api/v1/pipelines/shop/tables/{ITEMS}", "Table"),
        ("/api/v1/pipelines/shop/requests/2", "Request"),
        ("/healthz", "Alive"),
        ("/api/v1/nothing", "Error"),
        ("/api/v1/pipelines/nothing", "Error"),
        ("/api/v1/pipelines/shop/requests/999", "Error"),
        (f"/api/v1/pipelines/shop/requests/{10**40}", "Error"),
        ("/api/v1/pipelines/shop/tables/public.nothing", "Error"),
        ("/api/v1/pipelines/shop?hours=25", "Error"),
        ("/api/v1/pipelines/shop?hours=x", "Error"),
    ],
)
def test_every_answer_has_exactly_the_keys_that_its_description_has(client: Client, path: str, name: str) -> None:
    reply = client.get(path)
    schemas = describe()["components"]["schemas"]
    check(reply.json, {"$ref": name}, name, schemas)
    assert (reply.status >= 400) == (name == "Error")


def test_actions_and_logins_answer_as_described(client: Client) -> None:
    schemas = describe()["components"]["schemas"]
    asked = client.act("retry", PAYMENTS)
    assert asked.status == 202
    check(asked.json, {"$ref": "Asked"}, "Asked", schemas)
    check(client.act("retry", ORDERS).json, {"$ref": "Asked"}, "Asked", schemas)
    check(client.post("/login", {"token": "x"}).json, {"$ref": "Login"}, "Login", schemas)


def test_the_description_has_every_route_and_is_openapi() -> None:
    from tailrace.dashboard.application import DashboardApplication
    from tailrace.dashboard.guard import Access

    application = DashboardApplication([], Access("127.0.0.1"), lambda found: b"")
    routes = {
        (route.path.replace(":name", "").replace(":int", ""), method)
        for route in application.routes
        for method in route.methods or ()
        if method != "HEAD" and route.path not in application.files
    }
    api = describe()
    described = {(path, method.upper()) for path, methods in api["paths"].items() for method in methods}
    assert described == routes
    assert api["openapi"].startswith("3.1.")
    assert {"title", "version"} <= api["info"].keys()
    operations = [(path, each) for path, methods in api["paths"].items() for each in methods.values()]
    names = [each["operationId"] for _, each in operations]
    assert len(set(names)) == len(names)
    for path, each in operations:
        in_path = {one["name"] for one in each["parameters"] if one["in"] == "path"}
        assert in_path == {part.strip("{}") for part in path.split("/") if part.startswith("{")}
        assert all(one["required"] for one in each["parameters"] if one["in"] == "path")
        assert all(one["description"] for one in each["responses"].values())
    text = json.dumps(api)
    referred = {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert referred == api["components"]["schemas"].keys() - {"Pipelines"} | {"Pipelines"}


# What the answers say.


def test_the_list_has_every_pipeline_with_its_health(tmp_path: Path, file: Path, store: StateStore) -> None:
    other = write_file(tmp_path, "billing")
    with serving([file, other]) as client:
        shop, billing = client.get("/api/v1/pipelines").json["pipelines"]
    assert (shop["name"], shop["file"]) == ("shop", str(file))
    assert shop["tables"] == {"total": 4, "errored": 1, "paused": 1, "copying": 1, "following": 1}
    assert shop["health"]["level"] == "failing"
    # A pipeline that never ran is one of the list, with the command that starts it.
    assert billing["health"]["level"] == "unknown"
    assert "has not run yet" in billing["health"]["sentence"]
    assert billing["health"]["fix"]["commands"] == [f"tailrace run {other}"]


def test_health_names_the_table_that_needs_someone_and_what_to_do(client: Client, file: Path) -> None:
    health = client.pipeline()["health"]
    assert (health["level"], health["sentence"]) == ("failing", f"1 of 4 tables needs you: {PAYMENTS}")
    assert health["table"] == PAYMENTS
    assert health["fix"]["commands"] == [f"tailrace resync {file} {PAYMENTS}", f"tailrace skip {file} {PAYMENTS}"]


def test_a_pipeline_shows_its_way_its_slot_its_batches_and_what_happened(client: Client) -> None:
    shown = client.pipeline()
    assert [stage["stage"] for stage in shown["way"]] == ["source", "slot", "journal", "batch", "destination"]
    slot = shown["slot"]
    assert (slot["kept_bytes"], slot["safe_bytes"], slot["limit_bytes"]) == (4900, 8_000_000, 8_004_900)
    assert slot["growth"] == pytest.approx(10.0)
    assert slot["full_in"] == pytest.approx(800_000.0)
    assert slot["name"] == "tailrace_shop"
    [batch] = shown["batches"]
    assert (batch["rows"], batch["bytes"], batch["copied"], batch["inserts"]) == (40, 4000, 130, 21)
    assert shown["bytes_per_second"] > 0
    assert batch["phases"]["write"] == 0.7
    assert shown["series"]["changes_per_second"] == [5.0] * 30
    assert len({len(column) for column in shown["series"].values()}) == 1
    assert [event["kind"] for event in shown["events"][:2]] == ["request", "request"]
    assert (f"{PAYMENTS} stopped: {AMOUNT}", PAYMENTS) in [(one["text"], one["table"]) for one in shown["events"]]
    assert [event["at"] for event in shown["events"]] == sorted((one["at"] for one in shown["events"]), reverse=True)
    [request] = shown["requests"]
    assert (request["kind"], request["table"], request["outcome"]) == ("pause", EVENTS, "paused")
    [notice] = shown["notices"]
    assert notice["fix"]["commands"] == ["ALTER TABLE public.log ADD PRIMARY KEY (id);"]
    [alert] = shown["alerts"]
    assert (alert["name"], alert["text"], alert["tables"], alert["failure"]) == ("errored", AMOUNT, [PAYMENTS], None)
    assert shown["runner"]["pid"] > 0


def test_a_table_shows_its_error_with_code_fix_and_how_long_its_log_is_kept(client: Client, file: Path) -> None:
    table = client.table(PAYMENTS)
    error = table["error"]
    assert (error["code"], error["docs"], error["message"]) == ("unfit", "docs/errors.md#unfit", AMOUNT)
    assert error["fix"]["commands"] == [f"tailrace resync {file} {PAYMENTS}", f"tailrace skip {file} {PAYMENTS}"]
    since, until = (datetime.fromisoformat(one) for one in (table["since"], error["log_kept_until"]))
    assert (until - since).total_seconds() == 86_400
    assert (error["attempts"], error["attempts_allowed"], error["failed_in"]) == (3, 5, "FinishedCopy")
    [letter] = table["letters"]
    assert (letter["kind"], letter["status"], letter["reason"]) == ("UnfitError", "waiting", AMOUNT)
    assert client.table(ORDERS)["error"] is None


def test_a_table_shows_its_columns_over_time(client: Client) -> None:
    table = client.table(ORDERS)
    assert [column["name"] for column in table["columns"]] == ["id", "amount", "status", "note"]
    assert [column["name"] for column in table["columns"] if column["key"]] == ["id"]
    second, first = table["versions"]
    assert (first["version"], first["changes"]) == (1, ["3 columns"])
    assert second["changes"] == [
        "note text added",
        "amount numeric(18,2) became numeric(28,2)",
        "state renamed to status",
    ]
    [hour] = table["hours"]
    assert (hour["copied"], hour["inserts"], hour["updates"], hour["deletes"]) == (10, 7, 5, 2)


def test_each_action_says_its_command_and_whether_it_would_do_something(client: Client, file: Path) -> None:
    actions = {one["action"]: one for one in client.table(PAYMENTS)["actions"]}
    assert {name for name, one in actions.items() if one["possible"]} == {"resync", "pause", "retry", "skip"}
    assert actions["resume"]["hindrance"] == "it is not paused"
    assert actions["skip"]["command"] == f"tailrace skip {file} {PAYMENTS}"
    actions = {one["action"]: one for one in client.table(EVENTS)["actions"]}
    assert {name for name, one in actions.items() if one["possible"]} == {"resync", "resume"}
    assert actions["skip"]["hindrance"] == "no change waits to be skipped"


def test_a_row_has_what_the_list_shows(client: Client) -> None:
    rows = {row["name"]: row for row in client.pipeline("shop", "/tables")["tables"]}
    assert {name: row["group"] for name, row in rows.items()} == {
        ORDERS: "following",
        PAYMENTS: "errored",
        EVENTS: "paused",
        ITEMS: "copying",
    }
    assert (rows[ORDERS]["inserts"], rows[ORDERS]["updates"], rows[ORDERS]["deletes"]) == (7, 5, 2)
    assert rows[ORDERS]["hours"][-1] + rows[ORDERS]["hours"][-2] == 14
    assert (rows[ITEMS]["rows_copied"], rows[ITEMS]["rows_total"]) == (100, 1000)
    assert rows[PAYMENTS]["letters"] == 1


# Only what changed.


def test_since_gives_only_the_rows_that_changed(client: Client, store: StateStore) -> None:
    # A rate is known from the second reading on.
    wait_until(lambda: client.pipeline("shop", "/tables")["tables"][0]["rows_per_second"] is not None)
    everything = client.pipeline("shop", "/tables")
    assert (everything["complete"], everything["total"]) == (True, 4)
    store.forget_table("3")
    store.apply_batch(
        BatchRecord(1, {"lsn": 2}, str(end_of(1000))),
        [TableUpdate("1", changes_applied=1, counts=ChangeCounts(0, 1), position=str(end_of(1000)))],
    )

    def changed() -> Any:
        return client.pipeline("shop", f"/tables?since={everything['version']}")

    wait_until(lambda: changed()["version"] != everything["version"])
    news = changed()
    assert (news["complete"], news["gone"], news["total"]) == (False, ["3"], 3)
    assert ORDERS in {row["name"] for row in news["tables"]}
    assert ITEMS not in {row["name"] for row in news["tables"]}
    assert next(row["inserts"] for row in news["tables"] if row["name"] == ORDERS) == 8


@pytest.mark.parametrize("since", ["", "x", "0-1", "%00", "9" * 5000, "{life}-99", "{life}-" + "0" * 5000, "{life}--1"])
def test_a_version_that_is_not_known_gives_all_rows(client: Client, since: str) -> None:
    life = client.pipeline("shop", "/tables")["version"].partition("-")[0]
    assert client.pipeline("shop", f"/tables?since={since.replace('{life}', life)}")["complete"] is True


def test_an_answer_that_did_not_change_is_not_sent_again(client: Client) -> None:
    for path in ("/api/v1/pipelines/shop/tables", "/openapi.json", "/healthz"):
        first = client.get(path)
        again = client.get(path, If_None_Match=f'"other", {first.headers["etag"]}')
        assert (again.status, again.body) == (304, b""), path
        assert again.headers["etag"] == first.headers["etag"]
        assert client.get(path, If_None_Match='"other"').status == 200


def test_a_detail_of_which_only_the_time_differs_has_the_same_tag(client: Client) -> None:
    first = client.get("/api/v1/pipelines/shop")
    at = first.json["at"]
    wait_until(lambda: client.pipeline()["at"] != at)
    again = client.get("/api/v1/pipelines/shop")
    first_values, values = ({**reply.json, "at": None} for reply in (first, again))
    assert (first.headers["etag"] == again.headers["etag"]) == (first_values == values)


def test_a_large_answer_is_compressed_for_those_who_take_it(client: Client) -> None:
    plain, packed = (
        client.get("/api/v1/pipelines/shop/tables"),
        client.get("/api/v1/pipelines/shop/tables", Accept_Encoding="br, gzip;q=0.8"),
    )
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.body) == plain.body
    assert plain.headers["vary"] == "Accept-Encoding"
    assert "content-encoding" not in client.get("/healthz", Accept_Encoding="gzip").headers


# Actions.


def settle(store: StateStore) -> None:
    """What the runner does between two batches."""
    Supervisor(store, TableOptions(), is_stopped=lambda upstream_id: True).poll()


@pytest.mark.parametrize(
    ("action", "table", "outcome"),
    [
        ("retry", PAYMENTS, "retried"),
        ("skip", PAYMENTS, "skipped 1"),
        ("pause", ORDERS, "paused"),
        ("resume", EVENTS, "resumed"),
    ],
)
def test_an_action_is_taken_by_the_runner_and_its_outcome_is_shown(
    client: Client, store: StateStore, action: str, table: str, outcome: str
) -> None:
    reply = client.act(action, table)
    assert reply.status == 202, reply.body
    number = reply.json["request"]
    assert reply.json["command"].startswith(f"tailrace {action} ")
    assert client.pipeline("shop", f"/requests/{number}")["done_at"] is None
    assert next(one for one in client.table(table)["actions"] if one["action"] == action)["asked"]
    settle(store)
    wait_until(lambda: client.pipeline("shop", f"/requests/{number}")["outcome"] == outcome)
    wait_until(lambda: outcome in [one["outcome"] for one in client.table(table)["requests"] if one["id"] == number])


def test_a_resync_waits_for_the_follower_and_the_same_one_again_is_the_same_request(client: Client) -> None:
    first, second = client.act("resync", ORDERS), client.act("resync", ORDERS)
    assert (first.status, second.json["request"]) == (202, first.json["request"])


def test_one_letter_can_be_skipped_alone(client: Client, store: StateStore) -> None:
    [letter] = client.table(PAYMENTS)["letters"]
    assert client.act("skip", PAYMENTS, {"letter": letter["id"]}).status == 202
    [request] = store.open_requests()
    assert request.argument == str(letter["id"])


def test_what_would_do_nothing_is_said_so_and_asks_for_nothing(client: Client, store: StateStore) -> None:
    reply = client.act("retry", ORDERS)
    assert (reply.status, reply.json["request"]) == (200, None)
    assert reply.json["text"] == f"{ORDERS} is not in error: nothing to do"
    assert store.open_requests() == []


@pytest.mark.parametrize(
    ("action", "table", "value", "status"),
    [
        ("drop", ORDERS, {}, 404),
        ("retry", "public.nothing", {}, 404),
        ("skip", ORDERS, {}, 409),
        ("retry", PAYMENTS, {"letter": 1}, 400),
        ("skip", PAYMENTS, {"letter": "1"}, 400),
        ("skip", PAYMENTS, {"letter": True}, 400),
        ("skip", PAYMENTS, {"letter": 77}, 409),
        ("skip", PAYMENTS, {"letter": 10**30}, 409),
        ("skip", PAYMENTS, {"letters": 1}, 400),
        ("pause", ORDERS, {"table": EVENTS}, 400),
        ("retry", PAYMENTS, [], 400),
    ],
)
def test_an_action_that_makes_no_sense_is_refused_and_asks_for_nothing(
    client: Client, store: StateStore, action: str, table: str, value: object, status: int
) -> None:
    reply = client.act(action, table, value)
    assert (reply.status, bool(reply.error["message"])) == (status, True)
    assert store.open_requests() == []


def test_an_action_while_nothing_runs_is_done_by_the_next_run(file: Path, store: StateStore) -> None:
    with serving([file]) as client:
        reply = client.act("retry", PAYMENTS)
    assert (reply.status, reply.json["runner"]) == (202, None)
    assert "at its next start" in reply.json["text"]


# Pipelines that cannot be read.


def test_a_pipeline_that_never_ran_is_shown_and_its_parts_say_why_not(tmp_path: Path) -> None:
    file = write_file(tmp_path)
    with serving([file]) as client:
        for path in ("", "/tables", f"/tables/{ORDERS}", "/requests/1"):
            reply = client.get(f"/api/v1/pipelines/shop{path}")
            assert (reply.status, reply.error["code"]) == (503, "config")
            assert reply.error["fix"]["commands"] == [f"tailrace run {file}"]
        assert client.act("retry", ORDERS).status in (409, 503)
        # Once it has run, it is there.
        with open_store(file) as store:
            fill(store)
            wait_until(lambda: client.get("/api/v1/pipelines/shop").status == 200)


def test_a_state_of_a_newer_tailrace_is_refused_with_the_fix(tmp_path: Path) -> None:
    file = write_file(tmp_path)
    with open_store(file) as store:
        fill(store)
    with closing(sqlite3.connect(load(file, connects=False).state / "state.db")) as database:
        database.execute(f"PRAGMA user_version = {FORMAT + 1}")
    with serving([file]) as client:
        reply = client.get("/api/v1/pipelines/shop")
        assert reply.status == 503
        assert "newer tailrace" in reply.error["message"]
        assert client.get("/api/v1/pipelines").json["pipelines"][0]["health"]["level"] == "unknown"


def test_a_locked_store_holds_up_neither_the_server_nor_other_pipelines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked, other = write_file(tmp_path, "locked"), write_file(tmp_path, "other")
    for file in (locked, other):
        with open_store(file) as store:
            fill(store)
    path = load(locked, connects=False).state / "state.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("PRAGMA locking_mode = EXCLUSIVE")
        holder.execute("UPDATE pipeline SET serial = serial")
        monkeypatch.setattr("tailrace.state.sqlite._BUSY_SECONDS", 3.0)
        with serving([locked, other]) as client:
            replies: list[int] = []
            threads = [
                threading.Thread(target=lambda: replies.append(client.get("/api/v1/pipelines/locked").status))
                for _ in range(12)
            ]
            for thread in threads:
                thread.start()
            # More than there are threads wait for the locked one, and the other is answered meanwhile.
            assert client.get("/api/v1/pipelines/other").status == 200
            assert replies == []
            for thread in threads:
                thread.join()
            assert replies == [503] * 12


def test_a_state_in_postgres_is_served_from_there(tmp_path: Path, database: PostgresDatabase) -> None:
    file = write_file(tmp_path, store=f"store: {{type: postgres, dsn: '{database.dsn}'}}\n")
    with PostgresStore("shop", tmp_path / "elsewhere", database.dsn).open() as store:
        fill(store)
        with serving([file]) as client:
            assert client.table(PAYMENTS)["error"]["code"] == "unfit"
            number = client.act("pause", ORDERS).json["request"]
            settle(store)
            wait_until(lambda: client.pipeline("shop", f"/requests/{number}")["outcome"] == "paused")
            assert len(client.pipeline("shop", "/tables")["tables"]) == 4


# Many viewers, many tables, odd names.


def test_several_viewers_cost_one_reading(file: Path, store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    from tailrace.dashboard import pipeline

    read: list[float] = []
    original = pipeline.WatchedPipeline._read

    def count(self: pipeline.WatchedPipeline) -> pipeline.Snapshot:
        read.append(1)
        return original(self)

    monkeypatch.setattr(pipeline.WatchedPipeline, "_read", count)
    monkeypatch.setattr(pipeline, "READ_SECONDS", 3600.0)
    with serving([file]) as client:
        bodies: set[bytes] = set()

        def look() -> None:
            for _ in range(5):
                bodies.add(client.get("/api/v1/pipelines/shop/tables").body)
                bodies.add(client.get("/api/v1/pipelines/shop").body)

        threads = [threading.Thread(target=look) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (len(read), len(bodies)) == (1, 2)


def test_five_hundred_tables_are_listed_and_each_that_changed_is_sent_again(file: Path) -> None:
    with open_store(file) as store, serving([file]) as client:
        updates = fill_many(store, 500)
        first = client.pipeline("shop", "/tables")
        assert len(first["tables"]) == 500
        store.apply_batch(BatchRecord(1, {"lsn": 2}, str(end_of(2))), updates[:100])

        def changed() -> list[Any]:
            rows: list[Any] = client.pipeline("shop", f"/tables?since={first['version']}")["tables"]
            return [row for row in rows if row["inserts"]]

        wait_until(lambda: len(changed()) == 100)
        packed = client.get("/api/v1/pipelines/shop/tables", Accept_Encoding="gzip")
        assert len(packed.body) < 40_000


def test_a_table_of_any_name_can_be_shown_and_asked_for(file: Path) -> None:
    with open_store(file) as store, serving([file]) as client:
        store.add_table("1", HOSTILE)
        assert client.table(HOSTILE)["name"] == HOSTILE
        reply = client.act("pause", HOSTILE)
        assert (reply.status, reply.json["table"]) == (202, HOSTILE)
        assert store.open_requests()[0].table == HOSTILE


def test_of_two_tables_of_one_name_the_newer_is_shown(file: Path) -> None:
    with open_store(file) as store, serving([file]) as client:
        store.add_table("1", ORDERS)
        store.fail_table("1", "it was dropped")
        store.add_table("9", ORDERS)
        assert (client.table(ORDERS)["id"], client.table(ORDERS)["state"]) == ("9", TableState.INIT)
        assert len(client.pipeline("shop", "/tables")["tables"]) == 2


# Health and metrics for other programs.


def test_healthz_says_that_the_server_lives_and_on_request_how_a_pipeline_does(
    client: Client, store: StateStore
) -> None:
    assert (client.get("/healthz").status, client.get("/healthz").json["status"]) == (200, "ok")
    reply = client.get("/healthz?pipeline=shop")
    assert (reply.status, reply.json["status"]) == (503, "failing")
    store.skip_dead_letters("2", [1])
    wait_until(lambda: client.get("/healthz?pipeline=shop").status == 200)
    assert client.get("/healthz?pipeline=other").status == 404


def test_metrics_have_every_pipeline_in_one_text(tmp_path: Path, file: Path, store: StateStore) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    with serving([file, write_file(tmp_path, "billing")]) as client:
        reply = client.get("/metrics")
    families = list(text_string_to_metric_families(reply.body.decode()))
    assert len({family.name for family in families}) == len(families)
    values = {(one.name, *sorted(one.labels.items())): one.value for family in families for one in family.samples}
    assert values["tailrace_up", ("pipeline", "shop")] == 1
    assert values["tailrace_up", ("pipeline", "billing")] == 0
    assert values["tailrace_table_inserts_total", ("pipeline", "shop"), ("table", ORDERS)] == 7
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")


# What the dashboard does without.


def test_it_imports_neither_spark_nor_a_driver(file: Path, store: StateStore) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.support import dashboard\n"
        f"with dashboard.serving([Path({str(file)!r})]) as client:\n"
        "    client.pipeline(); client.pipeline('shop', '/tables'); client.table(dashboard.ORDERS)\n"
        "    client.act('pause', dashboard.ORDERS)\n"
        "print(sorted({'pyspark', 'py4j', 'pandas', 'deltalake', 'psycopg'} & set(sys.modules)))\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_dead_letters_bytes_are_never_read(client: Client) -> None:
    for path in ("/api/v1/pipelines/shop", f"/api/v1/pipelines/shop/tables/{PAYMENTS}"):
        assert VALUE not in client.get(path).body
    assert datetime.now(UTC) > datetime.fromisoformat(client.pipeline()["at"])
