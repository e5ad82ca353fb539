"""A captured SQLite file and a source that follows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tailrace.source.follower import Limit
from tailrace.testing.replay import SourceReplay
from tests.support.sqlite_application import Application, Kind, differences, held, make_source

LIMIT = Limit(100_000, 100_000_000)
ITEMS = "CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT, price REAL)"


@contextmanager
def captured(folder: Path, kind: Kind, *sql: str, mode: str = "full") -> Iterator[Application]:
    """An application that has made these tables and captures what it does from now on."""
    application = Application(folder / "app.db", kind, mode)
    for statement in sql:
        application.run(statement)
    application.capture()
    yield application
    application.close()


@contextmanager
def following(application: Application, folder: Path, **options: Any) -> Iterator[SourceReplay]:
    """A pipeline that has copied everything there is."""
    with SourceReplay(make_source(application, folder, **options), LIMIT) as replay:
        replay.catch_up()
        yield replay


def changes(replay: SourceReplay) -> list[dict[str, Any]]:
    """The changes of the next batch, which is left uncommitted."""
    assert replay.plan()
    assert replay.offset is not None
    assert replay.planned is not None
    splits = replay.follower.plan(replay.offset, replay.planned)
    found = [row for split in splits for part in replay.source.read(split) for row in part.batch.to_pylist()]
    return sorted(found, key=lambda row: (row["commit"], row["ordinal"]))


def equal(replay: SourceReplay, application: Application) -> None:
    replay.catch_up()
    assert not differences(held(replay.tables), application.contents())
