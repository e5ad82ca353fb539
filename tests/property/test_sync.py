"""Replicas of one file under random edits, policies, DDL and syncs that break off: all agree in the end."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apsw
import pytest

import tailrace
from tailrace.errors import UnavailableError
from tailrace.sync.conflict import POLICIES, SyncConflict
from tailrace.sync.hrana import Step
from tailrace.sync.remote import FileRemote
from tailrace.system import failpoint

SCHEMA = """
CREATE TABLE entry (id TEXT PRIMARY KEY, replica TEXT);
CREATE TABLE item (id INTEGER PRIMARY KEY, a, b NUMERIC, c REAL);
CREATE TABLE pair (x TEXT COLLATE NOCASE, y INTEGER, v TEXT DEFAULT 'none', PRIMARY KEY (x, y));
CREATE TABLE person (mail TEXT PRIMARY KEY, name TEXT UNIQUE);
INSERT INTO item VALUES (1, 'one', 1, 1.0), (2, x'00ff', 2, NULL), (3, NULL, 1.5, -0.0);
"""
TABLES = ("entry", "item", "pair", "person")
STEPS = ("sync.image", "sync.before-push", "sync.after-push", "sync.before-local-commit", "sync.after-local-commit")
VALUES = (None, 0, 1, -1, 2**63 - 1, 1.0, 0.1, 1e300, float("inf"), "", "a", "A", "ü", "1", "x" * 300, b"", b"\x00\xff")


class BreakOffError(BaseException):
    """The process would have died here."""


@dataclass
class Replica:
    file: Path
    remote: Path
    chance: random.Random
    entries: list[str] = field(default_factory=list)

    def edit(self) -> None:
        with closing(sqlite3.connect(self.file, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            entry = f"{self.file.stem}-{len(self.entries)}"
            connection.execute("INSERT INTO entry VALUES (?, ?)", (entry, self.file.stem))
            for _ in range(self.chance.randint(0, 5)):
                with suppress(sqlite3.IntegrityError):
                    self._change(connection.execute)
            if self.chance.random() < 0.1:
                connection.execute("ROLLBACK")
            else:
                connection.execute("COMMIT")
                self.entries.append(entry)

    def _change(self, execute: Callable[..., Any]) -> None:
        key, value = self.chance.randint(1, 12), self.chance.choice(VALUES)
        match self.chance.randint(0, 9):
            case 0 | 1:
                execute("INSERT OR REPLACE INTO item VALUES (?, ?, ?, 0.5)", (key, value, key))
            case 2 | 3:
                execute(f"UPDATE item SET {self.chance.choice('abc')} = ? WHERE id = ?", (value, key))
            case 4:
                execute("DELETE FROM item WHERE id = ?", (key,))
            case 5:
                execute("UPDATE item SET id = ? WHERE id = ?", (self.chance.randint(1, 12), key))
            case 6:
                x = self.chance.choice(["k", "K", None])
                execute("INSERT OR REPLACE INTO pair (x, y, v) VALUES (?, ?, ?)", (x, key % 4, f"v{key}"))
            case 7:
                execute("UPDATE pair SET x = ?, v = v || '.' WHERE y = ?", (self.chance.choice("kKl"), key % 4))
            case 8:
                execute("INSERT OR IGNORE INTO person VALUES (?, ?)", (f"m{key}", f"n{self.chance.randint(1, 5)}"))
            case _:
                execute("UPDATE person SET name = ? WHERE mail = ?", (f"n{self.chance.randint(1, 5)}", f"m{key}"))

    def alter(self, column: str) -> None:
        with closing(sqlite3.connect(self.file, isolation_level=None)) as connection:
            connection.execute(f"ALTER TABLE pair ADD COLUMN {column} INTEGER NOT NULL DEFAULT 7")
            connection.execute(f"UPDATE pair SET {column} = y")

    def sync(self) -> int:
        """Sync by some policy, and return how many own changes were given up."""

        def decide(conflict: SyncConflict) -> Any:
            chosen = self.chance.choice(["local", "remote", "merge"])
            return chosen if chosen != "merge" or conflict.own is None else dict(conflict.own)

        policy = self.chance.choice(["local", "local", "remote", None])
        on_conflict = decide if policy is None else None
        return tailrace.sync(self.file, self.remote, conflict=policy, on_conflict=on_conflict).dead_letters


def rows(file: Path, table: str) -> list[Any]:
    with closing(sqlite3.connect(file)) as connection:
        columns = sorted(name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})"))
        shown = ", ".join(f"typeof({name}), quote({name})" for name in columns)
        return sorted(connection.execute(f"SELECT {shown} FROM {table}").fetchall())


@pytest.mark.parametrize("seed", range(4))
def test_replicas_agree_whatever_they_write_and_wherever_their_syncs_break_off(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "local" in POLICIES
    chance = random.Random(seed)
    remote, oracle = tmp_path / "remote.db", tmp_path / "oracle.db"
    for file in (remote, oracle):
        with closing(apsw.Connection(str(file))) as connection:
            connection.execute(SCHEMA)
    pushes: list[Sequence[Step]] = []
    push = FileRemote.push

    def recorded(self: FileRemote, steps: Sequence[Step]) -> None:
        if chance.random() < 0.05:
            raise UnavailableError("it was never sent")
        push(self, steps)
        pushes.append(steps)
        if chance.random() < 0.1:
            raise UnavailableError("the answer never came")

    monkeypatch.setattr(FileRemote, "push", recorded)
    breaks = [0.0]

    def reach(name: str) -> None:
        if name in STEPS and chance.random() < breaks[0]:
            raise BreakOffError(name)

    monkeypatch.setattr(failpoint, "reach", reach)
    replicas = [Replica(tmp_path / f"r{number}.db", remote, chance) for number in range(3)]
    for replica in replicas:
        replica.sync()
    breaks[0] = 0.15
    added, broken = 0, 0
    for _ in range(60):
        replica = chance.choice(replicas)
        for _ in range(chance.randint(0, 3)):
            replica.edit()
        if chance.random() < 0.06:
            added += 1
            replica.alter(f"c{added}")
        if chance.random() < 0.7:
            try:
                replica.sync()
            except (UnavailableError, BreakOffError):
                broken += 1
    breaks[0] = 0.0
    for _ in range(3):
        for replica in replicas:
            for _ in range(20):
                with suppress(UnavailableError):
                    replica.sync()
                    break
    monkeypatch.setattr(FileRemote, "push", push)
    for replica in replicas:
        replica.sync()
    for replica in replicas:
        again = tailrace.sync(replica.file, remote)
        assert (again.pushed, again.pulled, again.cdc_operations) == (0, 0, 0)
    assert broken
    with closing(apsw.Connection(str(oracle))) as connection:
        for steps in pushes:
            for sql, values in steps:
                connection.execute(sql, values)
    for table in TABLES:
        expected = rows(remote, table)
        assert rows(oracle, table) == expected, table
        for replica in replicas:
            assert rows(replica.file, table) == expected, (table, replica.file)
    with closing(sqlite3.connect(remote)) as served:
        held = {entry for (entry,) in served.execute("SELECT id FROM entry")}
    assert held == {entry for replica in replicas for entry in replica.entries}
