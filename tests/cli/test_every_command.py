"""Commands that run no pipeline: they do without Spark, and nothing they print holds a secret or a row's value."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import typer

from tailrace.cli import app
from tests.support.dashboard import PAYMENTS, VALUE, fill, open_store

CANARY = "c4nary-s3cret"
"""A password, a key and a token at once."""
STARTS_SPARK = {"run", "demo", "warm"}
SERVES = {"dashboard", "receive", "serve-sync"}
"""They go on until a signal, and have tests of their own that look at what they print."""
FOR_OTHER_SOURCES = {"slatedb tail", "sync", "tape apply", "tape revert", "tape show"}
SHOP = f"""
name: shop
source: {{type: postgres, dsn: "${{SHOP_DSN}}"}}
destination: {{type: delta, path: "s3://lake/shop", storage_options: {{secret_access_key: "${{SECRET}}"}}}}
alerts: {{webhook: {{url: "http://127.0.0.1:1/{CANARY}", headers: {{Authorization: "Bearer ${{SECRET}}"}}}}}}
state: shop-state
"""
HOOK = f"""
name: hook
source: {{type: sqlite, path: ./app.db}}
destination: {{type: webhook, url: "http://127.0.0.1:1/{CANARY}", headers: {{X-Key: "${{SECRET}}"}}}}
state: hook-state
"""
COMMANDS = [
    "init postgresql://u:{canary}@127.0.0.1:1/shop --yes --output other.yaml",
    "init app.db --yes --output made.yaml",
    "check shop.yaml",
    "check hook.yaml",
    "status shop.yaml",
    "metrics shop.yaml",
    "metrics hook.yaml",
    "tables shop.yaml",
    "tables hook.yaml",
    "prepare shop.yaml",
    "verify shop.yaml",
    "errors list shop.yaml",
    "errors list shop.yaml --all",
    "errors show shop.yaml 1",
    "errors show shop.yaml 99999999999999999999",
    "errors retry shop.yaml 1",
    "errors skip shop.yaml 1",
    "errors skip shop.yaml 2",
    "resync shop.yaml {table}",
    "pause shop.yaml",
    "resume shop.yaml",
    "retry shop.yaml",
    "skip shop.yaml {table}",
    "skip shop.yaml public.nothing",
    "maintain shop.yaml",
    "alert test shop.yaml",
    "queue status hook.yaml",
    "queue drain hook.yaml --timeout 1",
    "queue purge hook.yaml --yes",
    "sqlite enable app.db",
    "sqlite status app.db",
    "sqlite purge app.db --upto 1",
    "sqlite disable app.db",
    "schema",
    "version",
    "reset shop.yaml --yes",
    "doctor shop.yaml",
]
PROGRAM = """
import json, sys
from typer.testing import CliRunner
sys.modules["pyspark"] = sys.modules["py4j"] = None
from tailrace.cli import app
for line in sys.stdin:
    words = json.loads(line)
    if words[0] == "doctor":  # it looks at the package; that it starts nothing is a test of its own
        sys.modules.pop("pyspark", None), sys.modules.pop("py4j", None)
    result = CliRunner().invoke(app, words)
    print(json.dumps([words, result.exit_code, result.stdout, result.stderr, repr(result.exception)]), flush=True)
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each command said, as text and as JSON, in a process that cannot import Spark."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "shop.yaml").write_text(SHOP)
    (folder / "hook.yaml").write_text(HOOK)
    with open_store(folder / "shop.yaml") as store:
        fill(store)
    with closing(sqlite3.connect(folder / "app.db")) as app_db:
        app_db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, note TEXT)")
        app_db.execute("INSERT INTO orders VALUES (1, ?)", [VALUE.decode()])
        app_db.commit()
    plain = [line.format(canary=CANARY, table=PAYMENTS).split() for line in COMMANDS]
    as_json = [[*words, "--json"] for words in plain if words[0] not in ("init", "metrics", "schema")]
    both = sorted([*as_json, *plain], key=lambda words: words[0] == "doctor")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input="".join(json.dumps(words) + "\n" for words in both),
        cwd=folder,
        env={**os.environ, "SHOP_DSN": f"postgresql://u:{CANARY}@127.0.0.1:1/shop", "SECRET": CANARY},
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_none_of_them_needs_spark_or_ends_with_something_unexpected(results: list[Any]) -> None:
    failed = [(words, code, said) for words, code, _, said, _ in results if code not in (0, 2, 3, 4, 5)]
    assert failed == []


def test_nothing_they_print_holds_a_secret_or_a_value(results: list[Any]) -> None:
    for words, _, stdout, stderr, error in results:
        for secret in (CANARY, VALUE.decode()):
            assert secret not in stdout + stderr + error, words


def test_every_command_is_among_them() -> None:
    known = {name for line in COMMANDS for name in _prefixes(line.split())}
    assert set(_leaves(typer.main.get_command(app), "")) - known == STARTS_SPARK | SERVES | FOR_OTHER_SOURCES


def _prefixes(words: list[str]) -> Iterator[str]:
    yield words[0]
    yield " ".join(words[:2])


def _leaves(command: Any, name: str) -> Iterator[str]:
    below = getattr(command, "commands", {})
    if not below:
        yield name
    for each, one in below.items():
        yield from _leaves(one, f"{name} {each}".strip())
