"""The judge of all end-to-end tests is itself put to the test: no difference of any type may escape it."""

from __future__ import annotations

from deltalake import DeltaTable
from pyspark.sql import SparkSession

from tailrace.demo.compare import compare
from tailrace.stream.pipeline import Pipeline
from tests.support.database import PostgresDatabase
from tests.support.scenario import Scenario
from tests.support.type_zoo import VALUES, create_zoo


def test_every_kind_of_difference_is_found_and_named_by_its_key(
    spark: SparkSession, database: PostgresDatabase, scenario: Scenario
) -> None:
    with database.connect() as conn:
        create_zoo(conn)
        known = {name for (name,) in conn.execute(
            "SELECT attname::text FROM pg_attribute WHERE attrelid = 'zoo.every_type'::regclass AND attnum > 1"
        )}  # fmt: skip
        columns = {f"c{index}": values for index, values in enumerate(VALUES.values()) if f"c{index}" in known}
        literals = {name: [value.replace("'", "''") for value in values] for name, values in columns.items()}
        first = ", ".join(f"'{values[0]}'" for values in literals.values())
        conn.execute(f"INSERT INTO zoo.every_type VALUES (1, {first}), (2, {first})".encode())
        conn.execute("INSERT INTO zoo.log (kind) VALUES ('a'), ('a'), ('b')")
    Pipeline.from_file(scenario.file).run(once=True)
    tables = {str(table.table): table for table in scenario.tables()}
    assert compare(scenario.dsn, tables.values(), scenario.lake) == []

    every = [tables["zoo.every_type"]]
    for name, values in literals.items():
        for other in ["NULL", *(f"'{value}'" for value in values[1:])]:
            database.run(f"UPDATE zoo.every_type SET {name} = {other} WHERE id = 2")
            (found,) = compare(scenario.dsn, every, scenario.lake)
            assert (found.missing, found.extra, found.keys) == (1, 1, (("2",),)), f"{name} = {other}"
            assert "(2)" in str(found)
        database.run(f"UPDATE zoo.every_type SET {name} = '{values[0]}' WHERE id = 2")
    assert compare(scenario.dsn, every, scenario.lake) == []

    lake = DeltaTable(str(scenario.lake / "zoo" / "log"))
    lake.delete("kind = 'a'")
    (found,) = compare(scenario.dsn, tables.values(), scenario.lake)
    assert (found.source_rows, found.lake_rows, found.missing, found.extra, found.keys) == (3, 1, 2, 0, ())
    database.run("DELETE FROM zoo.every_type WHERE id = 1")
    (found,) = compare(scenario.dsn, every, scenario.lake)
    assert (found.missing, found.extra, found.keys) == (0, 1, (("1",),))
