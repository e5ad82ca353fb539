"""`tailrace doctor`: what it finds on a machine, and what a file adds to that."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tailrace.cli import app
from tailrace.cli.doctor import _packages

CANARY = "c4nary-Pa55"


def findings(*words: object, code: int) -> dict[str, list[dict[str, Any]]]:
    result = CliRunner().invoke(app, ["doctor", *map(str, words), "--json"])
    assert CANARY not in result.output
    assert result.exit_code == code, result.output
    found: dict[str, list[dict[str, Any]]] = {}
    for one in json.loads(result.stdout)["findings"]:
        found.setdefault(one["subject"], []).append(one)
    return found


def write(folder: Path, source: str) -> Path:
    file = folder / "shop.yaml"
    file.write_text(f"name: shop\nsource: {source}\ndestination: {{type: delta, path: ./lake}}\n")
    return file


@pytest.fixture
def _without_slatedb(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package == "slatedb":
            raise importlib.metadata.PackageNotFoundError(package)
        return importlib.metadata.version(package)

    # By its module: the package has the command under the same name.
    monkeypatch.setattr(sys.modules[_packages.__module__], "version_of", version)


def test_the_machine_of_the_tests_has_what_is_needed() -> None:
    found = findings(code=0)
    subjects = {"Python", "tailrace", "cores", "Java", "PySpark", "state folder", "Spark's temporary folder"}
    assert found.keys() >= subjects
    assert any("used by Spark" in one["message"] for one in found["Java"])
    text = CliRunner().invoke(app, ["doctor"])
    assert (text.exit_code, "ok      Python: " in text.stdout) == (0, True)


def test_it_does_not_start_spark() -> None:
    program = (
        "import sys; from tailrace.cli import app\n"
        "app(['doctor'], standalone_mode=False)\n"
        "assert 'py4j.java_gateway' not in sys.modules or not __import__('pyspark').SparkContext._gateway\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_machine_without_java_is_told_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    monkeypatch.setattr("tailrace.stream.java._bundled_java", lambda: None)
    broken, missing = findings(code=3)["Java"]
    assert "/nowhere/bin/java (from JAVA_HOME), cannot be run" in broken["message"]
    assert (missing["level"], "tailrace[embedded]" in missing["fix"]) == ("error", True)


def test_an_environment_that_is_not_activated_is_told_what_a_session_of_its_own_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')  # one without site-packages
    python.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    (found,) = findings(code=0)["Python of Spark"]
    assert (found["level"], f"{python} has no tailrace" in found["message"]) == ("warning", True)
    assert f"export PYSPARK_PYTHON={sys.executable}" in found["fix"]
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    (found,) = findings(code=0)["Python of Spark"]
    assert found["level"] == "ok"


@pytest.mark.usefixtures("_without_slatedb")
def test_an_extra_is_an_error_only_where_the_file_needs_it(tmp_path: Path) -> None:
    file = write(tmp_path, "{type: slatedb, path: db, store: {type: local, path: ./store}}")
    fix = "pip install 'tailrace[slatedb]'"
    for words, code, level in (((), 0, "ok"), ((file,), 3, "error")):
        (found,) = findings(*words, code=code)["extra slatedb"]
        assert (found["level"], found["fix"]) == (level, fix)


def test_variables_that_are_not_set_are_errors_and_values_are_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOP_DSN", raising=False)
    file = write(tmp_path, '{type: postgres, dsn: "${SHOP_DSN}"}')
    (found,) = findings(file, code=3)["variable"]
    assert (found["level"], found["fix"]) == ("error", "export SHOP_DSN=…")
    monkeypatch.setenv("SHOP_DSN", f"postgresql://u:{CANARY}@h/d")
    (found,) = findings(file, code=0)["variable"]
    assert found["message"] == "SHOP_DSN is set"


def test_a_file_that_is_wrong_is_a_finding_next_to_the_others(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("nam: shop\n")
    found = findings(file, code=3)
    assert "did you mean name?" in found["file"][0]["message"]
    assert "Java" in found


def test_every_extra_that_is_declared_is_known() -> None:
    assert _packages()["turso"] == ["pyturso"]
    assert "dev" not in _packages()
