"""A checkpoint, a state or a slot that is gone: nothing moves before a reset, and after it nothing is missing."""

from __future__ import annotations

from pathlib import Path

from tailrace.demo.compare import count_lake
from tailrace.demo.server import EmbeddedPostgres
from tests.support.invocation import invoke
from tests.support.scenario import Scenario

ROWS = 2000
SLOT = "tailrace_loss"


def test_a_lost_checkpoint_state_or_slot_stops_the_pipeline_until_a_reset_and_the_lake_is_never_empty(
    tmp_path: Path,
) -> None:
    with EmbeddedPostgres(tmp_path / "server") as server:
        scenario = Scenario(tmp_path / "loss", server.dsn(), name="loss").prepare()
        scenario.sql(
            "CREATE TABLE keyed (id int PRIMARY KEY, v text)",
            "CREATE TABLE bag (v text)",
            f"INSERT INTO keyed SELECT i, 'first' FROM generate_series(1, {ROWS}) i",
            "INSERT INTO bag SELECT 'first' FROM generate_series(1, 100)",
        )
        scenario.apply()
        scenario.sql("UPDATE keyed SET v = 'while away' WHERE id <= 10", "INSERT INTO bag VALUES ('while away')")

        require_refusal_without(scenario, scenario.state / "checkpoint")
        require_refusal_without(scenario, scenario.state / "state.db")

        scenario.sql(f"SELECT pg_drop_replication_slot('{SLOT}')")
        require_refusal(scenario, "is gone")
        scenario.sql(
            "INSERT INTO keyed VALUES (0, 'sent to no one')",
            f"SELECT pg_create_logical_replication_slot('{SLOT}', 'pgoutput')",
        )
        require_refusal(scenario, "the slot is confirmed up to")

        copy_again(scenario)

        lose_wal(scenario)
        require_refusal(scenario, "removed WAL")


def require_refusal(scenario: Scenario, reason: str) -> None:
    """A run ends in 6 and says why and how it goes on; the lake is as it was."""
    before = {table.table: count_lake(table, scenario.lake) for table in scenario.tables()}
    refused = invoke("run", scenario.file, "--once")
    assert refused.exit_code == 6, refused.output
    said = " ".join(refused.output.split())
    assert reason in said
    assert f"tailrace reset {scenario.file}" in said
    assert {table.table: count_lake(table, scenario.lake) for table in scenario.tables()} == before


def require_refusal_without(scenario: Scenario, place: Path) -> None:
    away = scenario.folder / "away"
    place.rename(away)
    require_refusal(scenario, "checkpoint")
    if place.exists():
        place.unlink()
    away.rename(place)


def copy_again(scenario: Scenario) -> None:
    """Reset and run: at every moment the lake holds the old rows or the new ones, in the end those of the source."""
    scenario.sql("DELETE FROM keyed WHERE id > 1990")
    scenario.execute("reset", "--yes")
    assert scenario.value(f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{SLOT}'") == 0
    (keyed,) = (table for table in scenario.tables() if table.table.name == "keyed")
    seen = {count_lake(keyed, scenario.lake)}

    def look(_: object) -> bool:
        seen.add(count_lake(keyed, scenario.lake))
        return seen > {ROWS}

    with scenario.run() as run:
        run.wait_until(look)
        scenario.catch_up(run)
        assert seen == {ROWS, ROWS - 9}
        assert scenario.differences() == []
        run.terminate()
        assert run.wait() == 0


def lose_wal(scenario: Scenario) -> None:
    """Let the server remove WAL that the slot still needs."""
    scenario.sql("ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'", "SELECT pg_reload_conf()")
    lost = f"SELECT wal_status = 'lost' FROM pg_replication_slots WHERE slot_name = '{SLOT}'"
    while not scenario.value(lost):
        scenario.sql(
            "INSERT INTO bag SELECT repeat(md5(i::text), 30) FROM generate_series(1, 3000) i",
            "SELECT pg_switch_wal()",
            "CHECKPOINT",
        )
    scenario.sql("ALTER SYSTEM RESET max_slot_wal_keep_size", "SELECT pg_reload_conf()")
