"""Every server there is and every way to it: the zoo is copied and followed, and comes out the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlencode

import pytest

from tailrace.demo.server import EmbeddedPostgres, find_servers
from tailrace.stream.pipeline import Pipeline
from tailrace.testing.certificate import make_authority
from tests.support.database import PostgresDatabase
from tests.support.proxy import Proxy
from tests.support.scenario import Scenario
from tests.support.type_zoo import ZooTraffic, create_zoo

pytestmark = pytest.mark.usefixtures("spark")


def copy_and_follow(scenario: Scenario, database: PostgresDatabase) -> None:
    with database.connect() as conn:
        create_zoo(conn)
    ZooTraffic(database.dsn, seed=1).run(150)
    Pipeline.from_file(scenario.file).run(once=True)
    assert scenario.differences() == []

    ZooTraffic(database.dsn, seed=2).run(300)
    database.run("TRUNCATE zoo.full_log, zoo.parted")
    database.run("ALTER TABLE zoo.full_log ADD COLUMN since text DEFAULT 'before'")
    ZooTraffic(database.dsn, seed=3).run(20)
    Pipeline.from_file(scenario.file).run(once=True)
    assert scenario.differences() == []
    assert scenario.doubled() == []


def promised_versions() -> list[object]:
    """The versions that the documentation promises, those that are not on this machine skipped."""
    found = find_servers()
    reason = "no such PostgreSQL here: install it, or name a folder of installations in TAILRACE_POSTGRES_INSTALLS"
    absent = pytest.mark.skip(reason)
    return [version if version in found else pytest.param(version, marks=absent) for version in range(14, 19)]


@pytest.mark.parametrize("version", promised_versions())
def test_every_version_is_copied_and_followed(
    version: int,
    postgres_server: Callable[[int], EmbeddedPostgres],
    make_database: Callable[[EmbeddedPostgres], PostgresDatabase],
    make_scenario: Callable[..., Scenario],
) -> None:
    database = make_database(postgres_server(version))
    copy_and_follow(make_scenario(database.dsn), database)


def test_a_server_is_followed_through_its_unix_socket(
    postgres: EmbeddedPostgres, database: PostgresDatabase, make_scenario: Callable[..., Scenario]
) -> None:
    copy_and_follow(make_scenario(postgres.dsn(database.name, unix=True)), database)


def test_a_server_is_followed_through_verified_tls(
    postgres: EmbeddedPostgres, database: PostgresDatabase, tmp_path: Path, make_scenario: Callable[..., Scenario]
) -> None:
    authority = make_authority(tmp_path / "authority")
    options = urlencode({"sslmode": "verify-full", "sslrootcert": str(authority.ca_file)})
    with Proxy("127.0.0.1", postgres.port, tls=authority) as proxy:
        dsn = f"postgresql://postgres@localhost:{proxy.port}/{database.name}?{options}"
        copy_and_follow(make_scenario(dsn), database)
