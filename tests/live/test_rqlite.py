"""An rqlite cluster in the pipeline, end to end: copied, followed, failed over, killed, and the same in the end."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import yaml
from deltalake import DeltaTable

from tailrace.config.pipeline import load
from tailrace.source.rqlite.receiver import STATUS
from tailrace.system.child_process import read_status
from tailrace.testing.wait import wait_until
from tests.support.invocation import apply, invoke
from tests.support.process import descendants
from tests.support.rqlite_following import free_port
from tests.support.rqlite_node import RqliteNode
from tests.support.runner import RunningPipeline, all_ready, command


def lake_rows(lake: Path, table: str, columns: list[str]) -> list[tuple[Any, ...]]:
    rows = DeltaTable(str(lake / "svc" / table)).to_pyarrow_table(columns=columns).to_pylist()
    return sorted(tuple(row[name] for name in columns) for row in rows)


def write_pipeline(file: Path, port: int, api: str) -> Path:
    source = {"type": "rqlite", "listen": f"127.0.0.1:{port}", "api": api, "copy": {"chunk_rows": 100}}
    content = {
        "name": "live_rqlite",
        "source": source,
        "destination": {"type": "delta", "path": "lake"},
        "state": "state",
        "spark": {"master": "local[2]"},
    }
    file.write_text(yaml.safe_dump(content))
    return file


def test_a_cluster_reaches_the_lake_whole_though_its_receiving_and_its_following_were_killed(tmp_path: Path) -> None:
    port = free_port()
    with RqliteNode(f"http://127.0.0.1:{port}/cdc", service="svc") as node:
        node.execute("CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT, price REAL, data BLOB)")
        node.execute("CREATE TABLE words (w TEXT NOT NULL PRIMARY KEY, n INTEGER) WITHOUT ROWID")
        node.execute(
            *(["INSERT INTO items VALUES (?, ?, ?, x'00FF')", n, f"item {n}", n / 4] for n in range(300)),
            transaction=True,
        )
        file = write_pipeline(tmp_path / "pipeline.yaml", port, node.url)
        node.execute("UPDATE items SET name = name || '!' WHERE id % 5 = 0")
        node.execute("INSERT INTO words VALUES ('word', 0)")
        # What the node posted is in the journal, and the node does not know it.
        with RunningPipeline(file, failpoints="rqlite.appended:kill") as run:
            assert run.wait() == -signal.SIGKILL, run.log_tail()
        node.fail_over(back=5)

        with RunningPipeline(file) as run:
            run.wait_until(all_ready)
            node.execute("DELETE FROM items WHERE id % 7 = 0")
            node.execute("UPDATE words SET w = 'moved' WHERE w = 'word'")
            node.execute("ALTER TABLE items ADD COLUMN note TEXT DEFAULT 'none'")
            node.execute("UPDATE items SET note = 'seen' WHERE id = 1")
            node.execute("UPDATE items SET note = 'too' WHERE id = 2")
            node.settle()
            run.kill()
            node.fail_over(back=3)
            node.execute("UPDATE items SET id = 1000 WHERE id = 3")

        apply(file)
        for table, columns in (("items", ["id", "name", "price", "data", "note"]), ("words", ["w", "n"])):
            upstream = node.rows(f"SELECT {', '.join(columns)} FROM {table}")
            assert lake_rows(tmp_path / "lake", table, columns) == sorted(upstream)


def verify(file: Path) -> tuple[int, dict[str, Any]]:
    """The exit code of `tailrace verify`, and what it found."""
    done = invoke("verify", file, "--json")
    assert done.stdout, done.stderr
    return done.exit_code, json.loads(done.stdout)


def test_a_pipeline_leaves_receiving_to_the_one_that_is_there_and_takes_over_when_it_ends(tmp_path: Path) -> None:
    port = free_port()
    with RqliteNode(f"http://127.0.0.1:{port}/cdc", service="svc") as node:
        node.execute("CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT, price REAL, data BLOB, at DATETIME)")
        node.execute("CREATE TABLE words (w TEXT NOT NULL PRIMARY KEY, n INTEGER) WITHOUT ROWID")
        node.execute("CREATE TABLE bag (v, n NUMERIC)")
        node.execute("INSERT INTO items VALUES (1, 'one', 2.0, x'00FF', '2024-01-01'), (-2, NULL, 9e99, NULL, 'soon')")
        node.execute("INSERT INTO words VALUES ('a', 1), ('ä', 9223372036854775807)")
        node.execute("INSERT INTO bag VALUES ('x', 1.5), (x'AB', 'text'), (NULL, NULL)")
        file = write_pipeline(tmp_path / "pipeline.yaml", port, node.url)
        journal = tmp_path / "state" / "journal"
        with (tmp_path / "receive.log").open("w") as log:
            alone = subprocess.Popen(command("receive", str(file)), stdout=log, stderr=log, start_new_session=True)

        def receiver() -> int | None:
            status = read_status(journal, STATUS)
            return status["pid"] if status.get("receiving") else None

        try:
            wait_until(lambda: receiver() == alone.pid)
            with RunningPipeline(file) as run:
                run.wait_until(all_ready)
                node.execute("UPDATE items SET name = 'two' WHERE id = -2")
                node.settle()
                assert receiver() == alone.pid
                alone.send_signal(signal.SIGTERM)
                assert alone.wait() == 0, (tmp_path / "receive.log").read_text()
                node.execute("INSERT INTO items (id, name) VALUES (3, 'three')")
                node.execute("DELETE FROM words WHERE n = 1")
                node.settle()
                wait_until(lambda: receiver() in descendants(run.pid))
                run.terminate()
                assert run.wait() == 0, run.log_tail()
        finally:
            if alone.poll() is None:
                alone.kill()
            alone.wait()

        apply(file)
        code, found = verify(file)
        assert (code, found["equal"]) == (0, True), found
        assert {one["table"]: one["source_rows"] for one in found["tables"]} == {
            "svc.items": 3,
            "svc.words": 1,
            "svc.bag": 3,
        }
        node.execute("UPDATE items SET price = 1 WHERE id = 3")
        node.execute("INSERT INTO words VALUES ('new', 1)")
        node.execute("DELETE FROM bag WHERE v = 'x'")
        code, found = verify(file)
        differing = {one["table"]: (one["missing"], one["extra"], one["different"]) for one in found["tables"]}
        assert code == 8
        assert differing == {"svc.items": (0, 0, 1), "svc.words": (1, 0, 0), "svc.bag": (0, 1, 0)}


def test_the_example_is_understood(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "rqlite.yaml"
    copy = tmp_path / "rqlite.yaml"
    copy.write_text(example.read_text())
    assert load(copy, connects=False).name == "fleet"
