"""Spark's daemon of Python workers, run by Spark with `python -m`: as PySpark's own, but SIGTERM is left to the owner.

A service manager sends SIGTERM to every process of a service. PySpark's daemon would end with its workers, and with
them the batch that we want to finish. This one ends when Spark closes its standard input, and its workers with it.
"""

from __future__ import annotations

import signal
from types import ModuleType
from typing import Any

from pyspark import daemon


def _ignore_termination() -> None:
    own = ModuleType("signal")
    vars(own).update(vars(signal))

    def set_handler(number: int, handler: Any) -> Any:
        return None if number == signal.SIGTERM else signal.signal(number, handler)

    vars(own)["signal"] = set_handler
    vars(daemon)["signal"] = own
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


if __name__ == "__main__":
    _ignore_termination()
    daemon.manager()
