"""`type: console` in a pipeline of its own: standard output has the changes, in order, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import yaml

from tests.support.runner import command
from tests.support.sqlite_application import Application


def run(file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command("run", str(file), "--once", *options), capture_output=True, text=True)


def test_standard_output_has_every_change_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "shop.yaml"
    sections = {
        "name": "shop",
        "source": {"type": "sqlite", "path": str(tmp_path / "app.db")},
        "destination": {"type": "console"},
        "spark": {"master": "local[2]"},
    }
    file.write_text(yaml.safe_dump(sections))
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
