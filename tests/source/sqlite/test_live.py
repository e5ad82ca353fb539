"""A file that another process writes meanwhile."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tailrace.errors import UnavailableError
from tailrace.source.follower import Limit
from tailrace.source.sqlite.connection import CapturedFile, EngineName
from tailrace.testing.replay import SourceReplay
from tests.support.sqlite_application import Application, make_source

OPEN = {
    "turso": "import turso; c = turso.connect(path, isolation_level=None, experimental_features='multiprocess_wal')\n"
    "c.execute(\"PRAGMA capture_data_changes_conn('full')\")\n",
    "sqlite": "import sqlite3; c = sqlite3.connect(path, isolation_level=None, timeout=30)\n",
    "alone": "import turso; c = turso.connect(path, isolation_level=None)\n",
}
WRITE = """
for number in range(400):
    c.execute("BEGIN")
    c.execute("INSERT INTO items VALUES (?, ?, ?)", (number, f"n{number}", number / 2))
    c.execute("UPDATE items SET price = price + 1 WHERE id % 7 = ?", (number % 7,))
    c.execute("DELETE FROM items WHERE id = ?", (number - 5 if number % 10 == 0 else -1,))
    c.execute("COMMIT")
rows = c.execute("SELECT count(*), sum(id), sum(price) FROM items").fetchone()
print(*rows, flush=True)
"""
HOLD = "c.execute('CREATE TABLE IF NOT EXISTS held (x)'); print('open', flush=True)\n"


@contextmanager
def program(path: Path, opens: str, does: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that writes the file, and then waits until its input is closed."""
    code = f"import sys; path = {str(path)!r}\n{OPEN[opens]}{does}\nsys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("library", ["turso", "sqlite"])
def test_a_file_is_tailed_while_another_process_writes_it(library: EngineName, tmp_path: Path) -> None:
    application = Application(tmp_path / "app.db", "turso" if library == "turso" else "trigger")
    application.run("CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT, price REAL)")
    application.capture()
    with SourceReplay(make_source(application, tmp_path), Limit(500, 10**9)) as replay:
        replay.catch_up()
        with program(application.path, library, WRITE) as process:
            assert process.stdout is not None
            batches = 0
            while process.poll() is None and replay.batch < 10_000:
                batches += replay.step()
                if batches > 2:
                    break
            expected = process.stdout.readline().split()
            replay.catch_up()
        rows = [*replay.contents()["main.items"]]
        found = (len(rows), sum(row[0] for row in rows), sum(row[2] for row in rows))
        assert found == tuple(float(value) for value in expected)
        assert batches > 2
    application.close()


def test_a_turso_file_that_its_application_does_not_share_is_unavailable(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with program(path, "alone", HOLD) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        refused = pytest.raises(UnavailableError, match="locked by another process")
        with refused as caught, CapturedFile("turso", str(path)).snapshot("testing"):
            raise AssertionError("it opened")
        assert "multiprocess_wal" in (caught.value.fix or "")
    with CapturedFile("turso", str(path)).snapshot("testing") as connection:
        assert connection.execute("SELECT count(*) FROM held").fetchall() == [(0,)]


def test_a_locked_sqlite_file_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.source.sqlite.connection.BUSY_SECONDS", 0.05)
    holder = sqlite3.connect(tmp_path / "app.db", isolation_level=None)
    holder.execute("CREATE TABLE held (x)")
    holder.execute("BEGIN EXCLUSIVE")
    engine = CapturedFile("sqlite", str(tmp_path / "app.db"))
    with pytest.raises(UnavailableError, match="locked"), engine.snapshot("testing") as connection:
        connection.execute("SELECT * FROM held").fetchall()
    holder.close()


def test_text_that_is_not_utf8_is_copied_without_being_altered(tmp_path: Path) -> None:
    application = Application(tmp_path / "app.db", "trigger")
    application.run("CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT)")
    application.run("INSERT INTO items VALUES (1, CAST(x'ff41' AS TEXT)), (2, 'é')")
    application.capture()
    source = make_source(application, tmp_path)
    with SourceReplay(source, Limit(500, 10**9)) as replay:
        assert replay.plan()
        assert replay.offset is not None
        assert replay.planned is not None
        (split,) = replay.follower.plan(replay.offset, replay.planned)
        (copied,) = source.read(split)
        assert copied.row.to_pylist() == [{"id": 1, "name": None}, {"id": 2, "name": "é"}]
        assert copied.batch.column("exact").to_pylist() == ['{"name": "X\'FF41\'"}', None]
    application.close()
