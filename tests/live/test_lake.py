"""What the lake holds after tables went missing there, and after types and keys that are unlike most."""

from __future__ import annotations

from collections.abc import Callable

from deltalake import DeltaTable

from tailrace.state import SqliteStore, TableState
from tests.support.database import PostgresDatabase
from tests.support.scenario import Scenario


def test_a_table_that_is_gone_from_the_lake_stops_and_goes_on_with_all_rows_once_it_is_back(
    scenario: Scenario,
) -> None:
    scenario.sql(
        "CREATE TABLE items (id int PRIMARY KEY, a text)",
        "INSERT INTO items SELECT i, 'row ' || i FROM generate_series(1, 100) i",
        "CREATE TABLE tree (path int[] PRIMARY KEY, a text)",
        "INSERT INTO tree VALUES ('{1}', 'root'), ('{1,2}', 'leaf')",
    )
    scenario.apply()
    assert scenario.differences() == []

    items, away = scenario.lake / "public" / "items", scenario.folder / "away"
    items.rename(away)
    scenario.sql("INSERT INTO items VALUES (101, 'new')", "UPDATE tree SET a = 'changed' WHERE path = '{1}'")
    scenario.apply(errored=["public.items"])
    with SqliteStore("shop", scenario.state).open_reading() as store:
        [errored] = [table for table in store.tables() if table.state is TableState.ERRORED]
    assert str(errored.name) == "public.items"
    assert not items.exists()
    assert scenario.differences(without=("public.items",)) == []

    away.rename(items)
    scenario.execute("retry", "public.items")
    scenario.apply()
    assert scenario.differences() == []
    assert scenario.doubled() == []


def test_what_a_narrower_type_rounded_and_what_a_deferrable_key_let_pass_is_in_the_lake(scenario: Scenario) -> None:
    scenario.sql(
        "CREATE TABLE scaled (id int PRIMARY KEY, n numeric(12,4))",
        "CREATE TABLE floating (id int PRIMARY KEY, n double precision)",
        "INSERT INTO scaled VALUES (1, 1.2345), (2, 2)",
        "INSERT INTO floating VALUES (1, 1.2345), (2, 2)",
        "CREATE TABLE ranked (id int PRIMARY KEY DEFERRABLE, a text)",
        "ALTER TABLE ranked REPLICA IDENTITY FULL",
        "INSERT INTO ranked SELECT i, 'row ' || i FROM generate_series(1, 4) i",
    )
    scenario.apply()
    scenario.sql(
        "ALTER TABLE scaled ALTER n TYPE numeric(10,2)",
        "ALTER TABLE floating ALTER n TYPE real",
        "UPDATE scaled SET n = 3 WHERE id = 2",
        "UPDATE floating SET n = 3 WHERE id = 2",
        "UPDATE ranked SET id = id + 1",
    )
    scenario.apply()
    assert scenario.differences() == []
    for table in ("scaled", "floating"):
        rows = DeltaTable(str(scenario.lake / "public" / table)).to_pyarrow_table().to_pylist()
        upstream = scenario.value(f"SELECT array_agg(n::float8 ORDER BY id) FROM {table}")
        assert [float(row["n"]) for row in sorted(rows, key=lambda row: row["id"])] == upstream


def test_a_history_holds_every_change_once_though_the_run_was_killed(
    database: PostgresDatabase, make_scenario: Callable[..., Scenario]
) -> None:
    scenario = make_scenario(database.dsn, destination={"history": ["public.items"]})
    scenario.sql("CREATE TABLE items (id int PRIMARY KEY, a text)", "INSERT INTO items VALUES (1, 'copied')")
    scenario.apply()
    scenario.sql(
        "UPDATE items SET a = 'once' WHERE id = 1",
        "UPDATE items SET a = 'twice' WHERE id = 1",
        "UPDATE items SET id = 2",
        "DELETE FROM items",
        "INSERT INTO items VALUES (3, 'new')",
    )
    assert scenario.run_once(failpoints="delta.committed:kill") != 0
    scenario.apply()
    rows = DeltaTable(str(scenario.lake / "public" / "items")).to_pyarrow_table().sort_by("_tailrace_position")
    assert rows.select(["_tailrace_op", "id", "a"]).to_pylist() == [
        {"_tailrace_op": op, "id": key, "a": text}
        for op, key, text in [
            ("read", 1, "copied"),
            ("update", 1, "once"),
            ("update", 1, "twice"),
            ("delete", 1, None),
            ("insert", 2, "twice"),
            ("delete", 2, None),
            ("insert", 3, "new"),
        ]
    ]
    assert "public.items: it has no key, or is kept as a changelog" in scenario.execute("verify")


def test_the_versions_of_rows_are_there_once_though_the_run_was_killed(
    database: PostgresDatabase, make_scenario: Callable[..., Scenario]
) -> None:
    scenario = make_scenario(database.dsn, destination={"mode": {"public.items": "history"}})
    scenario.sql(
        "CREATE TABLE items (id int PRIMARY KEY, a text)", "INSERT INTO items VALUES (1, 'copied'), (2, 'stays')"
    )
    scenario.apply()
    scenario.sql("UPDATE items SET a = 'once' WHERE id = 1", "UPDATE items SET id = 3 WHERE id = 1")
    for failpoint in ("delta.before_commit:kill", "delta.committed:kill"):
        assert scenario.run_once(failpoints=failpoint) != 0
    scenario.apply()
    scenario.sql("DELETE FROM items WHERE id = 3")
    scenario.execute("resync", "public.items")
    scenario.apply()
    rows = DeltaTable(str(scenario.lake / "public" / "items")).to_pyarrow_table().sort_by("_tailrace_from").to_pylist()
    assert sorted((row["id"], row["a"], row["_tailrace_is_current"]) for row in rows) == [
        (1, "copied", False),
        (1, "once", False),
        (2, "stays", True),
        (3, "once", False),
    ]
    assert all(row["_tailrace_is_current"] or row["_tailrace_valid_to"] is not None for row in rows)
    assert "public.items" in scenario.execute("verify")
    assert scenario.doubled() == []


def test_a_new_column_that_is_widened_before_it_is_discovered_keeps_what_older_rows_hold(scenario: Scenario) -> None:
    scenario.execute("prepare")
    scenario.sql("CREATE TABLE items (id int PRIMARY KEY, a text)", "INSERT INTO items VALUES (1, 'a'), (2, 'b')")
    scenario.apply()
    scenario.sql(
        "ALTER TABLE items ADD COLUMN n int DEFAULT 5",
        "ALTER TABLE items ALTER COLUMN n TYPE bigint",
        "UPDATE items SET a = 'c' WHERE id = 2",
    )
    scenario.apply()
    assert scenario.differences() == []
