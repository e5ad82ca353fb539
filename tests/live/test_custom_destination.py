"""A destination that a script defines, in a pipeline that the same script runs: copied in several batches, followed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import duckdb

from tailrace.model.last_batch import LastBatch
from tests.support.sqlite_application import Application

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_destination.py"

SCRIPT = """

import sys

from tailrace import Pipeline

Pipeline(
    name="shop",
    source={"type": "sqlite", "path": f"{sys.argv[1]}/app.db", "chunk_rows": 100},
    destination=DuckDbDestination(path=f"{sys.argv[1]}/replica.duckdb"),
    state=f"{sys.argv[1]}/state",
    batch={"max_rows": 100},
    spark={"master": "local[2]"},
).run(once=True)
"""


def run(folder: Path) -> None:
    script = folder / "pipeline.py"
    script.write_text(EXAMPLE.read_text() + SCRIPT)
    done = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_destination_of_a_script_is_copied_to_and_follows(tmp_path: Path) -> None:
    application = Application(tmp_path / "app.db", "trigger")
    application.run("CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT)")
    for number in range(300):
        application.run("INSERT INTO items VALUES (?, ?)", number, f"item {number}")
    application.capture()
    run(tmp_path)
    application.run("UPDATE items SET name = 'changed' WHERE id % 5 = 0")
    application.run("DELETE FROM items WHERE id % 7 = 0")
    run(tmp_path)
    with duckdb.connect(str(tmp_path / "replica.duckdb")) as file:
        rows = file.execute('SELECT id, name FROM "main.items" ORDER BY id').fetchall()
        [(mark,)] = file.execute("SELECT batch FROM _tailrace").fetchall()
    assert rows == sorted(application.run("SELECT id, name FROM items"))
    assert LastBatch.parse(mark).id > 1
    assert not list((tmp_path / "state" / "staged").glob("*.arrow"))
    application.close()
