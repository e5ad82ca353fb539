"""The environment of child processes: ours, without the secrets that a pipeline's file took from it.

The options carry those secrets to where they are needed. What a library reads from the environment by itself, such as
the credentials of an object store, stays.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

_hidden: set[str] = set()
_SHARED = frozenset({"HOME", "LOGNAME", "PATH", "PWD", "SHELL", "TMPDIR", "USER", "USERNAME"})
_READ_BY_LIBRARIES = (
    "AWS_",
    "AZURE_",
    "GOOGLE_",
    "GCS_",
    "HADOOP_",
    "JAVA_",
    "PYSPARK_",
    "PYTHON",
    "SPARK_",
    "TAILRACE_",
)


def hide(names: Iterable[str]) -> None:
    """Keep these variables from every child process that is started from now on."""
    _hidden.update(name for name in names if name not in _SHARED and not name.startswith(_READ_BY_LIBRARIES))


def for_children() -> dict[str, str]:
    """The environment for a new child process."""
    return {name: value for name, value in os.environ.items() if name not in _hidden}
