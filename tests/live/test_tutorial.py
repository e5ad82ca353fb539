"""The tutorial, followed as it is written: every file, statement and command, and what they are said to print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
BIN = Path(sys.executable).parent


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The connection string that the tutorial's own server prints."""
    program = next(text for language, text in BLOCKS if language == "python" and "EmbeddedPostgres" in text)
    (tmp_path / "server.py").write_text(program)
    command = [sys.executable, "server.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        line = process.stdout.readline()
        assert line.startswith("export SHOP_DSN="), line
        yield line.removeprefix("export SHOP_DSN=").strip()
        process.communicate("\n", timeout=60)
    assert process.returncode == 0


def normal(text: str) -> str:
    return re.sub(r"[ \t]+", " ", text)


def check_output(expected: str, printed: str) -> None:
    """Each expected line is a line of the output, or begins one; `…` stands for anything within it."""
    lines = [line.strip() for line in normal(printed).splitlines()]
    for line in (line.strip() for line in normal(expected).splitlines()):
        pattern = ".*".join(re.escape(part) for part in line.split("…"))
        assert any(re.match(pattern, each) for each in lines), f"{line!r} is not in\n{printed}"


def test_the_tutorial_works_as_it_is_written(server: str, tmp_path: Path) -> None:
    environment = {**os.environ, "SHOP_DSN": server, "PATH": f"{BIN}:{os.environ['PATH']}"}

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
        return done.stdout

    printed = ""
    for language, text in BLOCKS:
        match language:
            case "yaml":
                (tmp_path / "shop.yaml").write_text(text)
            case "sql":
                with psycopg.connect(server, autocommit=True) as connection:
                    connection.execute(text.encode())
            case "python" if "EmbeddedPostgres" not in text:
                printed = run(sys.executable, "-c", text)
            case "text":
                check_output(text, printed)
            case "console":
                for step in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                    command, _, expected = step.partition("\n")
                    check_output(expected, run(*command.split()))
