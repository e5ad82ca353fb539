"""Tables that are added, dropped and changed, as the tape or the file's schema shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.config.pipeline import from_dict
from tailrace.config.registry import open_source
from tailrace.errors import SchemaChangedError
from tailrace.model.change import START, Position
from tailrace.option.table import TableOptions
from tailrace.source.sqlite.catalog import describe, rowid_column
from tailrace.source.sqlite.schema_diff import align, begin, derive
from tailrace.source.sqlite.source import SqliteSource
from tests.support.sqlite_application import KINDS, Kind
from tests.support.sqlite_following import ITEMS, captured, changes, equal, following

CAPTURED_DDL: tuple[Kind, ...] = ("turso", "hook")


@pytest.mark.parametrize("kind", KINDS)
def test_a_renamed_column_keeps_its_number_and_its_table_is_not_copied_again(kind: Kind, tmp_path: Path) -> None:
    with captured(tmp_path, kind, ITEMS) as app, following(app, tmp_path) as to:
        app.run("INSERT INTO items VALUES (1, 'a', 1)")
        equal(to, app)
        number = to.tables["main.items"].schema.column("name").number
        app.run("ALTER TABLE items RENAME COLUMN name TO title")
        app.capture()
        equal(to, app)
        assert to.tables["main.items"].schema.column("title").number == number
        assert to.source.progress(to.offset or {})[0].copy == 1


@pytest.mark.parametrize("kind", ["hook", "trigger"])
def test_tables_that_exchange_their_names_are_copied_again(kind: Kind, tmp_path: Path) -> None:
    with captured(tmp_path, kind, ITEMS, ITEMS.replace("items", "old")) as app, following(app, tmp_path) as to:
        app.run("INSERT INTO items VALUES (1, 'a', 1)")
        equal(to, app)
        app.run("ALTER TABLE items RENAME TO aside")
        app.run("ALTER TABLE old RENAME TO items")
        app.run("ALTER TABLE aside RENAME TO old")
        app.capture()
        equal(to, app)


@pytest.mark.parametrize("kind", ["hook", "trigger"])
def test_what_was_written_while_a_table_had_another_name_arrives(kind: Kind, tmp_path: Path) -> None:
    with captured(tmp_path, kind, ITEMS) as app, following(app, tmp_path) as to:
        app.run("ALTER TABLE items RENAME TO aside")
        app.run("INSERT INTO aside VALUES (1, 'a', 1)")
        app.run("ALTER TABLE aside RENAME TO items")
        app.capture()
        equal(to, app)


def test_what_a_later_trigger_of_the_application_did_is_right_when_triggers_are_enabled_again(tmp_path: Path) -> None:
    with captured(tmp_path, "trigger", ITEMS) as app, following(app, tmp_path) as to:
        app.run(
            "CREATE TRIGGER own AFTER INSERT ON items BEGIN UPDATE items SET price = 9 WHERE id = NEW.id; END",
        )
        app.run("INSERT INTO items VALUES (1, 'a', 1)")
        to.catch_up()
        app.capture()
        app.run("INSERT INTO items VALUES (2, 'b', 1)")
        equal(to, app)


@pytest.mark.parametrize("kind", CAPTURED_DDL)
def test_a_column_dropped_and_added_again_is_another_one(kind: Kind, tmp_path: Path) -> None:
    with captured(tmp_path, kind, ITEMS) as app, following(app, tmp_path) as to:
        app.run("INSERT INTO items VALUES (1, 'a', 1)")
        app.run("ALTER TABLE items DROP COLUMN name")
        app.run("ALTER TABLE items ADD COLUMN name TEXT DEFAULT 'new'")
        app.run("INSERT INTO items (id) VALUES (2)")
        equal(to, app)
        assert to.contents()["main.items"].keys() == {(1, 1.0, "new"), (2, None, "new")}
        assert to.source.progress(to.offset or {})[0].copy == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_table_joins_and_a_dropped_one_is_released(kind: Kind, tmp_path: Path) -> None:
    with captured(tmp_path, kind, ITEMS) as app, following(app, tmp_path) as to:
        app.run("CREATE TABLE later (id INTEGER PRIMARY KEY)")
        app.run("INSERT INTO later VALUES (1)")
        app.run("DROP TABLE items")
        app.capture()
        equal(to, app)
        assert [table.upstream_id for table in to.source.progress(to.offset or {})] == ["later"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_recreated_under_its_name_is_copied_again(kind: Kind, tmp_path: Path) -> None:
    with captured(tmp_path, kind, ITEMS) as app, following(app, tmp_path) as to:
        app.run("INSERT INTO items VALUES (1, 'a', 1)")
        equal(to, app)
        app.run("DROP TABLE items")
        app.run("CREATE TABLE items (code TEXT NOT NULL PRIMARY KEY, n INTEGER)")
        app.capture()
        app.run("INSERT INTO items VALUES ('x', 1)")
        equal(to, app)
        assert to.source.progress(to.offset or {})[0].copy == 2


def test_a_schema_change_stops_the_table_where_its_policy_says_so(tmp_path: Path) -> None:
    policy = TableOptions.model_validate({"include": ["main.*"], "defaults": {"schema_changes": "stop"}})
    with captured(tmp_path, "turso", ITEMS) as app, following(app, tmp_path, tables=policy) as to:
        app.run("ALTER TABLE items ADD COLUMN note TEXT")
        app.run("INSERT INTO items VALUES (1, 'a', 1, 'n')")
        with pytest.raises(SchemaChangedError):
            changes(to)


def test_columns_stay_those_of_the_copy_where_changes_are_ignored(tmp_path: Path) -> None:
    policy = TableOptions.model_validate({"include": ["main.*"], "defaults": {"schema_changes": "ignore"}})
    with captured(tmp_path, "turso", ITEMS) as app, following(app, tmp_path, tables=policy) as to:
        app.run("ALTER TABLE items ADD COLUMN note TEXT")
        app.run("INSERT INTO items VALUES (1, 'a', 1, 'n')")
        assert [one["row"] for one in changes(to)] == [{"id": 1, "name": "a", "price": 1.0}]


@pytest.mark.parametrize(
    ("sql", "key", "rowid"),
    [
        ("CREATE TABLE t (id INTEGER PRIMARY KEY, v)", ("id",), "id"),
        ("CREATE TABLE t (id INTEGER PRIMARY KEY AUTOINCREMENT)", ("id",), "id"),
        ("CREATE TABLE t (id INT PRIMARY KEY)", ("id",), None),
        ("CREATE TABLE t (id INTEGER PRIMARY KEY DESC)", ("id",), None),
        ("CREATE TABLE t (a TEXT, b TEXT, PRIMARY KEY (b, a))", ("b", "a"), None),
        ("CREATE TABLE t (a TEXT)", ("_rowid",), "_rowid"),
        ("CREATE TABLE t (_rowid TEXT)", ("__rowid",), "__rowid"),
    ],
)
def test_the_key_is_the_declared_one_or_the_rowid(sql: str, key: tuple[str, ...], rowid: str | None) -> None:
    schema = begin(None, describe(sql), START)
    assert (schema.key, rowid_column(schema)) == (key, rowid)


NAMES = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=5, unique=True)


@given(NAMES, st.data())
def test_each_single_alteration_is_understood(old: list[str], data: st.DataObject) -> None:
    fresh = next(name for name in "uvwxyz" if name not in old)
    place = data.draw(st.integers(0, len(old) - 1))
    renamed = [fresh if at == place else name for at, name in enumerate(old)]
    assert align(old, renamed) == [*range(len(old))]
    assert align(old, [*old, fresh]) == [*range(len(old)), None]
    dropped = [name for at, name in enumerate(old) if at != place]
    assert align(old, dropped) == [at for at in range(len(old)) if at != place]


@given(NAMES, NAMES)
def test_columns_that_moved_are_never_guessed(old: list[str], new: list[str]) -> None:
    found = align(old, new)
    if found is not None:
        kept = [at for at in found if at is not None]
        assert kept == sorted(set(kept))
        assert all(new.index(name) == found.index(at) for at, name in enumerate(old) if name in new and at in found)


def test_numbers_of_columns_are_never_given_twice() -> None:
    table = begin(None, describe("CREATE TABLE t (id INTEGER PRIMARY KEY, a)"), START)
    seen = {column.number for column in table.columns}
    for commit in range(1, 50):
        table = derive(table, describe("CREATE TABLE t (id INTEGER PRIMARY KEY)"), Position(commit * 2, 0)).schema
        grown = derive(table, describe("CREATE TABLE t (id INTEGER PRIMARY KEY, a)"), Position(commit * 2 + 1, 0))
        table = grown.schema
        assert grown.recopy is None
        assert table.column("a").number not in seen
        seen.add(table.column("a").number)


@pytest.mark.parametrize("library", ["sqlite", "turso"])
def test_both_types_are_opened_by_their_name(library: str, tmp_path: Path) -> None:
    config = from_dict(
        {
            "name": "app",
            "source": {"type": library, "path": "app.db", "cdc_table": "tape", "purge": "7d"},
            "destination": {"type": "delta", "path": "lake"},
        },
        folder=tmp_path,
    )
    source = open_source(config)
    assert isinstance(source, SqliteSource)
    assert (source.options.type, source.options.cdc_table, source.options.purge) == (library, "tape", 604_800.0)
    assert source.options.path == tmp_path.resolve() / "app.db"
