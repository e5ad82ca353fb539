"""What cannot work is refused on one screen, with the fix and its exit code, and nothing half-made is left."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tailrace.demo.server import EmbeddedPostgres
from tests.support.database import PostgresDatabase
from tests.support.invocation import invoke
from tests.support.runner import command
from tests.support.scenario import Scenario

SCREEN_LINES = 24
PASSWORD = "c4nary-Pa55"


@pytest.fixture
def refused(tmp_path: Path, database: PostgresDatabase) -> Iterator[Callable[..., tuple[int, str]]]:
    """`refused(dsn, **options)` runs a pipeline that cannot start, and looks that it left nothing; code and output."""
    database.run("CREATE TABLE keyed (id int PRIMARY KEY)")
    made = "(SELECT count(*) FROM pg_replication_slots WHERE database = current_database())"
    folder = tmp_path / "refused"

    def run(dsn: str = database.dsn, **options: dict[str, Any]) -> tuple[int, str]:
        scenario = Scenario(folder, dsn, name="refused", **options)
        return execute(scenario.file)

    yield run
    assert not (folder / "state").exists()
    assert not (folder / "lake").is_dir()
    assert database.rows(f"SELECT {made} + (SELECT count(*) FROM pg_publication)") == [(0,)]


def execute(file: Path) -> tuple[int, str]:
    done = invoke("run", file, "--once")
    require_one_screen(done.output)
    return done.exit_code, done.output


def require_one_screen(said: str) -> None:
    assert "Traceback" not in said
    assert len(said.splitlines()) <= SCREEN_LINES
    assert "fix: " in said


def test_a_file_with_errors_names_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("name: Bad Name\nsource: {type: postgres, dsn: 'x', publicaton: y}\ndestination: {type: delta}\n")
    done = subprocess.run(command("run", str(file), "--once"), capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    require_one_screen(said)
    assert done.returncode == 2
    assert "line 1" in said
    assert "line 2" in said
    assert "publication" in said


def test_a_wrong_password_is_refused_without_showing_it(
    refused: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    with EmbeddedPostgres(tmp_path / "guarded", password="right") as server:
        code, said = refused(server.dsn().replace("right", PASSWORD))
    assert code == 3
    assert "password" in said
    assert PASSWORD not in said


def test_a_server_that_does_not_answer_is_refused(refused: Callable[..., tuple[int, str]]) -> None:
    code, said = refused("postgresql://postgres@127.0.0.1:1/postgres")
    assert code == 4
    assert "127.0.0.1" in said


def test_a_database_that_does_not_exist_is_refused(
    refused: Callable[..., tuple[int, str]], postgres: EmbeddedPostgres
) -> None:
    code, said = refused(postgres.dsn("nowhere"))
    assert code == 3
    assert "nowhere" in said


def test_a_missing_publication_that_may_not_be_made_is_refused_with_the_sql(
    refused: Callable[..., tuple[int, str]],
) -> None:
    code, said = refused(source={"create_publication": False})
    assert code == 3
    assert 'CREATE PUBLICATION "refused" FOR TABLE "public"."keyed"' in said


def test_tables_that_match_nothing_are_refused_with_those_there_are(refused: Callable[..., tuple[int, str]]) -> None:
    code, said = refused(tables={"include": ["shop.*"]})
    assert code == 3
    assert "public.keyed" in said


def test_a_server_without_logical_decoding_is_refused_with_the_setting(
    refused: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    with EmbeddedPostgres(tmp_path / "replica", settings={"wal_level": "replica"}) as server:
        with server.connect() as conn:
            conn.execute("CREATE TABLE keyed (id int PRIMARY KEY)")
        code, said = refused(server.dsn())
        with server.connect() as conn:
            assert conn.execute("SELECT FROM pg_publication").fetchall() == []
    assert code == 3
    assert "ALTER SYSTEM SET wal_level = 'logical'" in said


def test_a_role_without_the_right_to_replicate_is_refused_with_the_sql(
    refused: Callable[..., tuple[int, str]], database: PostgresDatabase, postgres: EmbeddedPostgres
) -> None:
    database.run("CREATE ROLE reader LOGIN")
    try:
        code, said = refused(postgres.dsn(database.name, user="reader"))
    finally:
        database.run("DROP ROLE reader")
    assert code == 3
    assert "REPLICATION" in said


def test_a_file_where_the_lake_should_be_is_refused(refused: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    (tmp_path / "refused").mkdir()
    (tmp_path / "refused" / "lake").write_text("not a folder")
    code, said = refused()
    assert code == 3
    assert str(tmp_path / "refused" / "lake") in said


def test_a_table_whose_changes_postgres_would_refuse_is_refused_with_the_sql(
    refused: Callable[..., tuple[int, str]], database: PostgresDatabase
) -> None:
    database.run("ALTER TABLE keyed REPLICA IDENTITY NOTHING")
    code, said = refused()
    assert code == 3
    assert 'ALTER TABLE "public"."keyed" REPLICA IDENTITY DEFAULT' in said


def test_a_password_is_in_no_file_of_a_refused_pipeline(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    sections = {
        "name": "canary",
        "source": {"type": "postgres", "dsn": f"postgresql://postgres:{PASSWORD}@127.0.0.1:1/x"},
        "destination": {"type": "delta", "path": "./lake"},
    }
    file.write_text(yaml.safe_dump(sections))
    code, said = execute(file)
    assert code == 4
    assert PASSWORD not in said
    assert [path for path in tmp_path.rglob("*") if path != file] == []


def test_an_invalid_dsn_is_refused_without_showing_it(refused: Callable[..., tuple[int, str]]) -> None:
    code, said = refused(f"host is {PASSWORD}")
    assert code == 2
    assert "connection string" in said
    assert PASSWORD not in said
