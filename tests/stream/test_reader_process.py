"""The process in which Spark keeps a stream's reader: PySpark's own program, driven as Spark's JVM does."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from pyspark.sql.streaming.python_streaming_source_runner import GET_DEFAULT_READ_LIMIT_FUNC_ID
from pyspark.sql.types import StructType

from tailrace.option.table import TableOptions
from tailrace.source.follower import Limit
from tailrace.stream.block import Pickled
from tailrace.stream.data_source import Feed, bound
from tests.support.source_making import make_sqlite

RUNNER = """
import socket, sys
from pyspark.sql.streaming.python_streaming_source_runner import main
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))).makefile("rwb") as spark:
    main(spark, spark)
"""


def number(value: int) -> bytes:
    return struct.pack("!i", value)


def framed(data: bytes) -> bytes:
    return number(len(data)) + data


def test_a_stream_that_is_stopped_within_an_answer_ends_without_a_message() -> None:
    source = make_sqlite(Path("never-opened.db"), Path(), TableOptions())
    feed = Feed(source, Limit(1, 1), lanes=1)
    data_source = bound(feed, "stopped")({})
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        command = [sys.executable, "-c", RUNNER, str(server.getsockname()[1])]
        process = stack.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        connection, _ = server.accept()
        with connection:
            connection.sendall(framed(f"{sys.version_info.major}.{sys.version_info.minor}".encode()))
            connection.sendall(framed(b"") + number(0))
            connection.sendall(framed(Pickled.of(data_source).content))
            connection.sendall(framed(StructType().json().encode()) + number(1))
            assert connection.recv(4) == number(0)
            connection.sendall(number(GET_DEFAULT_READ_LIMIT_FUNC_ID))
            # Closed with an answer that no one reads: the system resets the connection.
            connection.recv(1, socket.MSG_PEEK)
        _, stderr = process.communicate()
    assert stderr == ""
