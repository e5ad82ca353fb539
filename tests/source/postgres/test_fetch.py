"""Rows that a destination lacks, read again upstream."""

from __future__ import annotations

import json

import pyarrow as pa

from tailrace.model.schema import TableSchema
from tailrace.source.postgres.bulk import bulk
from tailrace.source.postgres.catalog import describe, list_published, list_tables
from tailrace.source.postgres.connection import session
from tailrace.source.postgres.copy import fetch
from tailrace.source.postgres.copy_query import Converter, select_list
from tests.support.database import PostgresDatabase


def grid(database: PostgresDatabase) -> TableSchema:
    database.run(
        "CREATE TABLE grid (id int PRIMARY KEY, n int, cells int[])",
        "INSERT INTO grid VALUES (1, 1, '{{1,2},{3,4}}'), (2, 2, '{5}'), (3, 3, '{6}')",
        "CREATE PUBLICATION pub FOR TABLE grid",
    )
    with session(database.dsn, "testing") as connection:
        [published] = describe(connection, list_tables(connection), list_published(connection, "pub"))
    return published.schema


def keys(*ids: int) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int32())})


def test_a_value_that_does_not_fit_comes_with_its_text(database: PostgresDatabase) -> None:
    rows = fetch(database.dsn, grid(database), keys(1, 2, 9)).sort_by("id").to_pylist()
    assert [(row["id"], row["cells"]) for row in rows] == [(1, None), (2, [5])]
    exact = [json.loads(row["_tailrace_exact"] or "{}") for row in rows]
    assert exact == [{"cells": "{{1,2},{3,4}}"}, {}]


def test_rows_whose_values_all_fit_have_the_columns_of_the_table_only(database: PostgresDatabase) -> None:
    table = grid(database)
    assert fetch(database.dsn, table, keys(2, 3)).column_names == ["id", "n", "cells"]
    assert fetch(database.dsn, table, keys(9)).num_rows == 0


def test_rows_of_tables_that_inherit_from_one_are_not_its_own(database: PostgresDatabase) -> None:
    table = grid(database)
    database.run("CREATE TABLE heir () INHERITS (grid)", "INSERT INTO heir VALUES (2, 20, '{}'), (9, 90, '{}')")
    assert fetch(database.dsn, table, keys(2, 9)).column("n").to_pylist() == [2]


def test_rows_are_found_by_keys_that_python_or_a_plain_text_could_not_hold(database: PostgresDatabase) -> None:
    database.run(
        "CREATE TABLE odd (id int[], words text[], day date, at timestamptz, days date[],"
        " PRIMARY KEY (id, words, day, at, days))",
        """INSERT INTO odd VALUES ('{1,NULL}', '{"a b","q\\"\\\\",NULL,""}', '0044-03-15 BC',
        '12026-01-01 00:00:00.5+00', '{5874897-12-31}'),
        ('{}', '{}', '5874897-12-31', '4713-11-24 00:00:00+00 BC', '{}')""",
        "CREATE PUBLICATION pub FOR TABLE odd",
    )
    with session(database.dsn, "testing") as connection:
        [published] = describe(connection, list_tables(connection), list_published(connection, "pub"))
    with bulk(database.dsn, "testing") as rows, rows.cursor() as cursor:
        cursor.execute(f"SELECT {select_list(published.schema).as_string()} FROM public.odd")
        [batch] = cursor.fetch_batches()
    wanted = pa.Table.from_struct_array(Converter(published.schema).convert(batch)[0])
    assert fetch(database.dsn, published.schema, wanted).num_rows == wanted.num_rows == 2
