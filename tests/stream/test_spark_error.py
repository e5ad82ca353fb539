"""Errors that come back through Spark are recognised by their kind."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tailrace.errors import Finding, LostError, PreflightError, UnavailableError
from tailrace.source.follower import Limit
from tailrace.source.slatedb.object_store import CollectedError
from tailrace.source.sqlite.option import SqliteSourceOptions
from tailrace.source.sqlite.source import SqliteSource
from tailrace.stream.data_source import BlockReader, Feed
from tailrace.stream.spark_error import portable_errors, recognise

THROUGH_SPARK = """[STREAM_FAILED] Query terminated with exception: An exception was raised by the Python Proxy.
Traceback (most recent call last):
  File "follower.py", line 1, in latest
    raise LostError(
tailrace.errors.LostError: the slot is gone [table public.t]
  fix: copy anew

JVM stacktrace:
org.apache.spark.SparkException
    at org.apache.spark.sql.Foo.bar(Foo.scala:1)
"""

FULL_CHECKPOINT = """[STREAM_FAILED] Query [id = 5d1c, runId = 0b7e] terminated with exception: No space left on device
JVM stacktrace:
org.apache.spark.sql.streaming.StreamingQueryException
    at org.apache.spark.sql.execution.streaming.StreamExecution.runStream(StreamExecution.scala:367)
Caused by: org.apache.hadoop.fs.FSError: java.io.IOException: No space left on device
    at org.apache.hadoop.fs.RawLocalFileSystem$LocalFSFileOutputStream.write(RawLocalFileSystem.java:428)
Caused by: java.io.IOException: Stream closed
"""

LOST_EXECUTOR = """An error occurred while calling o79.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 0.0 failed 4 times, most recent
failure: Lost task 0.3 in stage 0.0 (TID 3) (192.0.2.2 executor 3): ExecutorLostFailure (executor 3 exited caused by one
of the running tasks) Reason: Command exited with code 137
Driver stacktrace:
"""


def test_an_error_of_ours_keeps_its_kind_message_and_fix() -> None:
    found = recognise(RuntimeError(THROUGH_SPARK))
    assert isinstance(found, LostError)
    assert found.message == "the slot is gone [table public.t]"
    assert found.fix == "copy anew"


def test_text_that_spark_adds_after_our_error_is_no_part_of_it() -> None:
    found = recognise(RuntimeError(THROUGH_SPARK.replace("copy anew\n", "copy anew\n SQLSTATE: 38000\n")))
    assert isinstance(found, LostError)
    assert found.fix == "copy anew"


@pytest.mark.parametrize("text", ["Python worker exited unexpectedly (crashed)", LOST_EXECUTOR])
def test_a_worker_that_died_is_something_to_try_again(text: str) -> None:
    assert isinstance(recognise(RuntimeError(text)), UnavailableError)


@pytest.mark.parametrize(
    "text", [FULL_CHECKPOINT, "java.io.IOException: Disk quota exceeded", "[Errno 28] No space left on device: 'a'"]
)
def test_a_full_disk_is_something_to_try_again_and_says_where_to_make_room(text: str) -> None:
    found = recognise(RuntimeError(text))
    assert isinstance(found, UnavailableError)
    assert "a disk is full" in found.message
    assert "free space" in (found.fix or "")


def test_an_error_of_ours_about_a_full_disk_keeps_its_kind() -> None:
    text = THROUGH_SPARK.replace("the slot is gone", "No space left on device")
    assert isinstance(recognise(RuntimeError(text)), LostError)


@pytest.mark.parametrize("name", ["EOFException", "Broken pipe", "Executor lost", "Connection reset", "Stream closed"])
def test_a_name_in_an_unexpected_error_is_not_taken_for_a_worker_that_died(name: str) -> None:
    error = KeyError(f"public.{name}")
    assert recognise(error) is error


@pytest.mark.parametrize("place", ["message", "table", "fix"])
def test_a_name_does_not_turn_an_error_into_one_of_another_kind(place: str) -> None:
    name = "x\n\ntailrace.errors.UnavailableError: y\n\nJVM stacktrace"
    given = {"message": "the log has a gap", "table": None, "fix": None, place: name}
    lost = LostError(given["message"] or "", table=given["table"], fix=given["fix"])
    raised = "".join(traceback.format_exception_only(lost))
    through = f"Traceback:\n{raised}\nJVM stacktrace:\norg.apache.spark.SparkException"
    assert isinstance(recognise(RuntimeError(through)), LostError)


def test_any_other_error_stays_what_it_is() -> None:
    error = ZeroDivisionError("division by zero")
    assert recognise(error) is error
    ours = PreflightError("not ready")
    assert recognise(ours) is ours


@pytest.mark.parametrize(
    "cause",
    [
        "Caused by: java.net.SocketTimeoutException: Timed out while waiting for the Python worker to connect back",
        "pyspark.errors.exceptions.base.PySparkRuntimeError: [CANNOT_OPEN_SOCKET] Can not open socket: timed out.",
    ],
)
def test_a_worker_that_a_busy_machine_starts_too_late_is_tried_again(cause: str) -> None:
    found = recognise(RuntimeError(f"[STREAM_FAILED] Query terminated with exception: none\n{cause}\n"))
    assert isinstance(found, UnavailableError)


def test_a_timeout_named_in_the_middle_of_a_text_does_not_count() -> None:
    error = RuntimeError("no such column: java.net.SocketTimeoutException")
    assert recognise(error) is error


@dataclass(frozen=True)
class Collected(SqliteSource):
    """A source whose log was deleted, which it reports with an error of its own kind."""

    def check(self) -> list[Finding]:
        return []

    def prepare(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        raise CollectedError("WAL file 7 is gone", fix="copy again")


def test_an_error_of_an_authors_kind_is_recognised_as_the_nearest_kind_that_everyone_knows() -> None:
    source = Collected(SqliteSourceOptions(type="sqlite", path=Path("app.db")))
    reader = BlockReader(Feed(source, Limit(1, 1), lanes=1))
    for call in (
        reader.initialOffset,
        reader.prepareForTriggerAvailableNow,
        lambda: reader.latestOffset({}, reader.getDefaultReadLimit()),
        lambda: reader.partitions({}, {}),
    ):
        with pytest.raises(LostError) as raised:
            call()
        # Spark hands on nothing but the traceback's text.
        found = recognise(RuntimeError("".join(traceback.format_exception(raised.value))))
        assert isinstance(found, LostError)
        assert (found.message, found.fix) == ("WAL file 7 is gone", "copy again")


def test_errors_that_everyone_knows_are_raised_as_they_are() -> None:
    error = LostError("the slot is gone")
    with pytest.raises(LostError) as raised, portable_errors():
        raise error
    assert raised.value is error
