"""From an SQLite file to a Delta lake: capture by triggers, copy, follow, print the rows.

python examples/sqlite_to_delta.py FOLDER
"""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql import SparkSession

from tailrace import Pipeline
from tailrace.capture import enable


def make_shop(path: Path) -> None:
    """An application's file; from now on the changes of every writer are captured."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT, total REAL)")
        connection.executemany("INSERT INTO orders VALUES (?, ?, ?)", [(1, "Ada", 12.5), (2, "Grace", 8.0)])
        enable(connection, "full")


def work(path: Path) -> None:
    """Changes of the application, which knows nothing of the pipeline."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("INSERT INTO orders VALUES (3, 'Edsger', 31.0)")
        connection.execute("UPDATE orders SET total = total + 1 WHERE id = 1")
        connection.execute("DELETE FROM orders WHERE id = 2")


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "app.db"
    make_shop(file)
    pipeline = Pipeline(
        name="app",
        source={"type": "sqlite", "path": str(file)},
        destination={"type": "delta", "path": str(folder / "lake")},
        state=str(folder / "state"),
    )
    pipeline.run(once=True)
    work(file)
    pipeline.run(once=True)
    SparkSession.builder.getOrCreate().stop()
    lake = QueryBuilder().register("orders", DeltaTable(str(folder / "lake" / "main" / "orders")))
    orders = lake.execute("SELECT id, customer, total FROM orders ORDER BY id").read_all()
    for row in pa.table(orders).to_pylist():
        sys.stdout.write(f"{row['id']} {row['customer']} {row['total']}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
