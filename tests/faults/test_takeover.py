"""A runner that was paused while another took over: what it does when it wakes has no effect."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import yaml

from tailrace.config.pipeline import load
from tailrace.demo.server import EmbeddedPostgres
from tailrace.testing.wait import wait_until
from tests.support.database import PostgresDatabase
from tests.support.failpoints import COMMIT
from tests.support.invocation import invoke
from tests.support.process import descendants, send
from tests.support.runner import RunningPipeline
from tests.support.scenario import Scenario


def test_a_stale_runner_is_fenced_when_it_commits(
    database: PostgresDatabase, make_scenario: Callable[..., Scenario]
) -> None:
    scenario = make_scenario(database.dsn)
    scenario.sql(
        "CREATE TABLE keyed (id int PRIMARY KEY, v int)",
        "CREATE TABLE keyless (v int)",
        "INSERT INTO keyed SELECT i, 0 FROM generate_series(1, 100) i",
    )
    scenario.apply()
    scenario.sql("UPDATE keyed SET v = v + 1", "INSERT INTO keyless SELECT generate_series(1, 100)")

    with scenario.run(failpoints=f"{COMMIT}:pause!once") as first:
        wait_until(lambda: bool(first.paused()))
        worker = first.paused()
        os.kill(first.pid, signal.SIGSTOP)
        # What a lease that ran out looks like: the lock is there to be taken although its holder lives.
        (scenario.state / "runner.lock").unlink()
        with scenario.run() as second:
            scenario.sql("UPDATE keyed SET v = v + 1", "INSERT INTO keyless SELECT generate_series(1, 100)")
            scenario.catch_up(second)
            send([*worker, first.pid], signal.SIGCONT)
            assert first.wait() == 5
            assert "another runner" in first.log_tail() or "may not write any more" in first.log_tail()
            scenario.sql("DELETE FROM keyed WHERE id <= 10")
            scenario.catch_up(second)
            assert scenario.differences() == []
    assert scenario.doubled() == []


def test_a_stale_runner_that_wakes_up_between_batches_begins_no_other(scenario: Scenario) -> None:
    scenario.sql("CREATE TABLE keyed (id int PRIMARY KEY, v int)", "CREATE TABLE keyless (v int)")
    with scenario.run() as first:
        scenario.catch_up(first)
        receiver = first.processes(b"tailrace.source.postgres")
        asleep = [first.pid, *(pid for pid in descendants(first.pid) if pid not in receiver)]
        send(asleep, signal.SIGSTOP)
        (scenario.state / "runner.lock").unlink()
        with scenario.run() as second:
            for number in range(3):
                scenario.sql(f"INSERT INTO keyed VALUES ({number}, 0)", f"INSERT INTO keyless VALUES ({number})")
                scenario.catch_up(second)
            scenario.sql("INSERT INTO keyless VALUES (4)")
            send(reversed(asleep), signal.SIGCONT)
            assert first.wait() == 5
            scenario.sql("INSERT INTO keyless VALUES (5)")
            scenario.catch_up(second)
            assert scenario.differences() == []
    assert scenario.doubled() == []


def second_machine(scenario: Scenario, name: str, *, sees_folder: bool) -> Path:
    """The file of the same pipeline elsewhere: a `state` folder of its own, with the same checkpoint in it or not."""
    sections = yaml.safe_load(scenario.file.read_text())
    state = scenario.folder / name
    state.mkdir()
    if sees_folder:
        (state / "checkpoint").symlink_to(scenario.state / "checkpoint")
    file = scenario.folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({**sections, "state": str(state)}))
    return file


def test_a_lease_keeps_a_second_machine_out_until_it_runs_out_and_its_holder_is_fenced_when_it_wakes(
    postgres: EmbeddedPostgres, make_database: Callable[[EmbeddedPostgres], PostgresDatabase], tmp_path: Path
) -> None:
    followed, kept = make_database(postgres), make_database(postgres)
    scenario = Scenario(
        tmp_path / "leased",
        followed.dsn,
        name="leased",
        source={"journal": {"path": str(tmp_path / "journal")}},
        store={"type": "postgres", "dsn": kept.dsn, "lease": "10s"},
    ).prepare()
    scenario.sql("CREATE TABLE keyed (id int PRIMARY KEY, v int)", "CREATE TABLE keyless (v int)")
    elsewhere = second_machine(scenario, "elsewhere", sees_folder=True)
    stranger = second_machine(scenario, "stranger", sees_folder=False)
    address = load(scenario.file).store_address
    run = scenario.run(failpoints=f"{COMMIT}:pause!once")
    mark = run.marks / COMMIT
    mark.parent.mkdir()
    mark.touch()  # while it is there, the failpoint rests
    with run as first:
        scenario.sql("INSERT INTO keyed SELECT i, 0 FROM generate_series(1, 100) i")
        scenario.catch_up(first)
        for file in (elsewhere, stranger):
            refused = invoke("run", file, "--once")
            assert refused.exit_code == 5, refused.output
            assert f"run by process {first.pid}" in refused.output
        assert invoke("reset", stranger, "--yes").exit_code == 5

        mark.unlink()
        scenario.sql("UPDATE keyed SET v = v + 1", "INSERT INTO keyless SELECT generate_series(1, 100)")
        wait_until(lambda: bool(first.paused()))
        worker = first.paused()
        os.kill(first.pid, signal.SIGSTOP)
        with address.open_reading() as store:
            wait_until(lambda: store.lease_holder() is None)
        with RunningPipeline(elsewhere) as second:
            scenario.sql("UPDATE keyed SET v = v + 1", "INSERT INTO keyless SELECT generate_series(1, 100)")
            scenario.catch_up(second)
            send([*worker, first.pid], signal.SIGCONT)
            assert first.wait() == 5
            scenario.sql("DELETE FROM keyed WHERE id <= 10", "INSERT INTO keyless VALUES (0)")
            scenario.catch_up(second)
            assert scenario.differences() == []
    assert scenario.doubled() == []
    with address.open_reading() as store:
        wait_until(lambda: store.lease_holder() is None)
    scenario.sql("UPDATE keyed SET v = v + 1", "INSERT INTO keyless VALUES (1)")
    assert invoke("run", stranger, "--once").exit_code == 0, "it builds the checkpoint again"
    assert scenario.differences() == []
    assert scenario.doubled() == []
