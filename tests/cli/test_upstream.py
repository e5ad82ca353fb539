"""What commands change upstream: those that only read, nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from tailrace.cli import app
from tailrace.config.pipeline import load
from tailrace.config.registry import open_source
from tailrace.model.table_rows import Readable
from tests.support.database import PostgresDatabase
from tests.support.rqlite_node import RqliteNode
from tests.support.slatedb_writing import Writer

READING = ("check", "tables", "status", "metrics", "errors list", "verify", "prepare --print-sql")


def pipeline(folder: Path, source: dict[str, Any], **more: Any) -> Path:
    file = folder / "pipeline.yaml"
    sections = {"source": source, "destination": {"type": "delta", "path": str(folder / "lake")}, **more}
    file.write_text(yaml.safe_dump({"name": "looks", **sections, "state": str(folder / "state")}))
    return file


def read_everything(file: Path) -> None:
    """Every command that reads, and what `verify` does with each table that the destination has."""
    for words in READING:
        done = CliRunner().invoke(app, [*words.split(), str(file)])
        assert done.exit_code != 1, done.output
    source = open_source(load(file))
    assert isinstance(source, Readable)
    tables = source.tables()
    assert tables
    for table in tables:
        rows = source.read_table(table)
        assert rows is not None
        assert sum(batch.num_rows for batch in rows.rows) > 0


UPSTREAM = """
SELECT 'relation', oid::text, relname::text FROM pg_class WHERE oid >= 16384
UNION ALL SELECT 'function', oid::text, proname::text FROM pg_proc WHERE oid >= 16384
UNION ALL SELECT 'schema', oid::text, nspname::text FROM pg_namespace WHERE oid >= 16384
UNION ALL SELECT 'trigger', oid::text, tgname::text FROM pg_trigger
UNION ALL SELECT 'event trigger', oid::text, evtname::text FROM pg_event_trigger
UNION ALL SELECT 'publication', oid::text, pubname::text FROM pg_publication
UNION ALL SELECT 'published', oid::text, prrelid::text FROM pg_publication_rel
UNION ALL SELECT 'slot', slot_name::text, confirmed_flush_lsn::text FROM pg_replication_slots
    WHERE database = current_database()
ORDER BY 1, 2, 3
"""


def test_reading_commands_change_nothing_in_postgres(database: PostgresDatabase, tmp_path: Path) -> None:
    database.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    file = pipeline(tmp_path, {"type": "postgres", "dsn": database.dsn, "heartbeat": None})
    before = database.rows(UPSTREAM)
    read_everything(file)
    assert database.rows(UPSTREAM) == before
    # And for a pipeline that has run before.
    open_source(load(file)).prepare()
    before = database.rows(UPSTREAM)
    assert {row[0] for row in before} >= {"publication", "published", "slot"}
    read_everything(file)
    assert database.rows(UPSTREAM) == before


def test_reset_drops_the_slot_and_nothing_else_in_postgres(database: PostgresDatabase, tmp_path: Path) -> None:
    database.run("CREATE TABLE t (id int PRIMARY KEY)")
    file = pipeline(tmp_path, {"type": "postgres", "dsn": database.dsn})
    open_source(load(file)).prepare()
    before = database.rows(UPSTREAM)
    assert CliRunner().invoke(app, ["reset", str(file), "--yes"]).exit_code == 0
    assert database.rows(UPSTREAM) == [row for row in before if row[0] != "slot"]


def test_reading_commands_change_nothing_in_a_polled_database(database: PostgresDatabase, tmp_path: Path) -> None:
    database.run("CREATE TABLE t (id int PRIMARY KEY, updated_at timestamptz)", "INSERT INTO t VALUES (1, now())")
    tables = {"include": ["public.*"], "defaults": {"updated_at": "updated_at"}}
    file = pipeline(tmp_path, {"type": "poll", "dsn": database.dsn}, tables=tables)
    before = database.rows(UPSTREAM)
    read_everything(file)
    assert CliRunner().invoke(app, ["reset", str(file), "--yes"]).exit_code == 0
    assert database.rows(UPSTREAM) == before


def test_reading_commands_only_ask_rqlite(tmp_path: Path) -> None:
    with RqliteNode("http://127.0.0.1:1/cdc", service="svc") as node:
        node.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT)")
        node.execute("INSERT INTO t VALUES (1, 'a')")
        file = pipeline(tmp_path, {"type": "rqlite", "listen": "127.0.0.1:0", "api": node.url})
        read_everything(file)
        assert CliRunner().invoke(app, ["reset", str(file), "--yes"]).exit_code == 0
        assert set(node.asked) == {"/db/query"}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_reading_commands_leave_slatedb_as_it_was(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Writer(store) as writer:
        writer.put(b"k", b"v")
    file = pipeline(tmp_path, {"type": "slatedb", "path": "db1", "store": {"type": "local", "path": str(store)}})
    before = contents(store)
    read_everything(file)
    assert CliRunner().invoke(app, ["reset", str(file), "--yes"]).exit_code == 0
    assert contents(store) == before
