"""Errors that crossed Spark come back as a Java stack with a Python traceback in it; here they are recognised again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JJavaError

from tailrace.errors import TailraceError, UnavailableError, revive

_RAISED = re.compile(
    r"tailrace\.errors\.(\w+): (.*?)(?=\n\s*(?:\n|at |JVM stacktrace|During handling|Traceback|==|SQLSTATE: )|\Z)", re.S
)
_LOST_WORKER = re.compile(
    r"Python worker (exited unexpectedly|failed to connect back)|EOFException"
    r"|ExecutorLostFailure|Executor.*(lost|heartbeat)|Connection reset|Broken pipe|Stream closed"
)

_SLOW_WORKER = re.compile(r"\[CANNOT_OPEN_SOCKET\]|^\s*(?:Caused by: |: )?java\.net\.SocketTimeoutException\b", re.M)
"""Spark and PySpark give the other side of a socket some seconds to connect: a busy machine may take longer."""
_NO_ROOM = re.compile(r"No space left on device|Disk quota exceeded")


@contextmanager
def portable_errors() -> Iterator[None]:
    """For whatever Spark calls: an error whose kind is not in `tailrace.errors` leaves as its nearest ancestor there.

    Only the name of its class crosses Spark, and only those names are recognised on the other side.
    """
    try:
        yield
    except TailraceError as error:
        known = revive(error.describe())
        if type(known) is type(error):
            raise
        raise known from error


def recognise(error: Exception) -> Exception:
    """The tailrace error behind what Spark raised; the error itself when there is none."""
    if isinstance(error, TailraceError):
        return error
    text = str(error)
    found = _RAISED.findall(text)
    if found:
        name, message = found[-1]
        message, _, fix = message.strip().partition("\n  fix: ")
        return revive({"kind": name, "message": message.strip(), "fix": fix.strip() or None})
    if _NO_ROOM.search(text):
        return UnavailableError(
            "a disk is full that the pipeline or Spark writes to",
            fix="make room where `state`, the journal and Spark's scratch folder are; it is tried again",
        )
    if _LOST_WORKER.search(text):
        return UnavailableError("a Spark worker process ended in the middle of a batch; it is done again")
    if _SLOW_WORKER.search(text):
        return UnavailableError("a Spark worker process did not answer in time; the batch is done again")
    return error


def passed_on(error: Py4JJavaError) -> Exception:
    """What a batch raises in place of an error of Java's, which goes back to Java.

    Spark looks whether an error came of a stop, and the pattern by which it looks through one with py4j's own name
    overflows Java's stack.
    """
    found = recognise(error)
    return RuntimeError(str(error)) if found is error else found
