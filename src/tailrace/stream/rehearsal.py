"""`python -m tailrace.stream.rehearsal FOLDER OPTIONS`: run a small pipeline once, with these options for Java.

It runs the same code as every pipeline, so it loads the classes that any pipeline loads.
"""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from tailrace.capture import enable
from tailrace.stream.pipeline import Pipeline
from tailrace.stream.spark_session import java_options


def rehearse(folder: Path, options: str) -> None:
    """Copy a table of a new SQLite file to another one."""
    with closing(sqlite3.connect(folder / "here.db", isolation_level=None)) as connection:
        connection.execute("CREATE TABLE lines (id INTEGER PRIMARY KEY, words TEXT)")
        enable(connection, "full")
        connection.execute("INSERT INTO lines VALUES (1, 'to be'), (2, 'or not to be')")
    Pipeline(
        name="rehearsal",
        source={"type": "sqlite", "path": str(folder / "here.db")},
        destination={"type": "sqlite", "path": str(folder / "there.db")},
        state=str(folder / "state"),
        spark={"master": "local[2]", "conf": {"spark.driver.extraJavaOptions": java_options(options)}},
    ).run(once=True)


if __name__ == "__main__":
    rehearse(Path(sys.argv[1]), sys.argv[2])
