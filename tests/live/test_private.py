"""What other users of the machine get of a pipeline that runs: nothing."""

from __future__ import annotations

import signal
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from psycopg import conninfo
from pyspark.sql import SparkSession

from tailrace.testing.wait import wait_until
from tests.support.process import command_line, descendants, is_ended, send
from tests.support.scenario import Scenario

CANARY = "canary-7f3a"


def call_without_token(port: int, command: str) -> bytes:
    """What a port for calls by py4j answers to a call of someone who does not have the token."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        answer = b""
        with suppress(OSError):  # it may hang up at any time
            connection.sendall(command.encode())
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(1000):
                answer += piece
        return answer


def test_no_one_without_spark_s_token_can_call_back_into_a_pipeline(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    port = gateway._callback_server.port
    for target in range(4):
        # py4j: call the method of an object that Python gave to Java.
        assert call_without_token(port, f"c\np{target}\ncall\ne\n") == b""
    wait_until(lambda: len(caplog.messages) >= 4)
    assert set(caplog.messages) == {"a call without Spark's token was refused"}
    assert spark.conf.get("spark.authenticate") == "true"
    # Spark itself has the token: a batch is a call of Java.
    batches: list[int] = []
    stream = spark.readStream.format("rate").load().writeStream.foreachBatch(lambda _, number: batches.append(number))
    query = stream.trigger(once=True).start()
    query.awaitTermination()
    assert batches == [0]


def open_paths(folder: Path) -> Iterator[Path]:
    """What others could read or enter."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink() and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            yield path


def test_others_reach_neither_the_files_nor_the_secrets_of_a_run(scenario: Scenario) -> None:
    scratch = scenario.folder / "scratch"
    scenario.sql("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t SELECT generate_series(1, 100)")
    scenario.write(source={"dsn": "${SCENE_DSN}"}, spark={"conf": {"spark.local.dir": str(scratch)}})
    dsn = conninfo.make_conninfo(scenario.dsn, password=CANARY)
    with scenario.run(environment={"SCENE_DSN": dsn}) as run:
        scenario.catch_up(run)
        below = descendants(run.pid)
        assert len(below) > 2
        for pid in below:
            with suppress(OSError):  # a worker may have ended by now
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                assert CANARY.encode() not in environment, command_line(pid)

        assert stat.S_IMODE(scenario.state.stat().st_mode) == 0o700
        assert stat.S_IMODE((scenario.state / "journal").stat().st_mode) == 0o700
        assert list(open_paths(scenario.state / "checkpoint")) == []
        assert list(scratch.rglob("*")) != []
        assert [path for path in open_paths(scratch) if path != scratch] == []
        # What is written for others has the modes that this user's files have.
        plain = scenario.folder / "plain"
        plain.touch()
        files = [path for path in scenario.lake.rglob("*.parquet") if "_delta_log" not in path.parts]
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {stat.S_IMODE(plain.stat().st_mode)}


def test_two_quick_interrupts_during_the_start_leave_no_process(scenario: Scenario) -> None:
    with scenario.run() as run:
        wait_until(lambda: bool(run.processes(b"org.apache.spark")))
        below = descendants(run.pid)
        send([run.pid], signal.SIGINT)
        # Two signals that are both pending arrive as one.
        wait_until(lambda: "a second signal stops at once" in run.log_file.read_text())
        send([run.pid], signal.SIGINT)
        wait_until(lambda: is_ended(run.pid))
        wait_until(lambda: all(is_ended(pid) for pid in below))
        assert run.wait() == 130
        assert "Traceback" not in run.log_file.read_text()
