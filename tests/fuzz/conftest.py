"""One fuzzer for all tests of this folder: its two databases are made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tailrace.demo.server import EmbeddedPostgres
from tests.support.database import PostgresDatabase
from tests.support.fuzz.sequence import Fuzzer


@pytest.fixture(scope="session")
def fuzzer(postgres_server: Callable[[int], EmbeddedPostgres]) -> Iterator[Fuzzer]:
    with ExitStack() as made:
        names = iter(["fuzz_one", "fuzz_two"])

        def make() -> PostgresDatabase:
            return made.enter_context(PostgresDatabase(postgres_server(18), next(names)))

        fuzzer = Fuzzer(make)
        made.callback(fuzzer.close)
        yield fuzzer
