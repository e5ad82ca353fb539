"""The console, in a pipeline of its own and next to another: standard output has the changes and nothing else."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import yaml

from tailrace.testing.wait import wait_until
from tests.support.runner import command
from tests.support.sqlite_application import Application


def write(folder: Path, destination: dict[str, Any]) -> Path:
    file = folder / "shop.yaml"
    sections = {
        "name": "shop",
        "source": {"type": "sqlite", "path": str(folder / "app.db"), "purge": "0s"},
        "destination": destination,
        "spark": {"master": "local[2]"},
    }
    file.write_text(yaml.safe_dump(sections))
    return file


def run(file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command("run", str(file), "--once", *options), capture_output=True, text=True)


def test_standard_output_has_every_change_and_nothing_else(tmp_path: Path) -> None:
    file = write(tmp_path, {"type": "console"})
    application = Application(tmp_path / "app.db", "trigger")
    application.run("CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT)")
    application.run("CREATE TABLE notes (id INTEGER PRIMARY KEY, text TEXT)")
    application.run("INSERT INTO items VALUES (1, 'there before')")
    application.capture()
    first = run(file)
    assert (first.returncode, first.stdout) == (0, ""), first.stderr
    application.run("BEGIN")
    application.run("INSERT INTO items VALUES (2, ?)", "two\nlines")
    application.run("INSERT INTO notes VALUES (7, 'x')")
    application.run("UPDATE items SET name = 'changed' WHERE id = 1")
    application.run("COMMIT")
    application.run("DELETE FROM items WHERE id = 2")
    second = run(file)
    assert second.returncode == 0, second.stderr
    assert [line.partition(" main.")[2] for line in second.stdout.splitlines()] == [
        'items insert id=2 name="two\\nlines"',
        'notes insert id=7 text="x"',
        'items update id=1 name="changed"',
        "items delete id=2",
    ]
    assert "event=progress" in second.stderr
    application.run("UPDATE notes SET text = 'y'")
    end, closed = os.pipe()
    os.close(end)
    unread = subprocess.run(command("run", str(file), "--once"), stdout=closed, stderr=subprocess.PIPE, text=True)
    os.close(closed)
    assert unread.returncode == 141, unread.stderr
    third = run(file, "--json")
    assert third.returncode == 0, third.stderr
    [line] = third.stdout.splitlines()
    change = json.loads(line)
    assert (change["table"], change["op"], change["key"], change["columns"]) == (
        "main.notes",
        "update",
        {"id": 7},
        {"text": "y"},
    )
    application.close()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def test_a_look_prints_what_changes_and_leaves_the_pipeline_as_it_was(tmp_path: Path) -> None:
    file = write(tmp_path, {"type": "sqlite", "path": str(tmp_path / "replica.db")})
    application = Application(tmp_path / "app.db", "trigger")
    application.run("CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT)")
    application.run("INSERT INTO items VALUES (1, 'there before')")
    application.capture()
    assert run(file).returncode == 0
    application.run("INSERT INTO items VALUES (2, 'before the look')")
    kept = contents(tmp_path / ".tailrace")
    replica = (tmp_path / "replica.db").read_bytes()
    (tmp_path / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    said = tmp_path / "said.txt"
    with said.open("w") as stderr:
        look = subprocess.Popen(
            command("run", str(file), "--to", "console", "--json"),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
        )
    with look:
        try:
            wait_until(lambda: '"state": "Ready"' in said.read_text(), seconds=120)
            application.run("UPDATE items SET name = 'changed' WHERE id = 1")
            assert look.stdout is not None
            change = json.loads(look.stdout.readline())
        finally:
            look.terminate()
        rest = look.stdout.read()
    assert (look.returncode, rest) == (0, ""), said.read_text()
    assert (change["table"], change["op"], change["columns"]) == ("main.items", "update", {"name": "changed"})
    assert contents(tmp_path / ".tailrace") == kept
    assert (tmp_path / "replica.db").read_bytes() == replica
    assert not list((tmp_path / "tmp").glob("tailrace-look-*"))
    assert run(file).returncode == 0
    with closing(sqlite3.connect(tmp_path / "replica.db")) as replicated:
        rows = replicated.execute("SELECT id, name FROM items ORDER BY id").fetchall()
    assert rows == [(1, "changed"), (2, "before the look")]
    application.close()
