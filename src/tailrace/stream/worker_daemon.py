"""Spark's daemon of Python workers, run by Spark with `python -m`: as PySpark's own, with two differences.

What the pipeline's tasks use is imported before the first worker is forked: once, and in memory that all share.

SIGTERM is left to the owner.

A service manager sends SIGTERM to every process of a service. PySpark's daemon would end with its workers, and with
them the batch that we want to finish. This one ends when Spark closes its standard input, and its workers with it.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
from contextlib import suppress
from types import ModuleType
from typing import Any

import pyarrow as pa
from pyspark import daemon

from tailrace.stream.worker import MODULES_VARIABLE


def _ignore_termination() -> None:
    own = ModuleType("signal")
    vars(own).update(vars(signal))

    def set_handler(number: int, handler: Any) -> Any:
        return None if number == signal.SIGTERM else signal.signal(number, handler)

    vars(own)["signal"] = set_handler
    vars(daemon)["signal"] = own
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _import_early() -> None:
    for name in filter(None, os.environ.get(MODULES_VARIABLE, "").split(",")):
        # A task that needs it fails with a better error.
        with suppress(ImportError):
            importlib.import_module(name)
    pa.array([0])  # the first array of Python values makes pyarrow look for pandas
    # What is loaded by now is never garbage, and a worker that looked at it would no longer share it.
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    _import_early()
    _ignore_termination()
    daemon.manager()
