"""Names from databases do not forge what a command prints."""

from __future__ import annotations

import ast
import logging
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tailrace.capture import enable
from tailrace.cli.error import print_error
from tailrace.cli.inspect import print_findings
from tailrace.cli.progress_view import LineView
from tailrace.cli.text import LineFormatter
from tailrace.errors import Finding, TableError
from tailrace.state import SqliteStore
from tailrace.state.status import PipelineStatus
from tailrace.system.plain_text import plain
from tests.support.invocation import invoke

FORGED = "orders\nok      everything: is fine\r\x1b[2K\u2028\u202e"
ESCAPED = r"orders\nok      everything: is fine\r\u001b[2K\u2028\u202e"
COMMANDS = Path(__file__).parents[2] / "src" / "tailrace" / "cli"


def test_what_a_terminal_would_act_on_is_written_as_json_writes_it() -> None:
    assert plain(FORGED) == ESCAPED
    assert plain("Grüße ☃ 'a' \\n") == "Grüße ☃ 'a' \\n"


def test_a_table_name_forges_no_line_of_a_check(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    print_findings([Finding("error", FORGED, f"{FORGED} is odd", f'DROP TABLE "{FORGED}";')], tmp_path, as_json=False)
    lines = capsys.readouterr().out.split("\n")
    assert lines[0] == f"error   {ESCAPED}: {ESCAPED} is odd"
    assert all(line.startswith("        ") for line in lines[1:-1])


def test_a_table_name_forges_no_line_of_an_error_or_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(TableError(f"{FORGED} stopped", table=FORGED, fix=f"tailrace retry FILE {FORGED}"))
    lines = capsys.readouterr().err.split("\n")
    assert lines[0] == f"error[table]: {ESCAPED} stopped [table {ESCAPED}]"
    assert all(line.startswith("  ") for line in lines[1:-1])
    record = logging.LogRecord("x", logging.WARNING, "", 1, "%s stopped", (FORGED,), None)
    assert not any(line.startswith("ok") for line in LineFormatter().format(record).split("\n"))


def test_a_table_name_forges_no_line_of_a_status(tmp_path: Path) -> None:
    file = tmp_path / "shop.yaml"
    file.write_text(
        "name: shop\nsource: {type: sqlite, path: a.db}\ndestination: {type: sqlite, path: b.db}\nstate: ./state\n"
    )
    with SqliteStore("shop", tmp_path / "state").open() as store:
        store.add_table("1", FORGED)
        store.fail_table("1", f"{FORGED} cannot be read", fix=f"tailrace resync FILE {FORGED}")
        status = PipelineStatus.read(store)
    said = invoke("status", file).output
    assert not any(line.startswith("ok ") for line in said.split("\n"))
    assert "\x1b[2K" not in said
    written: list[str] = []
    LineView(written.append).show(status)
    assert not any("\n" in line for line in written)


def test_a_table_name_forges_no_line_of_the_list_of_tables(tmp_path: Path) -> None:
    file = tmp_path / "shop.yaml"
    file.write_text(
        "name: shop\nsource: {type: sqlite, path: a.db}\ndestination: {type: sqlite, path: b.db}\nstate: ./state\n"
    )
    with closing(sqlite3.connect(tmp_path / "a.db", isolation_level=None)) as connection:
        connection.execute(f'CREATE TABLE "{FORGED}" (id INTEGER PRIMARY KEY)')
        enable(connection, "full")
    for command in ("tables", "check"):
        assert not any(line.startswith("ok      everything") for line in invoke(command, file).output.split("\n"))


def test_commands_print_text_in_one_place() -> None:
    for file in COMMANDS.glob("*.py"):
        calls = [node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        printing = [ast.unparse(call) for call in calls if ast.unparse(call) in ("print", "typer.echo", "typer.secho")]
        # Metrics are a format of their own, which escapes its labels.
        allowed = {"text.py": ["typer.echo"], "inspect.py": ["typer.echo"]}.get(file.name, [])
        assert printing == allowed, file.name
