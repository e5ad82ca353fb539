"""The two kinds of places that a journal can be in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.journal import JournalPlace, ObjectPlace
from tests.support.slatedb_bucket import BucketProcess, serving

_numbers = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[BucketProcess]:
    with serving() as process:
        yield process


@pytest.fixture
def object_place(server: BucketProcess) -> ObjectPlace:
    """An empty prefix of a bucket of its own."""
    return ObjectPlace(f"s3://shop{next(_numbers)}/some/journal", server.options)


@pytest.fixture(params=["folder", "object store"])
def either_place(request: pytest.FixtureRequest, tmp_path: Path) -> JournalPlace:
    """A place of each kind, for what both promise."""
    if request.param == "folder":
        return tmp_path / "journal"
    place: ObjectPlace = request.getfixturevalue("object_place")
    return place
