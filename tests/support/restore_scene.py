"""Pipelines of every source whose parts can be put back to an earlier copy, removed or damaged, one by one.

Each has a table `items` that changes with every `change`, and a table `quiet` that does not change after the first.
"""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml

from tailrace import Pipeline
from tailrace.cli.operate import ask, reset_pipeline
from tailrace.config.pipeline import load
from tailrace.config.registry import open_source
from tailrace.demo.server import EmbeddedPostgres
from tailrace.errors import TailraceError
from tailrace.state.status import TableStatus
from tailrace.testing.wait import wait_until
from tailrace.verify.comparison import verify
from tests.support.database import PostgresDatabase
from tests.support.rqlite_following import free_port
from tests.support.rqlite_node import RqliteNode
from tests.support.slatedb_writing import Writer
from tests.support.sqlite_application import Application, Kind


class RestoreScene(ABC):
    """One pipeline in one folder: `state`, `lake`, and what the upstream keeps in `upstream`."""

    name = "restore"
    items: str
    source: dict[str, Any]
    tables: ClassVar[dict[str, Any]] = {}
    destination: ClassVar[dict[str, Any]] = {"type": "delta", "path": "lake"}

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "pipeline.yaml"
        self.upstream = folder / "upstream"
        self.upstream.mkdir()
        self.stack = ExitStack()

    def __enter__(self) -> Self:
        self.open()
        self.begin()
        self.configure()
        return self

    def configure(self) -> None:
        """Write the pipeline's file."""
        sections = {
            "name": self.name,
            "source": self.source,
            "tables": self.tables,
            "destination": self.destination,
            "state": "state",
        }
        self.file.write_text(yaml.safe_dump(sections))

    def __exit__(self, *_: object) -> None:
        self.close()
        self.stack.close()

    # -- the upstream -------------------------------------------------------------------------------------

    @abstractmethod
    def open(self) -> None:
        """Start it with what is in `upstream`."""

    @abstractmethod
    def close(self) -> None:
        """Stop it, so that `upstream` can be copied."""

    @abstractmethod
    def begin(self) -> None:
        """Make both tables."""

    @abstractmethod
    def change(self, number: int) -> None:
        """Change `items`: a new row and another value of an old one."""

    def receive(self, number: int) -> None:
        """A change that a receiver takes in, and that no batch applies. Without a receiver it stays upstream."""
        self.change(number)

    # -- the pipeline -------------------------------------------------------------------------------------

    def run(self) -> None:
        Pipeline.from_file(self.file).run(once=True)

    def errored(self) -> tuple[TableStatus, ...]:
        return Pipeline.from_file(self.file).status().errored

    def resync(self, table: str) -> None:
        ask(load(self.file), "resync", table, as_json=True)

    def reset(self) -> None:
        reset_pipeline([load(self.file)], whole=True, as_json=True)

    def differing(self) -> list[str]:
        """The tables that are not the same at both ends."""
        return [one.table for one in verify(load(self.file)) if one.compared and not one.equal]

    # -- its parts ----------------------------------------------------------------------------------------

    def places(self, part: str) -> list[Path]:
        """The files and folders of a part, in the pipeline's folder."""
        state = self.folder / "state"
        own = [
            path for path in state.glob("*") if path.name in ("journal", "tape", "sqlite", "turso", "poll", "slatedb")
        ]
        return {
            "state store": sorted(state.glob("state.db*")),
            "checkpoint": [state / "checkpoint"],
            "journal": own,
            "state folder": [state],
            "lake": [self.folder / "lake"],
            "upstream": [self.upstream],
        }[part]

    def keep(self, copy: Path) -> None:
        """Copy everything, as a backup does while nothing runs."""
        self.close()
        copy.mkdir()
        for part in ("state folder", "lake", "upstream"):
            for place in self.places(part):
                if place.exists():
                    shutil.copytree(place, copy / place.name, symlinks=True)
        self.open()

    def put_back(self, part: str, copy: Path) -> None:
        """Replace a part by its copy; what the copy lacks is removed."""
        if part == "upstream":
            self.close()
        self.remove(part, closed=True)
        for place in self.places_in(part, copy):
            target = self.folder / place.relative_to(copy)
            if place.is_dir():
                shutil.copytree(place, target, symlinks=True)
            else:
                shutil.copy2(place, target)
        if part == "upstream":
            self.open()

    def places_in(self, part: str, copy: Path) -> list[Path]:
        here = self.folder
        try:
            self.folder, self.upstream = copy, copy / "upstream"
            return [place for place in self.places(part) if place.exists()]
        finally:
            self.folder, self.upstream = here, here / "upstream"

    def remove(self, part: str, *, closed: bool = False) -> None:
        if part == "upstream" and not closed:
            self.close()
        # Without the folder of all tables a pipeline waits: its disk may not be mounted.
        for place in (self.folder / "lake").glob("*/*") if part == "lake" and not closed else self.places(part):
            if place.is_dir():
                shutil.rmtree(place)
            else:
                place.unlink(missing_ok=True)

    def damage(self, part: str) -> None:
        """Change bytes in the middle of every file that a part needs next."""
        for file in self.needed(part):
            content = bytearray(file.read_bytes())
            # The last record of a journal is the one that no batch has applied.
            middle = len(content) - 16 if file.suffix == ".seg" else len(content) // 2
            content[middle : middle + 8] = bytes(byte ^ 0x15 for byte in content[middle : middle + 8])
            file.write_bytes(content)

    def needed(self, part: str) -> Iterator[Path]:
        if part == "state store":
            # Where SQLite keeps the header of its first page.
            file = self.folder / "state" / "state.db"
            content = bytearray(file.read_bytes())
            content[:100] = bytes(100)
            file.write_bytes(content)
        elif part == "checkpoint":
            for log in ("offsets", "commits"):
                yield max((self.folder / "state" / "checkpoint" / log).glob("[0-9]*"), key=lambda file: int(file.name))
        elif part == "journal":
            files = [file for place in self.places(part) for file in place.rglob("*") if file.is_file()]
            yield from [file for file in files if file.suffix == ".seg"] or files
        elif part == "lake":
            yield from (self.folder / "lake").rglob("items/part-*.parquet")


class SqliteScene(RestoreScene):
    """A file that an application writes through triggers or through Turso."""

    kind: Kind = "trigger"
    items = "main.items"

    def open(self) -> None:
        self.source = {"type": "turso" if self.kind == "turso" else "sqlite", "path": "upstream/app.db"}
        self.application = Application(self.upstream / "app.db", self.kind)
        if self.kind == "turso":
            self.application.capture()

    def close(self) -> None:
        self.application.close()

    def begin(self) -> None:
        for table in ("items", "quiet"):
            self.application.run(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, v INTEGER)")
        self.application.capture()
        for table in ("items", "quiet"):
            self.application.run(f"INSERT INTO {table} VALUES (1, 0), (2, 0)")

    def change(self, number: int) -> None:
        self.application.run("INSERT INTO items VALUES (?, ?)", 100 + number, number)
        self.application.run("UPDATE items SET v = ? WHERE id = 1", number)


class ReplicaScene(SqliteScene):
    """A file that is kept as a replica."""

    destination: ClassVar[dict[str, Any]] = {"type": "sqlite", "path": "lake/replica.db"}


class TursoScene(SqliteScene):
    kind = "turso"


class PollScene(RestoreScene):
    """A file whose tables are polled by a version column, with full diffs."""

    items = "main.items"
    tables: ClassVar[dict[str, Any]] = {
        "include": ["main.*"],
        "defaults": {"updated_at": "version", "deletes": {"full_diff": {"every_cycles": 1}}},
    }

    def open(self) -> None:
        dsn = f"sqlite:///{self.upstream}/app.db"
        self.source = {"type": "poll", "dsn": dsn, "interval": "10ms", "idle_interval": "10ms"}

    def close(self) -> None:
        pass

    def execute(self, *statements: str) -> None:
        with closing(sqlite3.connect(self.upstream / "app.db", isolation_level=None)) as connection:
            for statement in statements:
                connection.execute(statement)

    def begin(self) -> None:
        for table in ("items", "quiet"):
            self.execute(
                f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, v INTEGER, version INTEGER)",
                f"INSERT INTO {table} VALUES (1, 0, 1), (2, 0, 2)",
            )

    def change(self, number: int) -> None:
        self.execute(
            f"INSERT INTO items VALUES ({100 + number}, {number}, {10 * number})",
            f"UPDATE items SET v = {number}, version = {10 * number + 1} WHERE id = 1",
        )


class SlateDbScene(RestoreScene):
    """A local store that a writer in this process fills."""

    items = "slatedb.items"
    tables: ClassVar[dict[str, Any]] = {
        "settings": {
            "slatedb.items": {"mapping": {"prefix": "i/", "key": "utf8", "value": "utf8"}},
            "slatedb.quiet": {"mapping": {"prefix": "q/", "key": "utf8", "value": "utf8"}},
        }
    }

    def open(self) -> None:
        store = {"type": "local", "path": "upstream"}
        self.source = {"type": "slatedb", "path": "db1", "store": store, "poll": "1ms"}
        self.writer = Writer(self.upstream)

    def close(self) -> None:
        self.writer.__exit__()

    def begin(self) -> None:
        for key in (b"i/1", b"i/2", b"q/1", b"q/2"):
            self.writer.put(key, b"0")

    def change(self, number: int) -> None:
        self.writer.put(b"i/%d" % (100 + number), b"%d" % number)
        self.writer.put(b"i/1", b"%d" % number)


class RqliteScene(RestoreScene):
    """A scripted node with an API; what it holds is in memory, so its copies are lists of statements."""

    items = "svc.items"

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def begin(self) -> None:
        self.port = free_port()
        self.rebuild()

    def rebuild(self) -> None:
        """A cluster as it was in the beginning, that posts to the same place."""
        nodes = self.stack.pop_all()
        nodes.close()
        self.node = self.stack.enter_context(RqliteNode(f"http://127.0.0.1:{self.port}/cdc", service="svc"))
        self.source = {"type": "rqlite", "listen": f"127.0.0.1:{self.port}", "api": self.node.url}
        for table in ("items", "quiet"):
            self.node.execute(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, v INTEGER)")
            self.node.execute(f"INSERT INTO {table} VALUES (1, 0), (2, 0)")

    def put_back(self, part: str, copy: Path) -> None:
        if part != "upstream":
            super().put_back(part, copy)
            return
        self.rebuild()
        self.configure()

    def receive(self, number: int) -> None:
        with open_source(load(self.file)).receive():
            self.change(number)
            self.node.settle()

    def change(self, number: int) -> None:
        self.node.execute(f"INSERT INTO items VALUES ({100 + number}, {number})")
        self.node.execute(f"UPDATE items SET v = {number} WHERE id = 1")


class PostgresScene(RestoreScene):
    """A database on a server that others use as well."""

    items = "public.items"

    def __init__(self, folder: Path, database: PostgresDatabase) -> None:
        super().__init__(folder)
        self.database = database
        self.name = database.name

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def receive(self, number: int) -> None:
        confirmed = "SELECT confirmed_flush_lsn >= %s FROM pg_replication_slots WHERE database = current_database()"
        with open_source(load(self.file)).receive(), self.database.connect() as connection:
            self.change(number)
            row = connection.execute("SELECT pg_current_wal_flush_lsn()").fetchone()
            assert row is not None
            connection.execute("SELECT pg_logical_emit_message(true, 'after', 'it')")
            wait_until(lambda: connection.execute(confirmed, row).fetchone() == (True,))

    def execute(self, *statements: str) -> None:
        with self.database.connect() as connection:
            for statement in statements:
                connection.execute(statement)

    def begin(self) -> None:
        self.source = {"type": "postgres", "dsn": self.database.dsn}
        for table in ("items", "quiet"):
            self.execute(
                f"CREATE TABLE {table} (id int PRIMARY KEY, v int)", f"INSERT INTO {table} VALUES (1, 0), (2, 0)"
            )

    def change(self, number: int) -> None:
        self.execute(
            f"INSERT INTO items VALUES ({100 + number}, {number})", f"UPDATE items SET v = {number} WHERE id = 1"
        )


class PostgresServerScene(PostgresScene):
    """A server of its own, whose data folder can be put back."""

    def __init__(self, folder: Path) -> None:
        self.server = EmbeddedPostgres(folder / "data")
        super().__init__(folder, PostgresDatabase(self.server, "postgres"))

    def open(self) -> None:
        self.server.start()

    def close(self) -> None:
        self.server.stop()

    def keep(self, copy: Path) -> None:
        super().keep(copy)
        self.close()
        # The files belong to the account of the server.
        subprocess.run(["cp", "-a", f"{self.server.data_dir}/.", copy / "server"], check=True)
        self.open()

    def put_back(self, part: str, copy: Path) -> None:
        if part != "upstream":
            super().put_back(part, copy)
            return
        self.close()
        self.put_back_files(copy)
        self.open()

    def put_back_files(self, copy: Path) -> None:
        """Put the data folder of a stopped server back."""
        for place in self.server.data_dir.iterdir():
            subprocess.run(["rm", "-rf", place], check=True)
        subprocess.run(["cp", "-a", f"{copy}/server/.", self.server.data_dir], check=True)


SCENES: dict[str, type[RestoreScene]] = {
    "sqlite": SqliteScene,
    "turso": TursoScene,
    "rqlite": RqliteScene,
    "slatedb": SlateDbScene,
    "poll": PollScene,
}


@dataclass(frozen=True)
class Outcome:
    """What a run said: `right`, `table` when it stopped tables, or the exit code of its error."""

    word: str
    message: str = ""
    fix: str = ""


def outcome(scene: RestoreScene) -> Outcome:
    """Run the pipeline."""
    try:
        scene.run()
    except TailraceError as error:
        return Outcome(str(error.exit_code), error.message, error.fix or "")
    return Outcome("table" if scene.errored() else "right")
