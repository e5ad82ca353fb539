"""A replica that an application writes and syncs at random.

python -m tests.sync.replica_process KIND FILE URL NAME RUN

KIND is `turso` or `tailrace`. It prints the entry of each commit once that is acknowledged. With a RUN of `last` it
writes nothing and ends when it has synced twice.
"""

from __future__ import annotations

import random
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

SCHEMA = """
CREATE TABLE entry (id TEXT PRIMARY KEY, client TEXT);
CREATE TABLE item (id INTEGER PRIMARY KEY, a TEXT, b INTEGER, c REAL);
CREATE TABLE person (mail TEXT PRIMARY KEY, name TEXT UNIQUE);
"""
KEYS, MAILS, NAMES = 30, 15, 6


def edit(execute: Callable[..., Any], chance: random.Random, *, is_turso: bool) -> None:
    """Some changes. Turso's client cannot sync changed keys and broken UNIQUE constraints, so it makes none."""
    for _ in range(chance.randint(1, 4)):
        key = chance.randint(1, KEYS)
        if not is_turso and chance.random() < 0.2:
            values = (f"m{chance.randint(1, MAILS)}", f"n{chance.randint(1, NAMES)}")
            execute("INSERT OR IGNORE INTO person VALUES (?, ?)", values)
            if chance.random() < 0.5:
                execute("DELETE FROM person WHERE mail = ?", (f"m{chance.randint(1, MAILS)}",))
        elif not is_turso and chance.random() < 0.1:
            execute("UPDATE OR IGNORE item SET id = ? WHERE id = ?", (chance.randint(1, KEYS), key))
        elif not list(execute("SELECT 1 FROM item WHERE id = ?", (key,)).fetchall()):
            execute("INSERT INTO item VALUES (?, ?, ?, ?)", (key, f"t{chance.random()}", key, 0.5))
        elif chance.random() < 0.25:
            execute("DELETE FROM item WHERE id = ?", (key,))
        else:
            column = chance.choice(["a", "b", "c"])
            execute(f"UPDATE item SET {column} = ? WHERE id = ?", (chance.randint(0, 999), key))


class TursoReplica:
    def __init__(self, file: str, url: str) -> None:
        import turso.sync

        self._error = turso.sync.Error
        self._connection = turso.sync.connect(file, url)

    def commit(self, entry: str, name: str, chance: random.Random) -> None:
        self._connection.execute("INSERT INTO entry VALUES (?, ?)", (entry, name))
        edit(self._connection.execute, chance, is_turso=True)
        self._connection.commit()

    def sync(self) -> bool:
        try:
            self._connection.push()
            self._connection.pull()
        except (self._error, OSError) as error:
            print("#", error, file=sys.stderr)
            return False
        return True


class TailraceReplica:
    def __init__(self, file: str, url: str) -> None:
        self._file, self._url = file, url
        if not Path(file).exists() and not self.sync():
            raise OSError("the server is down")

    def commit(self, entry: str, name: str, chance: random.Random) -> None:
        with closing(sqlite3.connect(self._file, timeout=300, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT INTO entry VALUES (?, ?)", (entry, name))
            edit(connection.execute, chance, is_turso=False)
            connection.execute("COMMIT")

    def sync(self) -> bool:
        import tailrace
        from tailrace.errors import UnavailableError

        try:
            tailrace.sync(self._file, self._url)
        except UnavailableError as error:
            print("#", error, file=sys.stderr)
            return False
        return True


def main(kind: str, file: str, url: str, name: str, run: str) -> None:
    chance = random.Random(f"{name} {run}")
    replica: TursoReplica | TailraceReplica | None = None
    while replica is None:
        try:
            replica = TursoReplica(file, url) if kind == "turso" else TailraceReplica(file, url)
        except Exception as error:  # noqa: BLE001 - a server that is down; each client has an error of its own
            print("#", error, file=sys.stderr)
            time.sleep(0.1)
    done = 0
    while run == "last" and done < 2:
        done += replica.sync()
    number = 0
    while run != "last":
        number += 1
        entry = f"{name}-{run}-{number}"
        replica.commit(entry, name, chance)
        print(entry, flush=True)
        if chance.random() < 0.4:
            replica.sync()
        time.sleep(chance.random() * 0.02)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main(*sys.argv[1:])
