"""SQLite and Turso files in the pipeline, end to end: copied, followed, killed, and the same in the end."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from deltalake import DeltaTable

from tests.support.invocation import apply
from tests.support.runner import RunningPipeline, all_ready
from tests.support.sqlite_application import Application


def lake_rows(lake: Path, table: str, columns: list[str]) -> list[tuple[Any, ...]]:
    rows = DeltaTable(str(lake / "main" / table)).to_pyarrow_table(columns=columns).to_pylist()
    return sorted(tuple(row[name] for name in columns) for row in rows)


@pytest.mark.parametrize("kind", ["trigger", "turso"])
def test_a_file_reaches_the_lake_whole_though_its_copy_and_its_following_were_killed(kind: str, tmp_path: Path) -> None:
    application = Application(tmp_path / "app.db", "turso" if kind == "turso" else "trigger")
    application.run("CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT, price REAL)")
    application.run("CREATE TABLE words (w TEXT NOT NULL PRIMARY KEY, n INTEGER)")
    for number in range(300):
        application.run("INSERT INTO items VALUES (?, ?, ?)", number, f"item {number}", number / 4)
    application.capture()
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "name": f"live_{kind}",
                "source": {"type": "turso" if kind == "turso" else "sqlite", "path": "app.db", "chunk_rows": 100},
                "destination": {"type": "delta", "path": "lake"},
                "state": "state",
                "spark": {"master": "local[2]"},
            }
        )
    )
    # A chunk of the copy is read from the file, and no offset includes it yet.
    with RunningPipeline(file, once=True, failpoints="stream.staged:kill") as run:
        assert run.wait() == -signal.SIGKILL
    application.run("UPDATE items SET name = name || '!' WHERE id % 5 = 0")
    application.run("INSERT INTO words VALUES ('word', 0)")

    with RunningPipeline(file) as run:
        run.wait_until(all_ready)
        application.run("DELETE FROM items WHERE id % 7 = 0")
        application.run("UPDATE words SET w = 'moved' WHERE w = 'word'")
        application.run("ALTER TABLE items ADD COLUMN note TEXT DEFAULT 'none'")
        if kind == "trigger":
            application.capture()
        application.run("UPDATE items SET note = 'seen' WHERE id = 1")
        head = application.value("SELECT max(change_id) FROM turso_cdc WHERE table_name = 'items'")
        run.wait_until(lambda status: status.position is not None and int(status.position[:16], 16) >= head)
        run.kill()

    apply(file)
    for table in ("items", "words"):
        columns = application.columns(table)
        assert lake_rows(tmp_path / "lake", table, columns) == sorted(application.run(f"SELECT * FROM {table}"))
    application.close()


def test_the_example_runs(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "sqlite_to_delta.py"
    done = subprocess.run([sys.executable, str(example), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["1 Ada 13.5", "3 Edsger 31.0"]
