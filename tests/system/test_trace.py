"""What is kept of an unexpected error."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tailrace.errors import TableError
from tailrace.system import trace

CANARY = "hunter2-row-value"
CROSSED = f"""[STREAM_FAILED] Query terminated with exception: {CANARY}
org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "/lib/worker.py", line 12, in main
    read("{CANARY}")
ValueError: cannot read {CANARY}
\tat org.apache.spark.sql.Runner.run(Runner.scala:42)
Caused by: java.net.SocketTimeoutException: {CANARY}
\tat java.base/java.net.Socket.read(Socket.java:7)
"""


def fail() -> None:
    try:
        raise OSError(CANARY)
    except OSError as error:
        raise RuntimeError(CROSSED) from error


def test_the_chain_of_an_unexpected_error_is_kept_without_any_of_its_texts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError) as caught, trace.kept(tmp_path / "state"):
        fail()
    file = tmp_path / "state" / trace.FILE
    kept = file.read_text()
    for part in (
        "builtins.RuntimeError",
        "caused by builtins.OSError",
        f"{__file__}:",
        "in fail",
        "org.apache.spark.api.python.PythonException",
        "/lib/worker.py:12 in main",
        "ValueError",
        "org.apache.spark.sql.Runner.run(Runner.scala:42)",
        "java.net.SocketTimeoutException",
    ):
        assert part in kept
        assert part in caplog.text
    assert CANARY not in kept
    assert CANARY not in "".join(record.getMessage() for record in caplog.records)
    assert file.stat().st_mode & 0o777 == 0o600
    assert trace.place_of(caught.value) == str(file)


def test_an_error_that_says_itself_what_is_wrong_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(TableError), trace.kept(tmp_path):
        raise TableError("no", table="public.a")
    assert not (tmp_path / trace.FILE).exists()


def test_an_error_that_is_its_own_cause_has_an_end() -> None:
    error = RuntimeError("no")
    error.__cause__ = error
    assert trace.outline(error) == "builtins.RuntimeError\n"
