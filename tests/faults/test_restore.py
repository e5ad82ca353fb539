"""Each part of a pipeline put back to an earlier copy, lost or damaged, for every source: right, or stopped with a fix.

The cells are those of the table in `docs/guarantees.md`. Each fix that is printed is followed, and then all is right.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tailrace.cli.operate import ask
from tailrace.config.pipeline import load
from tailrace.demo.server import EmbeddedPostgres
from tailrace.system.failpoint import VARIABLE, FailpointError
from tailrace.testing.wait import wait_until
from tests.support.database import PostgresDatabase
from tests.support.restore_scene import (
    SCENES,
    PostgresScene,
    PostgresServerScene,
    ReplicaScene,
    RestoreScene,
    SqliteScene,
    outcome,
)
from tests.support.small_engine import without_spark

PAGE = Path(__file__).parents[2] / "docs" / "guarantees.md"
SOURCES = ("postgres", "sqlite", "turso", "rqlite", "slatedb", "poll")
BEFORE_SOURCE = ("state store", "checkpoint", "lake")
"""Parts that are compared before, or without, asking the source: the slow ones need not be asked each time."""

Cell = tuple[str, str, str, str]


def cells() -> Iterator[Cell]:
    """The table of the page: source, part, what happened to it, outcome."""
    page = PAGE.read_text("utf-8")
    head, rows = re.findall(r"^\| part \| .*$", page, re.MULTILINE)[0], []
    for line in page[page.index(head) :].splitlines()[2:]:
        if not line.startswith("| "):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    columns = [name.strip() for name in head.strip("|").split("|")][2:]
    for part, what, *outcomes in rows:
        for names, word in zip(columns, outcomes, strict=True):
            for source in names.split(", "):
                yield source, part, what, word


def covered() -> Iterator[Cell]:
    for source, part, what, word in cells():
        # Turso keeps a file it has opened until its process ends.
        is_same_elsewhere = (source, part) == ("turso", "upstream") or (
            part in BEFORE_SOURCE and source in ("postgres", "rqlite", "turso")
        )
        if not is_same_elsewhere:
            yield source, part, what, word


def test_the_table_has_every_part_for_every_source() -> None:
    wanted = {
        (source, part, what)
        for source in SOURCES
        for part in ("state store", "checkpoint", "journal", "state folder", "lake")
        for what in ("older", "missing", "damaged")
        if (part, what) != ("state folder", "damaged")
    } | {(source, "upstream", "older") for source in SOURCES}
    assert {cell[:3] for cell in cells()} == wanted
    assert {cell[3] for cell in cells()} <= {"right", "table", "6", "7", "6 or 7", "table, 6 or 7"}


@pytest.fixture
def open_scene(
    tmp_path: Path,
    postgres_server: Callable[[int], EmbeddedPostgres],
    make_database: Callable[[EmbeddedPostgres], PostgresDatabase],
) -> Iterator[Callable[[str, str], RestoreScene]]:
    """`open_scene(source, part)` is a pipeline that is followed, in the test's folder, without Spark."""
    with ExitStack() as stack:
        stack.enter_context(without_spark(tmp_path))

        def make(source: str, part: str) -> RestoreScene:
            if source != "postgres":
                return stack.enter_context(SCENES[source](tmp_path))
            if part == "upstream":
                return stack.enter_context(PostgresServerScene(tmp_path))
            return stack.enter_context(PostgresScene(tmp_path, make_database(postgres_server(18))))

        yield make


@pytest.mark.parametrize(("source", "part", "what", "word"), list(covered()))
def test_a_part_that_does_not_fit_the_others_is_noticed_or_does_no_harm(
    source: str, part: str, what: str, word: str, open_scene: Callable[[str, str], RestoreScene], tmp_path: Path
) -> None:
    scene = open_scene(source, part)
    scene.run()
    scene.keep(tmp_path / "copy")
    scene.change(1)
    scene.run()
    assert scene.differing() == []
    if part != "upstream":
        scene.receive(2)
    if what == "older":
        scene.put_back(part, tmp_path / "copy")
    elif what == "missing":
        scene.remove(part)
    else:
        scene.damage(part)
    if part == "upstream":
        scene.change(2)
    found = outcome(scene)
    assert found.word in re.split(" or |, ", word), (found, scene.errored())
    follow(scene, found.word, found.fix)
    assert scene.differing() == []


def follow(scene: RestoreScene, word: str, fix: str) -> None:
    """Do what was printed, and run again."""
    if word == "right":
        return
    errored = scene.errored() if word == "table" else ()
    assert word != "table" or scene.items in [table.name for table in errored]
    fix = errored[0].fix or "" if errored else fix
    if errored and "tailrace resync FILE" in fix:
        for table in errored:
            assert f"tailrace resync FILE {table.name}" in (table.fix or "")
            scene.resync(table.name)
    elif "tailrace reset FILE" in fix:
        scene.reset()
    else:
        assert "move the `state` folder away" in fix
        shutil.move(scene.folder / "state", scene.folder / "away")
    assert outcome(scene).word == "right"


@pytest.mark.parametrize("part", ["lake", "state folder"])
def test_a_replica_that_is_older_or_newer_than_the_state_is_noticed(part: str, tmp_path: Path) -> None:
    with without_spark(tmp_path), ReplicaScene(tmp_path) as scene:
        scene.run()
        scene.keep(tmp_path / "copy")
        scene.change(1)
        scene.run()
        scene.change(2)
        scene.put_back(part, tmp_path / "copy")
        assert outcome(scene).word == "table"
        assert [table.name for table in scene.errored()] == [scene.items]
        ask(load(scene.file), "retry", scene.items, as_json=True)
        assert outcome(scene).word == "table"  # nothing was put back
        follow(scene, "table", "")
        assert scene.differing() == []


def test_a_table_that_was_put_back_goes_on_where_it_was_once_its_last_copy_is_there_again(tmp_path: Path) -> None:
    with without_spark(tmp_path), ReplicaScene(tmp_path) as scene:
        scene.run()
        scene.keep(tmp_path / "copy")
        scene.change(1)
        scene.run()
        scene.keep(tmp_path / "last")
        scene.put_back("lake", tmp_path / "copy")
        # No change comes for the table: it is compared at the start.
        assert outcome(scene).word == "table"
        scene.change(2)
        scene.put_back("lake", tmp_path / "last")
        ask(load(scene.file), "retry", scene.items, as_json=True)
        assert outcome(scene).word == "right"
        assert scene.differing() == []


@pytest.mark.parametrize("how", ["from an archive, to a point in time", "as a snapshot of its disk"])
def test_a_server_that_was_restored_and_went_on_past_its_old_position_is_noticed(how: str, tmp_path: Path) -> None:
    with without_spark(tmp_path), PostgresServerScene(tmp_path) as scene:
        scene.run()
        scene.keep(tmp_path / "copy")
        scene.change(1)
        scene.run()
        scene.close()
        scene.put_back_files(tmp_path / "copy")
        signal, settings = (scene.server.data_dir / name for name in ("recovery.signal", "postgresql.auto.conf"))
        if "archive" in how:
            # The end of recovery from an archive begins a new timeline; this archive is empty.
            shutil.copy(settings, signal)
            shutil.chown(signal, settings.owner(), settings.group())
            with settings.open("a") as file:
                file.write("restore_command = 'false'\n")
        scene.open()
        with scene.database.connect() as connection:
            wait_until(lambda: connection.execute("SELECT pg_is_in_recovery()").fetchone() == (False,))
        scene.execute("CREATE TABLE later AS SELECT repeat('x', 1000) FROM generate_series(1, 2000)")
        scene.change(2)
        found = outcome(scene)
        assert found.word == "6", found
        assert ("timeline" if "archive" in how else "gone on from there") in found.message
        follow(scene, found.word, found.fix)
        assert scene.differing() == []


@pytest.mark.parametrize("kind", [SqliteScene, ReplicaScene])
def test_a_crash_at_any_moment_is_not_taken_for_a_restore(
    kind: type[SqliteScene], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {SqliteScene: "delta", ReplicaScene: "sqlite"}[kind]
    moments = [
        "pipeline.before_apply",
        f"{own}.before_commit",
        f"{own}.committed",
        "stream.written",
        "pipeline.applied",
        "pipeline.before_release",
        "pipeline.released",
    ]
    with without_spark(tmp_path), kind(tmp_path) as scene:
        scene.run()
        for number, moment in enumerate([*moments, *(f"{moment}@2" for moment in moments)]):
            name, _, nth = moment.partition("@")
            scene.change(number)
            if nth:
                scene.resync(scene.items)
            monkeypatch.setenv(VARIABLE, f"{name}:raise{f'@{nth}' if nth else ''}")
            # A copy may be one commit: then there is no second one to fail.
            with suppress(FailpointError) if nth else pytest.raises(FailpointError):
                scene.run()
            monkeypatch.delenv(VARIABLE)
            assert outcome(scene).word == "right", (moment, scene.errored())
            assert scene.differing() == [], moment
