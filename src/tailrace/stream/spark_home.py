"""The SPARK_HOME of a session: where its Java looks for Spark, and so for Spark's Python."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pyspark

from tailrace.stream.java import made_once

_PARTS = ("bin", "conf", "jars", "sbin")


def spark_home() -> Path:
    """The user's own, or else a private one that leads to the installed Spark but leaves out its zipped Python.

    With the zip, every Python process of Spark compiles Spark's modules anew and every task reads the zip's directory
    again, although the same modules lie compiled beside it.
    """
    if home := os.environ.get("SPARK_HOME"):
        return Path(home)
    package = Path(pyspark.__file__).parent
    name = hashlib.sha256(f"{package}\n{pyspark.__version__}".encode()).hexdigest()[:16]

    def link(folder: Path) -> None:
        for part in _PARTS:
            if (package / part).exists():
                (folder / part).symlink_to(package / part)

    try:
        return made_once(f"spark-{name}", link) if (package / "jars").exists() else package
    except OSError:
        return package  # as Spark itself would have it
