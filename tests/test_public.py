"""What `import tailrace` offers."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tailrace
from tailrace import extend

ROOT = Path(__file__).parents[1]


def test_every_public_name_is_there_and_the_list_is_sorted() -> None:
    assert list(tailrace.__all__) == sorted(tailrace.__all__)
    for name in tailrace.__all__:
        assert getattr(tailrace, name) is not None


def test_importing_tailrace_loads_neither_spark_nor_arrow() -> None:
    code = "import sys, tailrace; print(sorted({'pyspark', 'pyarrow', 'psycopg', 'deltalake'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_authors_find_all_they_need_in_one_module() -> None:
    imported = {name for name, value in vars(extend).items() if not name.startswith("_") and name != "annotations"}
    assert set(extend.__all__) == imported
    assert len(extend.__all__) == len(set(extend.__all__))


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("custom_*.py")), ids=lambda file: file.name)
def test_examples_for_authors_import_only_what_is_public(file: Path) -> None:
    tree = ast.parse(file.read_text("utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    assert {module for module in modules if module.startswith("tailrace")} <= {"tailrace", "tailrace.extend"}
