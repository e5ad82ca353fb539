"""A pipeline that follows a served file into Delta while clients sync: it ends equal, whatever is killed."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import turso.sync
import yaml
from deltalake import DeltaTable

import tailrace
from tailrace.testing.wait import wait_until
from tests.support.invocation import apply, invoke
from tests.support.runner import RunningPipeline, all_ready
from tests.sync.conftest import SCHEMA, ServerProcess

COLUMNS = ("id", "text", "stars")


def served_rows(file: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(file)) as connection:
        return connection.execute("SELECT id, text, stars FROM note ORDER BY id").fetchall()


def lake_rows(lake: Path) -> list[tuple[Any, ...]]:
    rows = DeltaTable(str(lake / "main" / "note")).to_pyarrow_table(columns=list(COLUMNS)).to_pylist()
    return sorted(tuple(row[name] for name in COLUMNS) for row in rows)


def test_a_served_file_reaches_the_lake_while_clients_sync_though_server_and_pipeline_are_killed(
    tmp_path: Path,
) -> None:
    served, ours, lake = tmp_path / "served.db", tmp_path / "ours.db", tmp_path / "lake"
    with closing(sqlite3.connect(served)) as connection:
        connection.executescript(SCHEMA + "INSERT INTO note VALUES (1, 'a', 1), (2, 'b', 2);")
    pipeline = tmp_path / "pipeline.yaml"
    pipeline.write_text(
        yaml.safe_dump(
            {
                "name": "served",
                "source": {"type": "sqlite", "path": "served.db"},
                "destination": {"type": "delta", "path": "lake"},
                "state": "state",
                "spark": {"master": "local[2]"},
            }
        )
    )
    server = ServerProcess(served)
    assert f"tailrace serve-sync {served} --tape" in invoke("check", pipeline).output.replace("\n", " ")
    server.stop()
    server = ServerProcess(served, "--tape")
    theirs = turso.sync.connect(str(tmp_path / "theirs.db"), server.url)

    def edit(turn: int) -> None:
        """Changes of both clients and of a program that writes the served file."""
        with closing(sqlite3.connect(ours, isolation_level=None)) as local:
            local.execute("UPDATE note SET stars = ? WHERE id = 1", (turn,))
            local.execute("INSERT INTO note VALUES (?, 'ours', ?)", (100 + turn, turn))
        theirs.execute("INSERT INTO note VALUES (?, 'theirs', ?)", (200 + turn, turn))
        theirs.execute("DELETE FROM note WHERE id = ?", (199 + turn,))
        theirs.commit()
        theirs.push()
        theirs.pull()
        tailrace.sync(ours, server.url)
        with closing(sqlite3.connect(served, isolation_level=None, timeout=60)) as direct:
            direct.execute("INSERT INTO note VALUES (?, 'direct', ?)", (300 + turn, turn))

    try:
        with closing(theirs):
            tailrace.sync(ours, server.url)
            edit(1)
            with RunningPipeline(pipeline, once=True, failpoints="stream.staged:kill") as run:
                assert run.wait() == -signal.SIGKILL
            edit(2)
            with RunningPipeline(pipeline) as run:
                run.wait_until(all_ready)
                edit(3)
                wait_until(lambda: lake_rows(lake) == served_rows(served))
                edit(4)
                server.kill()
                server.start()
                edit(5)
                wait_until(lambda: lake_rows(lake) == served_rows(served))
                edit(6)
                run.kill()
            edit(7)
        server.kill()
        with closing(sqlite3.connect(served, isolation_level=None)) as direct:
            direct.execute("DELETE FROM note WHERE id = 2")
        server.start()
        apply(pipeline)
        assert lake_rows(lake) == served_rows(served)
        assert len(lake_rows(lake)) == 16
    finally:
        server.kill()


def test_the_example_with_three_replicas_runs(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "sync_three_replicas.py"
    done = subprocess.run([sys.executable, str(example), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-8:] == [
        "phone: 2 pushed, conflicts {}, 0 given up",
        "laptop: 2 pushed, conflicts {}, 1 given up",
        "laptop: 2 pulled, conflicts {}",
        "laptop: conflicts {'update-update': 1}, 1 given up",
        "the replicas are equal: True",
        "1 by phone 5",
        "2 by tablet 1",
        "3 third 1",
    ]
