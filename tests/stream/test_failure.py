"""Errors that come back through Spark are told apart again."""

from __future__ import annotations

from tailrace.errors import LostError, PreflightError, UnavailableError
from tailrace.stream.failure import recognise

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


def test_an_error_of_ours_keeps_its_kind_message_and_fix() -> None:
    found = recognise(RuntimeError(THROUGH_SPARK))
    assert isinstance(found, LostError)
    assert found.message == "the slot is gone [table public.t]"
    assert found.fix == "copy anew"


def test_a_worker_that_died_is_something_to_try_again() -> None:
    assert isinstance(recognise(RuntimeError("Python worker exited unexpectedly (crashed)")), UnavailableError)


def test_anything_else_stays_what_it_is() -> None:
    error = ZeroDivisionError("division by zero")
    assert recognise(error) is error
    ours = PreflightError("not ready")
    assert recognise(ours) is ours
