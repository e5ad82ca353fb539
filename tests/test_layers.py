"""Layers import downwards only: the model, then what moves changes, then what joins it, then what people call."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "tailrace"

MODEL = frozenset({"errors", "advice", "model", "system"})
CONFIGURATION = frozenset({"option", "config"})
POSTGRES = frozenset({"system.libpq", "system.bulk_connection"})
JOINING = frozenset({"stream", "cli"})

MAY_IMPORT: dict[str, frozenset[str] | set[str]] = {
    "errors": set(),
    "advice": {"errors"},
    "system": {"errors"},
    "system.child_process": {"errors", "system"},
    "system.libpq": {"errors"},
    "system.bulk_connection": {"errors", "system", "system.libpq"},
    "model": {"errors", "system"},
    "option": MODEL,
    "journal": MODEL,
    "changelog": MODEL,
    "capture": MODEL | {"option"},
    "sync": MODEL | {"option", "capture"},
    "state": MODEL | {"system.libpq"},
    "source": MODEL | POSTGRES | {"system.child_process", "option", "journal", "capture", "changelog"},
    "destination": MODEL | POSTGRES | {"system.child_process", "option", "journal", "state", "changelog"},
    "alert": MODEL | {"option", "state"},
    "config": MODEL | {"option", "state", "source", "destination", "alert"},
    "stream": MODEL | CONFIGURATION | {"capture", "state", "source", "destination", "alert"},
    "verify": MODEL | CONFIGURATION,
    "dashboard": MODEL | CONFIGURATION | {"state"},
    "extend": MODEL | CONFIGURATION | {"source", "destination", "state"},
    "testing": MODEL | CONFIGURATION | {"journal", "state", "source", "destination"},
    "slatedb": MODEL | {"source"},
    "demo": MODEL | {"source", "destination", "testing"},
    "cli": MODEL
    | CONFIGURATION
    | {"system.child_process", "capture", "state", "source", "destination", "alert", "stream"}
    | {"slatedb", "sync", "verify", "dashboard", "demo"},
}
"""For each part (a room or module right below `tailrace`, or a module with a place of its own), what it may know of."""

FILES = sorted(PACKAGE.rglob("*.py"))


def _module(file: Path) -> str:
    parts = ("tailrace", *file.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module(file): file for file in FILES}


def _imported(node: ast.AST, importer: str) -> Iterator[str]:
    """The modules one import statement names; a name imported from a package counts as its module if it is one."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{importer} line {node.lineno}: imports are absolute"
        assert node.module is not None
        for alias in node.names:
            named = f"{node.module}.{alias.name}"
            yield named if named in MODULES else node.module


def _imports(file: Path) -> set[str]:
    """Every module the file imports, wherever in it the statement stands."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {name for node in ast.walk(tree) for name in _imported(node, _module(file))}


def _imports_when_loaded(file: Path) -> set[str]:
    """The modules that must be complete before this one is: not those for types, nor those inside functions."""

    def walk(statements: list[ast.stmt]) -> Iterator[str]:
        for statement in statements:
            yield from _imported(statement, _module(file))
            if isinstance(statement, ast.If) and ast.unparse(statement.test) != "TYPE_CHECKING":
                yield from walk(statement.body)
            if isinstance(statement, ast.If | ast.Try):
                yield from walk(statement.orelse)
            if isinstance(statement, ast.Try | ast.With | ast.ClassDef):
                yield from walk(statement.body)

    return set(walk(ast.parse(file.read_text(encoding="utf-8")).body))


def _part(module: str) -> str:
    """The part a module belongs to; the module itself where MAY_IMPORT lists it."""
    name = module.removeprefix("tailrace").removeprefix(".")
    return name if name in MAY_IMPORT else name.split(".")[0]


@pytest.mark.parametrize("part", sorted({_part(module) for module in MODULES} - {""}))
def test_a_part_imports_only_parts_below_it(part: str) -> None:
    assert part in MAY_IMPORT, f"tailrace.{part} is new: give it its place in MAY_IMPORT"
    wrong = [
        f"{module} imports {name}"
        for module, file in MODULES.items()
        if _part(module) == part
        for name in _imports(file)
        if name.startswith("tailrace.") and _part(name) not in MAY_IMPORT[part] | {part}
    ]
    assert not wrong


def _backend(module: str) -> str | None:
    """The backend a module belongs to: a folder in `source` or `destination`."""
    parts = module.split(".")[1:]
    is_backend = len(parts) > 1 and parts[0] in {"source", "destination"} and (PACKAGE / parts[0] / parts[1]).is_dir()
    return ".".join(parts[:2]) if is_backend else None


@pytest.mark.parametrize("part", ["cli", "config", "dashboard", "stream", "verify"])
def test_a_part_that_serves_every_backend_knows_none(part: str) -> None:
    wrong = [
        f"{module} imports {name}"
        for module, file in MODULES.items()
        if _part(module) == part
        for name in _imports(file)
        if _backend(name)
    ]
    assert not wrong


@pytest.mark.parametrize("part", sorted(MAY_IMPORT.keys() - JOINING))
def test_only_the_parts_that_join_others_import_spark(part: str) -> None:
    wrong = [
        f"{module} imports {name}"
        for module, file in MODULES.items()
        if _part(module) == part
        for name in _imports(file)
        if name.split(".")[0] in {"pyspark", "py4j", "delta"}
    ]
    assert not wrong


def test_importing_the_package_loads_nothing_but_the_model() -> None:
    ours = {name for name in _imports_when_loaded(PACKAGE / "__init__.py") if name.startswith("tailrace")}
    assert {_part(name) for name in ours} <= MODEL


def test_no_process_of_a_pipeline_imports_pandas_to_start() -> None:
    modules = ["tailrace.stream.pipeline", "tailrace.stream.data_source", "tailrace.source.postgres.source"]
    code = f"import sys, {', '.join(modules)}; sys.exit('pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {
        module: {name for name in _imports_when_loaded(file) if name in MODULES and name != module}
        for module, file in MODULES.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" ← ".join(error.args[1]))


def test_every_part_that_has_a_place_exists() -> None:
    assert MAY_IMPORT.keys() == {_part(module) for module in MODULES} - {""}
