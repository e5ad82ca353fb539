"""Spark's JVM as a child of the pipeline: it leaves signals to us, no other user can call it or read its files, and it
does not get our secrets."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from py4j.java_gateway import JavaObject
from pyspark import SparkContext, java_gateway

from tailrace.stream.worker import MODULES_VARIABLE, UMASK_VARIABLE
from tailrace.system import environment


@contextmanager
def started_as_child(modules: Iterable[str] = ()) -> Iterator[None]:
    """Within the block PySpark may start a JVM, whose Python workers import `modules` early. If the block is
    interrupted, that JVM is killed."""
    started: list[subprocess.Popen[bytes]] = []
    used = vars(java_gateway)
    popen = used["Popen"]

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        prepare = options.pop("preexec_fn", None)

        def prepare_more() -> None:
            if prepare is not None:
                prepare()
            # A service manager sends SIGTERM to every process. The JVM must live until we have drained; it ends with
            # its standard input, however we end.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.umask(0o077)

        mask = os.umask(0o077)
        os.umask(mask)
        given = options.pop("env", os.environ)
        allowed = environment.for_children()
        child = {name: value for name, value in given.items() if name in allowed or name not in os.environ}
        child[UMASK_VARIABLE] = f"{mask:o}"
        child[MODULES_VARIABLE] = ",".join(modules)
        made: subprocess.Popen[bytes] = popen(command, preexec_fn=prepare_more, env=child, **options)
        started.append(made)
        return made

    used["Popen"] = start
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        for process in started:
            process.kill()
            process.wait()
            SparkContext._gateway = SparkContext._jvm = None
        raise
    finally:
        used["Popen"] = popen


def _shorten(record: logging.LogRecord) -> bool:
    """py4j logs each caller that it refuses with a traceback."""
    if "authenticate" in str(record.msg):
        record.msg, record.args, record.exc_info = "a call without Spark's token was refused", (), None
    return True


def require_token() -> None:
    """Make the port on which Spark calls back into this process ask for the token that its own port asks for.

    PySpark opens that port to every user of the machine. Does nothing if it asks for a token already.
    """
    gateway = SparkContext._gateway
    assert gateway is not None, "a session has been built"
    expected = gateway.callback_server_parameters
    if expected.auth_token is not None:
        return
    logging.getLogger("py4j.clientserver").addFilter(_shorten)
    expected.auth_token = token = gateway.gateway_parameters.auth_token
    cast(Any, java_gateway).ensure_callback_server_started(gateway)
    # The client that PySpark has just made for the port's number has lost the token (`PythonClient.copyWith`).
    client = JavaObject("GATEWAY_SERVER", gateway._gateway_client).getCallbackClient()
    field = gateway.jvm.java.lang.Class.forName("py4j.CallbackClient").getDeclaredField("authToken")
    field.setAccessible(True)
    field.set(client, token)
