"""The command itself, as a service manager sees it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from contextlib import closing
from typing import Any

import psycopg
import pytest

from tailrace.testing.wait import wait_until
from tests.support.process import descendants, send
from tests.support.runner import command
from tests.support.scenario import Scenario


def status_of(scenario: Scenario) -> dict[str, Any]:
    done = subprocess.run(
        command("status", str(scenario.file), "--json"), capture_output=True, text=True, timeout=60, check=True
    )
    status: dict[str, Any] = json.loads(done.stdout)
    return status


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_prints_lines_shows_its_status_and_drains_at_a_signal(scenario: Scenario, number: signal.Signals) -> None:
    scenario.sql(
        "CREATE TABLE keyed (id int PRIMARY KEY, v text)",
        "INSERT INTO keyed SELECT i, 'row' FROM generate_series(1, 1000) i",
    )
    with scenario.run() as run:
        scenario.catch_up(run)
        running = status_of(scenario)
        assert running["runner"]["pid"] == run.pid
        assert {table["name"]: table["state"] for table in running["tables"]} == {
            "public.fence": "Ready",
            "public.keyed": "Ready",
        }
        assert {table["name"]: table["rows_copied"] for table in running["tables"]}["public.keyed"] == 1000

        scenario.sql("UPDATE keyed SET v = 'drained' WHERE id <= 500")
        below = descendants(run.pid)
        # A terminal interrupts the process that it waits for; a service manager ends every process of a service.
        send([run.pid, *(below if number == signal.SIGTERM else [])], number)
        assert run.wait() == 0
        assert below

        said = run.log_file.read_text()
        assert "Traceback" not in said
        assert "\x1b" not in said
        lines = [line for line in said.splitlines() if line.startswith("at=")]
        assert any(re.search(r"event=table level=info table=public.keyed state=Ready", line) for line in lines)

    ended = status_of(scenario)
    assert ended["runner"] is None
    assert len(ended["tables"]) == 2
    scenario.apply()
    assert scenario.differences() == []
    assert scenario.doubled() == []


def test_a_single_run_that_a_signal_ended_does_not_say_that_it_is_done(scenario: Scenario) -> None:
    with scenario.run(once=True, failpoints="pipeline.prepared:pause!once") as run:
        wait_until(lambda: bool(run.paused()))
        run.terminate()
        run.resume()
        assert run.wait() == 130, run.log_tail()
        assert "Traceback" not in run.log_file.read_text()
    scenario.apply()
    assert scenario.differences() == []


@pytest.mark.parametrize(("once", "code"), [(False, 0), (True, 130)])
def test_one_signal_ends_a_run_whose_slot_waits_for_an_open_transaction(
    scenario: Scenario, once: bool, code: int
) -> None:
    making = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_create_logical_replication_slot%'"
    with closing(psycopg.connect(scenario.dsn)) as other:
        other.execute("CREATE TABLE open_for_long (id int PRIMARY KEY)")
        with scenario.run(once=once) as run:
            wait_until(lambda: scenario.value(making) == 1)
            run.terminate()
            assert run.wait() == code
            assert "Traceback" not in run.log_file.read_text()
        assert scenario.value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == 0
    scenario.apply()
    assert scenario.differences() == []


def test_a_run_says_which_transaction_its_new_slot_waits_for(scenario: Scenario) -> None:
    with closing(psycopg.connect(scenario.dsn)) as other:
        other.execute("CREATE TABLE open_for_long (id int PRIMARY KEY)")
        with scenario.run(once=True) as run:
            said = f"a new one waits for the open write transactions of processes {other.info.backend_pid}"
            wait_until(lambda: said in run.log_file.read_text())
            other.commit()
            assert run.wait() == 0
            assert run.log_file.read_text().count(said) == 1
    assert scenario.differences() == []


def test_a_second_signal_ends_a_run_within_its_batch_without_a_trace(scenario: Scenario) -> None:
    scenario.sql("CREATE TABLE keyed (id int PRIMARY KEY)", "INSERT INTO keyed SELECT generate_series(1, 1000)")
    with scenario.run(failpoints="stream.before_write:hang!once") as run:
        wait_until(lambda: "stream.before_write" in run.acted())
        run.terminate()
        wait_until(lambda: "a second signal stops at once" in run.log_file.read_text())
        run.terminate()
        assert run.wait() == 130, run.log_tail()
        said = run.log_file.read_text()
        assert "Exception in thread" not in said
        assert "/src/tailrace/" not in said
    scenario.apply()
    assert scenario.differences() == []
    assert scenario.doubled() == []


def test_a_run_whose_output_is_closed_ends_after_the_batch_in_hand(scenario: Scenario) -> None:
    scenario.sql("CREATE TABLE keyed (id int PRIMARY KEY)", "INSERT INTO keyed SELECT generate_series(1, 1000)")
    run = subprocess.Popen(
        command("run", str(scenario.file)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with run:
        assert run.stdout is not None
        assert run.stderr is not None
        assert "event=table" in run.stdout.readline()
        run.stdout.close()
        said = run.stderr.read()
    assert run.returncode == 141
    # Spark's own processes may print something when they are ended.
    assert "/src/tailrace/" not in said
    assert "error:" not in said
    scenario.apply()
    assert scenario.differences() == []


def test_a_run_into_another_destination_says_so_at_its_start(scenario: Scenario) -> None:
    scenario.apply()
    scenario.write(destination={"path": str(scenario.folder / "elsewhere")})
    with scenario.run(once=True) as run:
        assert run.wait() == 0
        said = run.log_file.read_text()
    assert f"earlier batches were written to delta {scenario.lake};" in said
    assert "set `destination` back" in said


def test_asking_for_the_status_of_a_pipeline_that_never_ran_says_so(scenario: Scenario) -> None:
    done = subprocess.run(
        command("status", str(scenario.file)), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "has not run yet" in done.stderr


def test_a_run_with_json_is_a_structured_log_to_its_end(scenario: Scenario) -> None:
    scenario.write(tables={"defaults": {"schema_changes": "stop"}}, destination={"path": str(scenario.lake)})
    scenario.sql("CREATE TABLE keyed (id int PRIMARY KEY, v text)", "INSERT INTO keyed VALUES (1, 'c4naryRow')")
    scenario.apply()
    scenario.sql("ALTER TABLE keyed ADD COLUMN more int", "INSERT INTO keyed VALUES (2, 'c4naryRow', 3)")
    done = subprocess.run(
        command("run", str(scenario.file), "--once", "--json"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 8, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(line["at"] and line["level"] in ("info", "warning", "error") for line in lines)
    assert {line["pipeline"] for line in lines} == {scenario.name}
    (logged,) = [line for line in lines if line["event"] == "log" and line["code"] == "schema-changed"]
    assert (logged["table"], logged["logger"]) == ("public.keyed", "tailrace.stream.table_failure")
    last = lines[-1]
    assert (last["event"], last["level"], last["table"]) == ("error", "error", "public.keyed")
    assert last["error"]["exit_code"] == 8
    assert "c4naryRow" not in done.stdout + done.stderr
    assert CHATTER.search(done.stderr) is None


CHATTER = re.compile(r"WARNING: |Setting default log level|incubator")
"""What Spark and Java say at their start."""
