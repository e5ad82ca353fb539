"""A private server, and how fast PostgreSQL's own programs read from it over TCP."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import psycopg

from tailrace.demo.server import EmbeddedPostgres

PUBLICATION = "bench"
# The default durability; large enough that neither checkpoints nor disk reads disturb a measurement.
SETTINGS = {
    "shared_buffers": "512MB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "1h",
    "autovacuum": "off",
}


class Server:
    """A private server in a folder, with the client programs of its installation."""

    def __init__(self, folder: Path) -> None:
        self.postgres = EmbeddedPostgres(folder / "postgres", fast=False, settings=SETTINGS)
        self._slots = 0

    def __enter__(self) -> Server:
        self.postgres.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.postgres.stop()

    def create_database(self, name: str) -> psycopg.Connection:
        """Create a database in which every table is published. Returns a connection in autocommit."""
        with self.postgres.connect() as connection:
            connection.execute(f"CREATE DATABASE {name}")
        connection = self.postgres.connect(name)
        connection.execute(f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES")
        return connection

    def drop_database(self, name: str) -> None:
        with self.postgres.connect() as connection:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def copy_out(self, database: str, table: str) -> float:
        """The seconds that `psql` takes to read a table in binary form and discard it."""
        command = [str(self.postgres.bin_dir / "psql"), self.postgres.dsn(database), "--no-psqlrc", "--quiet"]
        return _timed([*command, "--command", f"COPY {table} TO STDOUT (FORMAT binary)"])

    def create_slot(self, connection: psycopg.Connection) -> str:
        self._slots += 1
        name = f"bench_{self._slots}"
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])
        return name

    def receive(self, connection: psycopg.Connection, slot: str) -> float:
        """The seconds that `pg_recvlogical` takes to read a slot to its end and discard the changes. Drops the slot."""
        row = connection.execute("SELECT pg_current_wal_lsn()::text").fetchone()
        assert row is not None
        # A message after the end position, so that the server reports at once that the end is reached.
        connection.execute("SELECT pg_logical_emit_message(true, 'bench', 'end')")
        command = [
            str(self.postgres.bin_dir / "pg_recvlogical"),
            f"--dbname={self.postgres.dsn(connection.info.dbname)}",
            f"--slot={slot}",
            "--start",
            f"--endpos={row[0]}",
            "--file=/dev/null",
            "--fsync-interval=0",
            "--option=proto_version=1",
            f"--option=publication_names={PUBLICATION}",
        ]
        try:
            return _timed(command)
        finally:
            connection.execute("SELECT pg_drop_replication_slot(%s)", [slot])


def _timed(command: list[str]) -> float:
    started = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    seconds = time.monotonic() - started
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed:\n{done.stderr[-2000:]}")
    return seconds
