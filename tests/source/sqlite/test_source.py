"""What the sources `sqlite` and `turso` make of a tape: every mode, both versions, and Turso's habits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.capture import disable
from tailrace.errors import LostError, PreflightError, TableError, UnfitError
from tailrace.model.change import Op, Position
from tailrace.source.follower import Limit, TableDirectives
from tailrace.testing.replay import SourceReplay
from tests.support.sqlite_application import KINDS, Application, Kind, make_source
from tests.support.sqlite_following import ITEMS, captured, changes, equal, following

WORDS = "CREATE TABLE words (w TEXT NOT NULL PRIMARY KEY, n INTEGER)"


def fails(replay: SourceReplay) -> TableError:
    with pytest.raises(TableError) as caught:
        changes(replay)
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["id", "before", "after", "full"])
def test_every_mode_of_capture_leads_to_the_same_rows(kind: Kind, mode: str, tmp_path: Path) -> None:
    with captured(tmp_path, kind, ITEMS, "CREATE TABLE bag (a TEXT)", mode=mode) as app, following(app, tmp_path) as to:
        app.run("INSERT INTO items VALUES (1, 'a', 1.5), (2, 'b', 2), (3, 'c', 3)")
        app.run("INSERT INTO bag VALUES ('x'), ('y')")
        equal(to, app)
        app.run("UPDATE items SET price = 9 WHERE id = 1")
        app.run("DELETE FROM items WHERE id = 2")
        app.run("UPDATE items SET id = 30 WHERE id = 3")
        app.run("INSERT OR REPLACE INTO items VALUES (1, 'again', NULL)")
        app.run("DELETE FROM bag WHERE a = 'x'")
        equal(to, app)


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_of_a_key_that_is_not_the_rowid_is_a_delete_and_an_insert(kind: Kind, tmp_path: Path) -> None:
    old = "INSERT INTO words VALUES ('old', 1), ('same', 2)"
    with captured(tmp_path, kind, WORDS, old) as app, following(app, tmp_path) as to:
        app.run("UPDATE words SET w = CASE w WHEN 'old' THEN 'new' ELSE w END, n = n + 1")
        found = changes(to)
        assert [(Op(one["op"]), one["row"]["w"], one["ordinal"]) for one in found] == [
            (Op.DELETE, "old", 0),
            (Op.INSERT, "new", 1),
            (Op.UPDATE, "same", 0),
        ]
        assert found[2]["before"] == {"w": "same", "n": 2}
        assert all(one["committed_at"] is not None for one in found)
        equal(to, app)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_got_another_key_and_went_leaves_nothing_where_new_rows_are_not_kept(
    kind: Kind, tmp_path: Path
) -> None:
    with captured(tmp_path, kind, WORDS, mode="before") as app, following(app, tmp_path) as to:
        app.run("INSERT INTO words VALUES ('a', 1)")
        equal(to, app)
        app.run("UPDATE words SET w = 'b'")
        app.run("DELETE FROM words")
        equal(to, app)


def test_a_key_that_vacuum_may_change_is_warned_about(tmp_path: Path) -> None:
    with captured(tmp_path, "hook", ITEMS, "CREATE TABLE bag (a TEXT)") as app:
        warnings = [finding for finding in make_source(app, tmp_path).check() if finding.level == "warning"]
        assert [finding.subject for finding in warnings] == ["table main.bag"]
        assert "VACUUM" in warnings[0].message


def test_turso_habits_are_understood(tmp_path: Path) -> None:
    tables = (
        ITEMS,
        "CREATE TABLE log (id INTEGER PRIMARY KEY, item INTEGER)",
        "CREATE TRIGGER noted AFTER INSERT ON items BEGIN INSERT INTO log (item) VALUES (NEW.id); END",
    )
    with captured(tmp_path, "turso", *tables) as app, following(app, tmp_path) as to:
        app.run("INSERT INTO items VALUES (1, 'a', 1.5)")
        app.run("INSERT INTO items VALUES (1, 'b', 2) ON CONFLICT (id) DO UPDATE SET name = excluded.name")
        app.run("UPDATE items SET id = 7 WHERE id = 1")
        app.run("DELETE FROM items WHERE id = 12345")
        app.run("BEGIN")
        app.run("INSERT INTO items VALUES (8, 'undone', 0)")
        app.run("ROLLBACK")
        app.run("BEGIN")
        app.run("INSERT INTO items VALUES (9, 'c', 0)")
        app.run("SAVEPOINT s")
        app.run("INSERT INTO items VALUES (10, 'd', 0)")
        app.run("ROLLBACK TO s")
        app.run("COMMIT")
        equal(to, app)
        assert to.contents()["main.items"].keys() == {(7, "b", 1.5), (9, "c", 0.0)}


def test_a_tape_without_transactions_is_read_as_version_1(tmp_path: Path) -> None:
    v1 = (
        "CREATE TABLE turso_cdc (change_id INTEGER PRIMARY KEY AUTOINCREMENT, change_time INTEGER, change_type INTEGER,"
        ' table_name TEXT, id, "before" BLOB, "after" BLOB, updates BLOB)'
    )
    with captured(tmp_path, "turso", v1, ITEMS) as app, following(app, tmp_path) as to:
        assert app.value("SELECT version FROM turso_cdc_version") == "v1"
        app.run("INSERT INTO items VALUES (1, 'a', 1.5), (2, 'b', 2)")
        app.run("DELETE FROM items WHERE id = 1")
        assert {one["txn"] for one in changes(to)} == {None}
        equal(to, app)


def test_an_unknown_version_of_the_tape_stops_before_anything_is_read(tmp_path: Path) -> None:
    with captured(tmp_path, "hook", ITEMS) as app:
        app.run("UPDATE turso_cdc_version SET version = 'v9'")
        source = make_source(app, tmp_path)
        assert [finding.level for finding in source.check()] == ["error"]
        with pytest.raises(PreflightError, match="v9"):
            source.prepare()


def test_a_transaction_without_its_commit_is_not_emitted_before_it_ends(tmp_path: Path) -> None:
    with captured(tmp_path, "hook", ITEMS) as app, following(app, tmp_path) as to:
        app.run("INSERT INTO items VALUES (1, 'whole', 0)")
        last = app.value("SELECT max(change_id) FROM turso_cdc")
        columns = 'change_id, change_time, change_txn_id, change_type, table_name, id, "before", "after", updates'
        put = f"INSERT INTO turso_cdc ({columns}) VALUES (?, 1, {last + 1}, ?, ?, ?, NULL, ?, NULL)"
        image = app.value("SELECT after FROM turso_cdc WHERE table_name = 'items'")
        app.run(put, last + 1, 1, "items", 1, image)
        assert [one["commit"] for one in changes(to)] == [last - 1]
        to.write()
        to.commit()
        assert not to.plan()
        app.run(put, last + 2, 2, None, None, None)
        assert [one["commit"] for one in changes(to)] == [last + 1]


def test_numbers_of_changes_are_not_reported_as_bytes_of_a_log(tmp_path: Path) -> None:
    with captured(tmp_path, "trigger", ITEMS) as application, following(application, tmp_path) as replay:
        application.run("INSERT INTO items VALUES (1, 'a', 1.0)")
        status = replay.source.status()
        assert (status.received is None, status.server) == (False, None)


def test_a_batch_ends_with_a_transaction(tmp_path: Path) -> None:
    with captured(tmp_path, "turso", ITEMS) as app, following(app, tmp_path) as to:
        for first in (1, 11, 21):
            app.run("BEGIN")
            for key in range(first, first + 10):
                app.run("INSERT INTO items VALUES (?, 'a', 0)", key)
            app.run("COMMIT")
        to.limit = Limit(5, 10**9)
        sizes = []
        while to.plan():
            sizes.append(len(changes(to)))
            to.write()
            to.commit()
        assert sizes == [10, 10, 10]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tape_that_was_started_over_is_lost_and_never_passed_over(kind: Kind, tmp_path: Path) -> None:
    with captured(tmp_path, kind, ITEMS) as app, following(app, tmp_path) as to:
        app.run("INSERT INTO items VALUES (1, 'a', 0)")
        equal(to, app)
        app.run("DELETE FROM turso_cdc")
        with pytest.raises(LostError, match="started over") as caught:
            to.step()
        assert "tailrace reset" in (caught.value.fix or "")
        app.run("INSERT INTO items VALUES (2, 'a', 0)")
        with pytest.raises(LostError):
            to.step()


def test_a_purge_of_what_a_stopped_table_still_needs_is_noticed(tmp_path: Path) -> None:
    with captured(tmp_path, "hook", ITEMS, WORDS) as app, following(app, tmp_path) as to:
        to.directives = TableDirectives(paused=["words"])
        app.run("INSERT INTO words VALUES ('a', 1)")
        app.run("INSERT INTO items VALUES (1, 'a', 0)")
        while to.step():
            pass
        app.run("DELETE FROM turso_cdc WHERE change_id < (SELECT max(change_id) FROM turso_cdc)")
        with pytest.raises(LostError, match=r"main\.words still needs"):
            to.step()
        to.directives = TableDirectives(resync={"words": 1})
        equal(to, app)


# Not with apsw: to purge is to write, and no second SQLite library may do that in this process.
@pytest.mark.parametrize("kind", ["trigger", "turso"])
def test_consumed_changes_are_purged_and_numbers_go_on(kind: Kind, tmp_path: Path) -> None:
    with captured(tmp_path, kind, ITEMS) as app, following(app, tmp_path, purge=-10.0) as to:
        (tmp_path / "tape" / "purged").unlink()
        for key in range(50):
            app.run("INSERT INTO items VALUES (?, 'a', 0)", key)
        equal(to, app)
        assert app.value("SELECT count(*) FROM turso_cdc WHERE table_name = 'items'") <= 1
        last = app.value("SELECT max(change_id) FROM turso_cdc")
        assert last >= 50
        app.run("DELETE FROM items WHERE id < 10")
        assert app.value("SELECT max(change_id) FROM turso_cdc") > last
        equal(to, app)


def test_large_values_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    with captured(tmp_path, "hook", "CREATE TABLE large (id INTEGER PRIMARY KEY, v BLOB)") as app:
        for key in range(40):
            app.run("INSERT INTO large VALUES (?, randomblob(1000000))", key)
        with following(app, tmp_path) as to:
            equal(to, app)
            app.run("UPDATE large SET v = randomblob(1000000)")
            equal(to, app)


def test_a_malformed_record_stops_its_table_with_the_bytes_and_can_be_skipped(tmp_path: Path) -> None:
    with captured(tmp_path, "hook", ITEMS, WORDS) as app, following(app, tmp_path) as to:
        app.run("INSERT INTO items VALUES (1, 'a', 0)")
        app.run("INSERT INTO items VALUES (2, 'b', 0)")
        bad = app.value("SELECT change_id FROM turso_cdc WHERE table_name = 'items' AND id = 1")
        app.run("UPDATE turso_cdc SET after = x'07ff' WHERE change_id = ?", bad)
        error = fails(to)
        assert (error.table, error.raw) == ("main.items", b"\x07\xff")
        assert error.position == str(Position(bad, 0))
        assert "07ff" not in str(error)
        to.crash()
        to.planned = None
        to.directives = TableDirectives(skips={"items": [str(Position(bad, 0))]})
        assert [one["row"]["id"] for one in changes(to)] == [2]


def test_values_that_do_not_fit_their_column_keep_their_exact_text(tmp_path: Path) -> None:
    with captured(tmp_path, "trigger", ITEMS) as app, following(app, tmp_path) as to:
        app.run("INSERT INTO items VALUES (1, x'00ff', 'much')")
        (one,) = changes(to)
        assert one["row"] == {"id": 1, "name": None, "price": None}
        assert one["exact"] == '{"name": "X\'00FF\'", "price": "much"}'


def test_a_key_that_is_null_stops_the_table(tmp_path: Path) -> None:
    with (
        captured(tmp_path, "trigger", "CREATE TABLE loose (k TEXT PRIMARY KEY)") as app,
        following(app, tmp_path) as to,
    ):
        app.run("INSERT INTO loose VALUES (NULL)")
        assert isinstance(fails(to), UnfitError)


def test_a_capture_of_ids_is_refused_for_a_key_that_is_not_the_rowid(tmp_path: Path) -> None:
    with captured(tmp_path, "trigger", ITEMS, WORDS, mode="id") as app:
        errors = [finding for finding in make_source(app, tmp_path).check() if finding.level == "error"]
        assert [finding.subject for finding in errors] == ["table main.words"]


def test_a_file_without_capture_is_refused_with_the_command_that_enables_it(tmp_path: Path) -> None:
    app = Application(tmp_path / "app.db", "trigger")
    app.run(ITEMS)
    (finding,) = make_source(app, tmp_path).check()
    assert (finding.level, finding.fix) == ("error", f"tailrace sqlite enable {app.path}")
    app.close()


@pytest.mark.parametrize("content", [None, b"no database at all" * 100])
def test_a_file_that_is_missing_or_no_database_is_a_finding(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    if content is not None:
        path.write_bytes(content)
    for library in ("sqlite", "turso"):
        application = Application.__new__(Application)
        application.path, application.kind = path, "turso" if library == "turso" else "hook"
        assert [finding.level for finding in make_source(application, tmp_path).check()] == ["error"]


def test_a_stopped_capture_by_triggers_is_an_error_and_releases_no_table(tmp_path: Path) -> None:
    with captured(tmp_path, "trigger", ITEMS) as application, following(application, tmp_path) as replay:
        application.run("INSERT INTO items VALUES (1, 'a', 1.5)")
        disable(application.connection)
        with pytest.raises(PreflightError, match="was stopped"):
            replay.plan()
        found = [finding for finding in make_source(application, tmp_path).check() if finding.level == "error"]
        assert "sqlite enable" in (found[0].fix or "")
