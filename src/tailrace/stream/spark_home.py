"""The SPARK_HOME of a session, where the JVM finds Spark and Spark's Python modules."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pyspark

from tailrace.system.cache_folder import made_once

_PARTS = ("bin", "conf", "jars", "sbin")


def spark_home() -> Path:
    """The user's SPARK_HOME, or else a private one that links to the installed Spark without its zipped Python modules.

    With the zip, every Python process of Spark compiles Spark's modules again and every task reads the zip's directory
    again, although the same modules are installed next to it in compiled form.
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
        return package  # Spark's own default
