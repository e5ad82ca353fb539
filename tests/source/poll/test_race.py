"""Rows that come and go while a full diff compares them: its pieces are read at other moments, in any order."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tailrace.model.change import Changes
from tailrace.option.table import TableOptions
from tailrace.source.follower import Limit
from tailrace.source.poll.diff import DiffScan, NewcomerSplit
from tailrace.source.poll.source import PollSource
from tailrace.source.split import Split
from tailrace.testing.replay import SourceReplay
from tailrace.testing.wait import wait_until
from tests.support.source_making import make_polled, with_tables

LIMIT = Limit(rows=100_000, bytes=1 << 30)
NEW = range(100, 103)
"""Keys that come with a poll: with chunks of 2 rows, more than one task looks for them."""


class App:
    """An application that sets no new time when it writes a row again, so that polls do not see it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.run("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT, updated_at TEXT)")
        self.run("INSERT INTO t VALUES (1, 'v', '2001-01-01 00:00:00.000'), (2, 'v', '2001-01-01 00:00:00.000')")
        self.moment = ""

    def run(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.file, isolation_level=None)) as connection:
            return connection.execute(statement, values).fetchall()

    def rows(self) -> Counter[tuple[Any, ...]]:
        return Counter(self.run("SELECT * FROM t"))

    def put(self, value: str | None) -> None:
        """Make the new rows hold a value, or be gone."""
        for key in NEW:
            if value is None:
                self.run("DELETE FROM t WHERE id = ?", key)
            else:
                self.run("INSERT OR REPLACE INTO t VALUES (?, ?, ?)", key, value, self.moment)

    def now(self) -> str:
        return str(self.run("SELECT strftime('%Y-%m-%d %H:%M:%f', 'now')")[0][0])


@pytest.fixture
def app(tmp_path: Path) -> App:
    return App(tmp_path / "app.db")


def options(cycles: int | None) -> TableOptions:
    deletes = {"full_diff": {"every_cycles": cycles}} if cycles is not None else None
    return TableOptions.model_validate({"defaults": {"updated_at": "updated_at", "deletes": deletes}})


@pytest.fixture
def source(app: App, tmp_path: Path) -> PollSource:
    dsn = f"sqlite:///{app.file}"
    return make_polled(dsn, tmp_path, options(1), chunk_rows=2, interval=1e-6, idle_interval=1e-6, look_back=0.0)


def poll_new_rows(replay: SourceReplay, app: App) -> None:
    """The copy, and then the new rows by a poll; no later poll reads them again."""
    replay.catch_up()
    app.moment = app.now()
    app.put("a")
    wait_until(lambda: app.now() > app.moment)
    wait_until(lambda: replay.step() and replay.contents()["main.t"] == app.rows())


def plan_diff(replay: SourceReplay) -> list[Split]:
    while True:
        wait_until(replay.plan)
        assert replay.offset is not None
        assert replay.planned is not None
        [entry] = replay.planned["tables"].values()
        if entry["reading"]["kind"] == "diff":
            return replay.follower.plan(replay.offset, replay.planned)
        replay.write()
        replay.commit()


def compare(replay: SourceReplay, newcomers_first: bool, between: Callable[[], None]) -> list[Changes]:
    """One diff; something happens between its read of new keys and its read of stretches."""
    splits = plan_diff(replay)
    new = [one for one in splits if isinstance(one.piece if isinstance(one, DiffScan) else one, NewcomerSplit)]
    stretches = [one for one in splits if one not in new]
    assert new
    assert stretches
    first, second = (new, stretches) if newcomers_first else (stretches, new)
    found = [changes for split in first for changes in replay.source.read(split)]
    between()
    found += [changes for split in second for changes in replay.source.read(split)]
    replay._apply("main.t", found, splits[0].schemas["main.t"])
    replay.commit()
    return found


VALUES = ("a", "b", None)


@pytest.mark.parametrize("newcomers_first", [True, False], ids=["new keys first", "stretches first"])
@pytest.mark.parametrize(("before", "between", "after"), list(product(VALUES, repeat=3)))
def test_rows_that_a_poll_brought_may_change_and_go_while_they_are_compared(
    before: str | None, between: str | None, after: str | None, newcomers_first: bool, source: PollSource, app: App
) -> None:
    with SourceReplay(source, LIMIT) as replay:
        poll_new_rows(replay, app)
        app.put(before)
        compare(replay, newcomers_first, lambda: app.put(between))
        app.put(after)
        compare(replay, newcomers_first, lambda: None)
        assert replay.contents()["main.t"] == app.rows()
        # What a diff settled, the next one need not give again.
        assert sum(map(len, compare(replay, newcomers_first, lambda: None))) == 0


def test_a_polled_row_that_did_not_change_is_not_emitted_again(source: PollSource, app: App) -> None:
    with SourceReplay(source, LIMIT) as replay:
        poll_new_rows(replay, app)
        for _ in range(3):
            assert sum(map(len, compare(replay, True, lambda: None))) == 0


def test_a_row_that_came_while_full_diffs_were_off_goes_when_they_are_on_again(source: PollSource, app: App) -> None:
    with SourceReplay(source, LIMIT) as replay:
        replay.catch_up()
        replay.crash()
        replay.source = with_tables(source, options(None))
        poll_new_rows(replay, app)
        replay.crash()
        replay.source = source
        app.put(None)
        for _ in range(2):
            replay.catch_up()
    assert replay.contents()["main.t"] == app.rows()


def test_a_dropped_table_leaves_no_folder(source: PollSource, app: App, tmp_path: Path) -> None:
    app.run("CREATE TABLE other (id INTEGER PRIMARY KEY, updated_at TEXT)")
    with SourceReplay(source, LIMIT) as replay:
        replay.catch_up()
        assert len([each for each in source.folder.iterdir() if each.is_dir()]) == 2
        app.run("DROP TABLE other")
        replay.crash()
        poll_new_rows(replay, app)
        assert len([each for each in source.folder.iterdir() if each.is_dir()]) == 1
        compare(replay, True, lambda: None)
        assert replay.contents()["main.t"] == app.rows()
