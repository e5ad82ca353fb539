"""Three replicas of one file, written offline, and a pipeline that follows the file into Delta while they sync.

python examples/sync_three_replicas.py FOLDER

Two replicas are plain SQLite files that tailrace syncs, the third is Turso's own client. Needs the extras `sync` and
`turso`.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pyarrow as pa
import turso.sync
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql import SparkSession

import tailrace
from tailrace import Pipeline

QUERY = "SELECT id, text, stars FROM note ORDER BY id"
Row = tuple[object, ...]


def say(text: str) -> None:
    sys.stdout.write(text + "\n")


def make_notes(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE note (id INTEGER PRIMARY KEY, text TEXT, stars INTEGER)")
        connection.execute("CREATE TABLE person (mail TEXT PRIMARY KEY, name TEXT UNIQUE)")
        connection.execute("INSERT INTO note VALUES (1, 'first', 0), (2, 'second', 0)")


@contextmanager
def serving(path: Path) -> Iterator[str]:
    """`tailrace serve-sync`; with `--tape` a pipeline can follow the file."""
    command = [
        str(Path(sys.executable).with_name("tailrace")),
        "serve-sync",
        str(path),
        "--tape",
        "--listen",
        "127.0.0.1:0",
    ]
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


def write(path: Path, *statements: str) -> None:
    """An application, which knows nothing of the sync."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def read(path: Path) -> list[Row]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(QUERY).fetchall()


def read_lake(folder: Path) -> list[Row]:
    lake = QueryBuilder().register("note", DeltaTable(str(folder / "lake" / "main" / "note")))
    return [tuple(row.values()) for row in pa.table(lake.execute(QUERY).read_all()).to_pylist()]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the lake does not have all rows after five minutes")
        time.sleep(0.2)


def work(phone: Path, laptop: Path, url: str, folder: Path) -> None:
    """All three replicas write offline, and sync one after the other."""
    tablet = turso.sync.connect(str(folder / "tablet.db"), url)
    write(phone, "UPDATE note SET text = 'by phone' WHERE id = 1", "INSERT INTO person VALUES ('a@x', 'Ada')")
    write(laptop, "UPDATE note SET stars = 5 WHERE id = 1", "UPDATE note SET text = 'by laptop' WHERE id = 2")
    write(laptop, "INSERT INTO person VALUES ('b@x', 'Ada')")
    with closing(tablet):
        tablet.execute("UPDATE note SET text = 'by tablet' WHERE id = 2")
        tablet.execute("INSERT INTO note VALUES (3, 'third', 1)")
        tablet.commit()
        for name, replica in (("phone", phone), ("laptop", laptop)):
            done = tailrace.sync(replica, url)
            say(f"{name}: {done.pushed} pushed, conflicts {done.conflicts}, {done.dead_letters} given up")
        tablet.push()
        tablet.pull()
        done = tailrace.sync(laptop, url)
        say(f"laptop: {done.pulled} pulled, conflicts {done.conflicts}")
        # Turso's client overwrites silently. Ours reports what it meets.
        tablet.execute("UPDATE note SET stars = 1 WHERE id = 2")
        tablet.commit()
        tablet.push()
        write(laptop, "UPDATE note SET stars = 2 WHERE id = 2")
        done = tailrace.sync(laptop, url, conflict="remote")
        say(f"laptop: conflicts {done.conflicts}, {done.dead_letters} given up")
        tailrace.sync(phone, url)
        tablet.pull()
        same = [tuple(row) for row in tablet.execute(QUERY).fetchall()] == read(phone) == read(laptop)
        say(f"the replicas are equal: {same}")


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file, phone, laptop = (folder / f"{name}.db" for name in ("notes", "phone", "laptop"))
    make_notes(file)
    with serving(file) as url:
        for replica in (phone, laptop):
            tailrace.sync(replica, url)
        pipeline = Pipeline(
            name="notes",
            source={"type": "sqlite", "path": str(file)},
            destination={"type": "delta", "path": str(folder / "lake")},
            state=str(folder / "state"),
        )
        pipeline.run(once=True)
        following = threading.Thread(target=pipeline.run)
        following.start()
        work(phone, laptop, url, folder)
        wait_until(lambda: read_lake(folder) == read(file))
        pipeline.drain()
        following.join()
    SparkSession.builder.getOrCreate().stop()
    for row in read_lake(folder):
        say(" ".join(map(str, row)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
