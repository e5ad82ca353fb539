"""A changelog in an object store, written, written again and read back."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.destination.parquet.destination import ParquetDestination, _opened
from tailrace.option.value import Secret
from tailrace.source.source import SourceContext
from tailrace.source.tape.option import TapeOptions
from tailrace.source.tape.source import ChangelogSource
from tailrace.testing.destination import ITEMS, changes_of, delete, insert
from tailrace.testing.replay import SourceReplay
from tailrace.testing.source import PLENTY
from tests.support.changelog_writing import write_events
from tests.support.slatedb_bucket import BucketProcess, serving


@pytest.fixture(scope="module")
def server() -> Iterator[BucketProcess]:
    with serving() as process:
        yield process


def test_batches_are_there_once_and_a_tape_reads_them(server: BucketProcess, tmp_path: Path) -> None:
    path, options = f"s3://{uuid.uuid4().hex}/changes", {n: Secret(value) for n, value in server.options.items()}
    destination = ParquetDestination(path=path, storage_options=options)
    assert [finding.level for finding in destination.check([ITEMS])] == ["ok"]
    first = changes_of(ITEMS, insert(id=1, name="a", price=1), insert(id=2, name="b", price=2))
    for number, changes in ((0, first), (1, changes_of(ITEMS, delete(id=1), commit=9))):
        for attempt in range(2):
            _opened.cache_clear()
            assert write_events(destination, number, changes).repeated == bool(attempt)
    tape_options = TapeOptions(type="tape", path=path, storage_options=options)
    with SourceReplay(ChangelogSource(tape_options, SourceContext("copy", state_dir=tmp_path)), PLENTY) as replay:
        replay.catch_up()
        assert list(replay.tables["shop.items"].rows.values()) == [{"id": 2, "name": "b", "price": 2}]
