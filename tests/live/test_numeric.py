"""Columns that are numeric without a precision, kept as the decimals that the pipeline's file gives them."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from tests.support.invocation import invoke
from tests.support.scenario import Scenario

LONG = "0." + "1" * 30
ROWS = f"(1, 12.5, 1.25, 3.10, '{{1.5}}'), (2, 'NaN', {LONG}, 0, NULL), (3, 1e40, -7, 1, NULL)"


def lake(scenario: Scenario) -> tuple[pa.Schema, dict[int, dict[str, Any]]]:
    table = DeltaTable(str(scenario.lake / "public" / "prices"))
    rows = table.to_pyarrow_table().to_pylist()
    return pa.schema(table.schema().to_arrow()), {row["id"]: row for row in rows}


def test_a_numeric_is_a_decimal_on_request_in_copy_and_log_and_what_it_cannot_hold_is_exact(scenario: Scenario) -> None:
    scenario.write(
        source={"numeric": {"precision": 38, "scale": 10}},
        tables={"settings": {"public.prices": {"numeric": {"rate": {"precision": 20, "scale": 4}, "nope": SMALL}}}},
    )
    scenario.sql(
        "CREATE TABLE prices (id int PRIMARY KEY, amount numeric, rate numeric, fixed numeric(8, 2), tags numeric[])",
        f"INSERT INTO prices VALUES {ROWS}",
    )
    checked = invoke("check", scenario.file)
    assert "public.prices has no column nope of type numeric without a precision" in checked.output
    scenario.apply()
    scenario.sql(
        "INSERT INTO prices SELECT id + 10, amount, rate, fixed, tags FROM prices",
        "UPDATE prices SET amount = 0.0000000001 WHERE id = 1",
        "ALTER TABLE prices ADD COLUMN late numeric DEFAULT 2.5",
        "INSERT INTO prices VALUES (14, 1, 1, 1, NULL, 9.75)",
    )
    scenario.apply()
    schema, rows = lake(scenario)
    assert schema.field("amount").type == pa.decimal128(38, 10)
    assert schema.field("rate").type == pa.decimal128(20, 4)
    assert schema.field("fixed").type == pa.decimal128(8, 2)
    assert schema.field("late").type == pa.decimal128(38, 10)
    assert schema.field("tags").type == pa.list_(pa.field("element", pa.string()))
    assert rows[1]["amount"] == Decimal("0.0000000001")
    assert (rows[11]["amount"], rows[11]["rate"], rows[14]["late"]) == (
        Decimal("12.5"),
        Decimal("1.25"),
        Decimal("9.75"),
    )
    for copied, logged in ((2, 12), (3, 13)):
        for row in (rows[copied], rows[logged]):
            exact = json.loads(row["_tailrace_exact"])
            assert exact == ({"amount": "NaN", "rate": LONG} if copied == 2 else {"amount": "1" + "0" * 40})
            assert row["amount"] is None
    assert invoke("verify", scenario.file).exit_code == 0


def test_a_pipeline_that_runs_already_takes_up_another_type_with_a_new_copy(scenario: Scenario) -> None:
    scenario.sql("CREATE TABLE prices (id int PRIMARY KEY, amount numeric)", "INSERT INTO prices VALUES (1, 1.5)")
    scenario.apply()
    assert lake(scenario)[0].field("amount").type == pa.string()
    scenario.write(source={"numeric": SMALL})
    scenario.apply()
    scenario.sql("INSERT INTO prices VALUES (2, 2.5)")
    scenario.apply()
    scenario.execute("resync", "public.prices")
    scenario.apply()
    schema, rows = lake(scenario)
    assert schema.field("amount").type == pa.decimal128(10, 2)
    assert {number: row["amount"] for number, row in rows.items()} == {1: Decimal("1.5"), 2: Decimal("2.5")}
    assert invoke("verify", scenario.file).exit_code == 0


SMALL = {"precision": 10, "scale": 2}
