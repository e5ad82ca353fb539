"""Spark's Python must be the compiled one."""

from __future__ import annotations

from pathlib import Path

import pyspark
import pytest

from tailrace.stream.class_archive import Archive
from tailrace.stream.spark_home import spark_home

PACKAGE = Path(pyspark.__file__).parent


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_HOME", raising=False)


@pytest.mark.usefixtures("no_home")
def test_the_private_home_leads_to_spark_but_not_to_its_zipped_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    home = spark_home()
    assert home.is_relative_to(tmp_path)
    assert (home / "bin" / "spark-submit").samefile(PACKAGE / "bin" / "spark-submit")
    assert (home / "jars").samefile(PACKAGE / "jars")
    assert not (home / "python").exists()
    assert spark_home() == home


def test_the_home_that_the_user_chose_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    assert spark_home() == Path("/opt/spark")


@pytest.mark.usefixtures("no_home")
def test_without_a_cache_spark_starts_from_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert spark_home() == PACKAGE


@pytest.mark.usefixtures("no_home")
def test_a_user_without_a_home_starts_spark_from_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    assert spark_home() == PACKAGE
    assert Archive.here() is None
