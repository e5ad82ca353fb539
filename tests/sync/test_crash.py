"""Replicas of both kinds and their server, killed at random: everything acknowledged arrives, once, in one order."""

from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import turso

from tests.sync.conftest import ServerProcess
from tests.sync.push_recorder import PushRecorder, wait_until_idle
from tests.sync.replica_process import SCHEMA

KILLS = int(os.environ.get("TAILRACE_SOAK_KILLS", "12"))
SEED = int(os.environ.get("TAILRACE_SOAK_SEED", "1"))
KINDS = {"ours1": "tailrace", "ours2": "tailrace", "theirs1": "turso", "theirs2": "turso"}
TABLES = ("entry", "item", "person")
MOMENTS = ("before", "sent", "after")


class ReplicaProcess:
    """One replica's process, started again after each kill; `acknowledged` are the entries that it committed."""

    def __init__(self, name: str, folder: Path, recorder: PushRecorder) -> None:
        self.name, self.kind, self.file = name, KINDS[name], folder / f"{name}.db"
        self.acknowledged: list[str] = []
        self._recorder, self._runs = recorder, 0
        self.start()

    def start(self) -> None:
        self._runs += 1
        self._process = self._spawn(str(self._runs))
        self._reading = threading.Thread(target=self._read, args=(self._process,))
        self._reading.start()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reading.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        if self.kind == "turso":
            # Turso's own push does not say which state it builds on: one that arrives late would be applied twice.
            wait_until_idle(self._recorder, self.name)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def finish(self) -> None:
        process = self._spawn("last")
        process.communicate()
        assert process.returncode == 0

    def _spawn(self, run: str) -> subprocess.Popen[str]:
        url = self._recorder.url(self.name)
        command = [sys.executable, "-m", "tests.sync.replica_process", self.kind, str(self.file), url, self.name, run]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.endswith("\n"):
                self.acknowledged.append(line.strip())


@contextmanager
def writing_directly(file: Path) -> Iterator[None]:
    """Another program that writes the served file, reads it for long, and writes its log back as it likes."""
    stop = threading.Event()

    def run() -> None:
        chance = random.Random(SEED)
        with closing(sqlite3.connect(file, isolation_level=None, timeout=300)) as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS direct (id INTEGER PRIMARY KEY, filler BLOB)")
            while not stop.wait(chance.random() * 0.05):
                connection.execute("INSERT INTO direct (filler) VALUES (zeroblob(?))", (chance.randint(0, 20_000),))
                if chance.random() < 0.2:
                    connection.execute("DELETE FROM direct WHERE id % 3 = 0")
                if chance.random() < 0.2:
                    connection.execute(f"PRAGMA wal_checkpoint({chance.choice(['PASSIVE', 'RESTART', 'TRUNCATE'])})")

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def rows(connection: Any, table: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in connection.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall()]


class Ambush:
    """Kills a victim at one moment of one of its pushes (of any client's push, for the server)."""

    def __init__(self, recorder: PushRecorder, moment: str, client: str | None, chance: random.Random) -> None:
        self._moment, self._client, self._delay = moment, client, chance.random() * 0.01
        self._reached, self._sprung = threading.Event(), threading.Event()
        recorder.on_push = self._on_push

    def _on_push(self, moment: str, client: str) -> None:
        if moment != self._moment or self._client not in (None, client) or self._reached.is_set():
            return
        self._reached.set()
        if self._client is not None:
            # The request goes on while, or after, its client starts again.
            self._sprung.wait()
            time.sleep(self._delay * 50)

    def wait(self) -> None:
        assert self._reached.wait(300), "no push for five minutes"
        if self._client is None:
            time.sleep(self._delay)

    def release(self) -> None:
        self._sprung.set()


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(900 + 30 * KILLS)
def test_replicas_and_server_killed_at_random_lose_and_double_no_acknowledged_commit(tmp_path: Path) -> None:
    print(f"{KILLS} kills with seed {SEED}")
    chance = random.Random(SEED)
    served = tmp_path / "served.db"
    with closing(sqlite3.connect(served)) as connection:
        connection.executescript(SCHEMA)
    server = ServerProcess(served)
    recorder = PushRecorder(served, lambda: server.url, SCHEMA)
    replicas = {name: ReplicaProcess(name, tmp_path, recorder) for name in KINDS}
    try:
        while not all(replica.acknowledged for replica in replicas.values()):
            assert all(replica.is_alive() for replica in replicas.values())
            time.sleep(0.05)
        with writing_directly(served):
            for _ in range(KILLS):
                victim = chance.choice([*KINDS, *KINDS, "server", "server"])
                ambush = Ambush(recorder, chance.choice(MOMENTS), None if victim == "server" else victim, chance)
                if chance.random() < 0.7:
                    ambush.wait()
                else:
                    time.sleep(chance.random())
                killed = server if victim == "server" else replicas[victim]
                if victim == "server" or KINDS[victim] == "tailrace":
                    killed.kill()
                    killed.start()
                    ambush.release()
                else:
                    threading.Timer(0.05, ambush.release).start()
                    killed.kill()
                    killed.start()
                recorder.on_push = lambda moment, client: None
                assert all(replica.is_alive() for replica in replicas.values())
        for replica in replicas.values():
            replica.kill()
            wait_until_idle(recorder, replica.name)
        for _ in range(2):  # the second time all have what the others pushed
            for replica in replicas.values():
                replica.finish()
        assert recorder.unanswered < recorder.pushes
        check(served, recorder, list(replicas.values()))
    finally:
        for replica in replicas.values():
            if replica.is_alive():
                replica.kill()
        server.kill()
        recorder.close()


def check(served: Path, recorder: PushRecorder, replicas: list[ReplicaProcess]) -> None:
    acknowledged = {entry for replica in replicas for entry in replica.acknowledged}
    print(
        f"{len(acknowledged)} acknowledged commits, {recorder.pushes} pushes, {recorder.unanswered} without an answer"
    )
    assert acknowledged - recorder.entries.keys() == set()
    assert [entry for entry, times in recorder.entries.items() if times != 1] == []
    with closing(sqlite3.connect(served)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        expected = {table: rows(connection, table) for table in (*TABLES, "direct")}
    for table in TABLES:
        assert recorder.rows(f"SELECT * FROM {table} ORDER BY 1") == expected[table]
    for replica in replicas:
        with closing(
            turso.connect(str(replica.file)) if replica.kind == "turso" else sqlite3.connect(replica.file)
        ) as own:
            assert {table: rows(own, table) for table in expected} == expected, replica.name
