"""Recognise tailrace errors that passed through Spark, where they become a Java stack trace with a Python traceback."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JJavaError

from tailrace.errors import TailraceError, UnavailableError, revive

# An error may name a table, and a name may be any text, so no pattern here matches a word alone. A line begins with the
# name of our class only where Python printed it: `TailraceError.__str__` puts nothing else at the beginning of a line.
_RAISED = re.compile(
    r"^tailrace\.errors\.(\w+): (.*?)(?=\n\s*(?:\n|at |JVM stacktrace|During handling|Traceback|==|SQLSTATE: )|\Z)",
    re.S | re.M,
)
_LOST_WORKER = re.compile(
    r"\bPython worker (?:exited unexpectedly|failed to connect back)|\bjava\.io\.EOFException\b"
    r"|\bExecutorLostFailure \(executor |\bExecutor heartbeat timed out after |\bRemote RPC client disassociated\."
    r"|\bjava\.(?:net\.SocketException|io\.IOException): (?:Connection reset|Broken pipe|Stream closed)"
)

_SLOW_WORKER = re.compile(r"\[CANNOT_OPEN_SOCKET\]|^\s*(?:Caused by: |: )?java\.net\.SocketTimeoutException\b", re.M)
"""Spark and PySpark wait some seconds for the other side of a socket to connect; a busy machine may take longer."""
_NO_ROOM = re.compile(r"No space left on device|Disk quota exceeded")


@contextmanager
def portable_errors() -> Iterator[None]:
    """For code that Spark calls: replace an error of a plug-in's class by its nearest ancestor in `tailrace.errors`.

    Spark passes on only the name of the class, and the driver recognises only those names.
    """
    try:
        yield
    except TailraceError as error:
        known = revive(error.describe())
        if type(known) is type(error):
            raise
        raise known from error


def recognise(error: Exception) -> Exception:
    """The tailrace error that caused an error of Spark; the error itself when there is none."""
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
            fix="free space where `state`, the journal and Spark's scratch folder are; tailrace retries by itself",
        )
    if _LOST_WORKER.search(text):
        return UnavailableError("a Spark worker process ended in the middle of a batch; the batch is repeated")
    if _SLOW_WORKER.search(text):
        return UnavailableError("a Spark worker process did not answer in time; the batch is repeated")
    return error


def passed_on(error: Py4JJavaError) -> Exception:
    """The error that a batch raises to Java instead of a Java error.

    Spark checks whether an error was caused by a stop. For an error with py4j's own name, the regular expression of
    that check overflows Java's stack.
    """
    found = recognise(error)
    return RuntimeError(str(error)) if found is error else found
