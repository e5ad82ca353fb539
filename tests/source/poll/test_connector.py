"""Which connector a dsn finds, and how sessions share a bound on the load."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tailrace.errors import ConfigError
from tailrace.source.poll.connector import ConnectorOptions, connect
from tailrace.source.poll.duckdb import DuckDbConnector
from tailrace.source.poll.postgres import PostgresConnector
from tailrace.source.poll.schedule import QuerySpacing, spacing_of
from tailrace.source.poll.sqlite import SqliteConnector

OPTIONS = ConnectorOptions()


@pytest.mark.parametrize(
    ("dsn", "kind"),
    [
        ("postgresql://localhost/shop", PostgresConnector),
        ("host=localhost dbname=shop", PostgresConnector),
        ("sqlite:///app.db", SqliteConnector),
        ("DUCKDB:///app.duckdb", DuckDbConnector),
    ],
)
def test_the_scheme_of_a_dsn_says_which_connector_it_is_for(dsn: str, kind: type) -> None:
    assert isinstance(connect(dsn, OPTIONS), kind)


def test_a_scheme_without_a_connector_is_refused() -> None:
    with pytest.raises(ConfigError, match="mysql"):
        connect("mysql://x/y", OPTIONS)


def test_another_package_adds_a_connector_by_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "far_away.py").write_text(
        "from tailrace.source.poll.duckdb import DuckDbConnector\n\n\nclass FarAway(DuckDbConnector):\n    pass\n"
    )
    metadata = tmp_path / "far_away-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: far-away\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[tailrace.connectors]\nfaraway = far_away:FarAway\nbroken = nowhere:Missing\nempty = far_away:Missing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = connect("faraway:///app.duckdb", OPTIONS)
    assert type(found).__name__ == "FarAway"
    for scheme in ("broken", "empty"):
        with pytest.raises(ConfigError, match=scheme):
            connect(f"{scheme}:///x", OPTIONS)
    sys.modules.pop("far_away")


def test_a_library_that_is_not_installed_is_named_with_the_extra_that_brings_it() -> None:
    program = (
        "import sys\n"
        "sys.modules['duckdb'] = None\n"
        "from tailrace.errors import ConfigError\n"
        "from tailrace.source.poll.connector import ConnectorOptions, connect\n"
        "try:\n    connect('duckdb:///app.duckdb', ConnectorOptions())\n"
        "except ConfigError as error:\n    print(error.fix)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "pip install 'tailrace[duckdb]'\n"


def test_sessions_of_one_database_share_one_pace() -> None:
    assert spacing_of("postgresql://a", 5.0) is spacing_of("postgresql://a", 5.0)
    assert spacing_of("postgresql://a", 5.0) is not spacing_of("postgresql://b", 5.0)


def test_threads_that_share_a_pace_ask_no_more_often_together() -> None:
    pace = QuerySpacing(100.0)
    started = time.monotonic()

    def ask() -> None:
        for _ in range(5):
            pace.wait()

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started >= 19 / 100


def test_without_a_bound_nothing_waits() -> None:
    started = time.monotonic()
    for _ in range(10_000):
        QuerySpacing(None).wait()
    assert time.monotonic() - started < 1.0


def test_a_connection_string_with_slashes_in_its_password_is_that_of_postgres_and_shows_nowhere() -> None:
    made = connect("host=localhost dbname=shop password=s3cret://x", ConnectorOptions())
    assert type(made).__name__ == "PostgresConnector"
    assert "s3cret" not in repr(made)
