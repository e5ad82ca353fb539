"""The tape of real Turso files, with the engine's habits. Turso runs in a process of its own: one that also opened
the file with sqlite3 would drop Turso's lock."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tailrace.capture import CdcVersion, Tape, bin_record_json_object, enable, table_columns_json_array
from tailrace.capture.change import CapturedChange, Delete, Insert, Update
from tailrace.capture.replica import apply, revert
from tailrace.capture.tape import TapeTransaction
from tailrace.errors import PreflightError, SchemaChangedError

RUN = """
import json, sys, turso
connection = turso.connect(sys.argv[1], isolation_level=None)
connection.execute(f"PRAGMA capture_data_changes_conn('{sys.argv[2]}')")
found = []
for sql in json.load(sys.stdin):
    try:
        found.append(connection.execute(sql).fetchall())
    except turso.Error as error:
        found.append(str(error))
print(json.dumps(found, default=lambda value: value.hex()))
"""

TABLE = "CREATE TABLE t(id INTEGER PRIMARY KEY, n TEXT, v REAL, b BLOB)"


def run(path: Path, *statements: str, mode: str = "full") -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(path), mode],
        input=json.dumps(statements),
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[Any] = json.loads(done.stdout)
    return found


def read(path: Path, after: int = 0) -> list[TapeTransaction]:
    with closing(sqlite3.connect(path)) as connection:
        return list(Tape(connection).transactions(after, ignore_schema_changes=False))


def rows(path: Path, after: int = 0) -> list[CapturedChange]:
    return [change for group in read(path, after) for change in group.changes if not change.is_schema]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "turso.db"


def test_transactions_are_grouped_and_empty_commits_left_out(path: Path) -> None:
    run(
        path,
        TABLE,
        "INSERT INTO t(id) VALUES (1), (2)",
        "BEGIN",
        "INSERT INTO t(id) VALUES (3)",
        "DELETE FROM t WHERE id = 1",
        "COMMIT",
        "BEGIN",
        "INSERT INTO t(id) VALUES (4)",
        "ROLLBACK",
        "DELETE FROM t WHERE id = 99",
        "INSERT INTO t(id) VALUES (2)",
    )
    assert [[(c.type, c.id) for c in group.changes] for group in read(path)][1:] == [
        [(1, 1), (1, 2)],
        [(1, 3), (-1, 1)],
    ]


def test_a_trigger_s_early_commit_does_not_split_its_transaction(path: Path) -> None:
    run(
        path,
        TABLE,
        "CREATE TABLE u(a)",
        "CREATE TRIGGER more AFTER INSERT ON u BEGIN INSERT INTO t(id) VALUES (NEW.a); END",
        "INSERT INTO u VALUES (5)",
    )
    (group,) = [group for group in read(path) if not group.changes[0].is_schema]
    assert [change.table for change in group.changes] == ["t", "u"]


def test_an_open_transaction_is_left_for_later(path: Path) -> None:
    run(path, TABLE, "INSERT INTO t(id) VALUES (1)")
    with closing(sqlite3.connect(path)) as connection:
        last = Tape(connection).statistics().last
        assert last is not None
        connection.execute(
            "INSERT INTO turso_cdc(change_txn_id, change_type, table_name, id) VALUES (?, 1, 't', 2)", (last + 1,)
        )
        assert list(Tape(connection).transactions(last)) == []


def test_a_changed_key_has_its_new_row_whatever_column_it_lies_in(path: Path) -> None:
    run(path, TABLE, "INSERT INTO t VALUES (1, 'a', 1.5, x'00ff')", "UPDATE t SET id = 10")
    assert [change.into_apply() for change in rows(path)[1:]] == [
        Delete("t", 1),
        Insert("t", 10, (10, "a", 1.5, b"\x00\xff")),
    ]


def test_only_the_columns_of_set_are_written_with_the_value_of_the_row(path: Path) -> None:
    run(path, TABLE, "INSERT INTO t VALUES (1, 'a', 1.5, NULL)", "UPDATE t SET v = '7'")
    update = rows(path)[1]
    assert update.into_apply() == Update("t", 1, (1, "a", 7.0, None), (False, False, True, False))
    assert update.into_revert() == Update("t", 1, (1, "a", 1.5, None), (False, False, True, False))


def test_an_upsert_applies_but_cannot_be_undone(path: Path) -> None:
    run(
        path,
        TABLE,
        "INSERT INTO t(id, n) VALUES (1, 'a')",
        "INSERT INTO t(id, n) VALUES (1, 'b') ON CONFLICT(id) DO UPDATE SET n = excluded.n",
    )
    upsert = rows(path)[1]
    assert upsert.into_apply() == Update("t", 1, (1, "b", None, None), None)
    with pytest.raises(PreflightError, match="before image"):
        upsert.into_revert()


@pytest.mark.parametrize("mode", ["id", "before", "after"])
def test_modes_that_keep_less_say_what_they_lack(path: Path, mode: str) -> None:
    run(path, TABLE, "INSERT INTO t(id) VALUES (1)", "UPDATE t SET n = 'x'", "DELETE FROM t", mode=mode)
    insert, update, delete = rows(path)
    assert delete.into_apply() == Delete("t", 1)
    if mode == "after":
        assert insert.into_apply() == Insert("t", 1, (1, None, None, None))
        assert update.into_apply() == Update("t", 1, (1, "x", None, None), None)
    else:
        with pytest.raises(PreflightError, match="after image"):
            insert.into_apply() if mode == "id" else update.into_apply()


def test_a_turso_file_is_replicated_with_its_ddl(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    run(path, TABLE, "INSERT INTO t VALUES (1, 'a', 1.5, x'00ff'), (2, 'b', NULL, NULL)")
    assert apply(path, copy).copied
    run(
        path,
        "UPDATE t SET id = 10 WHERE id = 1",
        "REPLACE INTO t VALUES (2, 'c', 5, NULL)",
        "ALTER TABLE t ADD COLUMN z DEFAULT 5",
        "UPDATE t SET z = 6 WHERE id = 10",
        "INSERT INTO t(id) VALUES (20)",
        "ALTER TABLE t DROP COLUMN v",
        "CREATE TABLE w(k TEXT, j INT, PRIMARY KEY (k, j))",
        "INSERT INTO w VALUES ('a', 1)",
        "UPDATE w SET j = 2",
        "CREATE INDEX by_n ON t(n)",
        "DROP INDEX by_n",
    )
    done = apply(path, copy)
    assert (done.copied, done.changes) == (False, 13)
    with closing(sqlite3.connect(path)) as one, closing(sqlite3.connect(copy)) as two:
        for table in ("t", "w"):
            sql = f"SELECT rowid, * FROM {table} ORDER BY rowid"
            assert one.execute(sql).fetchall() == two.execute(sql).fetchall()
            text = "SELECT sql FROM sqlite_schema WHERE name = ?"
            assert one.execute(text, (table,)).fetchall() == two.execute(text, (table,)).fetchall()
    assert apply(path, copy).changes == 0


def test_a_turso_tape_is_merged_by_key_into_what_a_file_holds(path: Path, tmp_path: Path) -> None:
    words = "CREATE TABLE words(w TEXT PRIMARY KEY, n)"
    other = tmp_path / "other.db"
    with closing(sqlite3.connect(other, isolation_level=None)) as connection:
        connection.execute(words)
        connection.execute("INSERT INTO words VALUES ('own', 0), ('a', 0), ('gone', 0), ('moved', 0)")
    run(path, words, "INSERT INTO words VALUES ('a', 1), ('gone', 1), ('old', 1)", "DELETE FROM words WHERE w = 'gone'")
    run(path, "INSERT INTO words VALUES ('a', 9) ON CONFLICT(w) DO UPDATE SET n = 2", "UPDATE words SET n = n + 5")
    run(path, "UPDATE words SET w = 'moved' WHERE w = 'old'", "REPLACE INTO words VALUES ('b', 1), ('b', 2)")
    apply(path, other, merge=True)
    assert apply(path, other, merge=True).changes == 0
    with closing(sqlite3.connect(other)) as connection:
        found = connection.execute("SELECT * FROM words ORDER BY 1").fetchall()
    assert found == [("a", 7), ("b", 2), ("moved", 6), ("own", 0)]


def test_a_turso_file_is_taken_back_and_turso_goes_on_with_it(path: Path) -> None:
    run(path, TABLE, "INSERT INTO t(id, n) VALUES (1, 'a')", "UPDATE t SET n = 'b'", "DELETE FROM t")
    revert(path, last=2)
    found = run(path, "SELECT n FROM t", "INSERT INTO t(id, n) VALUES (2, 'x')", "PRAGMA integrity_check")
    assert found[0] == [["a"]]
    assert found[2] == [["ok"]]
    assert [change.id for change in rows(path)][-1] == 2


def test_a_rename_that_turso_left_off_the_tape_stops_the_replica(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    run(path, TABLE)
    apply(path, copy)
    run(path, "ALTER TABLE t RENAME TO s", "ALTER TABLE s ADD COLUMN z", "INSERT INTO s(id) VALUES (1)")
    with pytest.raises(SchemaChangedError, match="cannot be applied"):
        apply(path, copy)
    with closing(sqlite3.connect(copy)) as connection:
        assert connection.execute("SELECT count(*) FROM t").fetchone() == (0,)


def test_without_rowid_tables_are_refused_by_turso_as_by_us(path: Path) -> None:
    found = run(path, "CREATE TABLE w(k PRIMARY KEY) WITHOUT ROWID", "INSERT INTO w VALUES (1)")
    assert any(isinstance(answer, str) for answer in found)


def test_dropping_the_capture_table_in_turso_leaves_no_version(path: Path) -> None:
    run(path, TABLE, "PRAGMA capture_data_changes_conn('off')", "DROP TABLE turso_cdc")
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT * FROM turso_cdc_version").fetchall() == []
        with pytest.raises(PreflightError, match="no capture table"):
            Tape(connection)


def test_both_helpers_equal_turso_s(path: Path) -> None:
    records = 'SELECT bin_record_json_object(table_columns_json_array(\'t\'), "after"), "after" FROM turso_cdc'
    found = run(
        path,
        "CREATE TABLE t(id INTEGER PRIMARY KEY, n TEXT, v REAL)",
        "INSERT INTO t VALUES (1, 'é\"q', 1.5), (2, NULL, -3)",
        "SELECT table_columns_json_array('t')",
        f"{records} WHERE table_name = 't'",
        "UPDATE t SET n = 'new' WHERE id = 1",
        "SELECT bin_record_json_object(table_columns_json_array('t'), updates), updates FROM turso_cdc "
        "WHERE updates IS NOT NULL",
    )
    with closing(sqlite3.connect(path)) as connection:
        columns = table_columns_json_array(connection, "t")
    assert columns == found[2][0][0]
    assert len(found[5]) == 1
    for theirs, record in found[3] + found[5]:
        assert json.loads(bin_record_json_object(columns, bytes.fromhex(record)) or "") == json.loads(theirs)


def test_turso_refuses_the_tape_of_triggers_and_leaves_it_as_it_is(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(TABLE)
        enable(connection)
        connection.execute("INSERT INTO t(id) VALUES (1)")
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(path), "full"], input="[]", capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "unexpected CDC version: triggers-v1" in done.stderr
    assert [change.id for change in rows(path)] == [1]


def test_an_updates_record_shows_its_values_under_a_second_set_of_names() -> None:
    columns = '["id?","n?","v?","b?","id","n","v","b"]'
    shown = json.loads(bin_record_json_object(columns, bytes.fromhex("0908090808001100004132")) or "")
    assert shown == {"id?": 0, "n?": 1, "v?": 0, "b?": 0, "id": None, "n": "A2", "v": None, "b": None}


def test_a_tape_of_turso_without_its_version_row_keeps_its_transactions(path: Path) -> None:
    run(path, TABLE, "INSERT INTO t(id) VALUES (1), (2)", "DELETE FROM t")
    whole = read(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DELETE FROM turso_cdc_version")
        connection.commit()
        assert Tape(connection).version is CdcVersion.V2
    assert read(path) == whole
    assert [len(group.changes) for group in whole] == [1, 2, 2]


def test_blobs_are_hex_in_json() -> None:
    record = bytes.fromhex("050911071041323ff800000000000000ff")
    text = bin_record_json_object('["id","n","v","b"]', record)
    assert text == '{"id":1,"n":"A2","v":1.5,"b":"00FF"}'


def test_files_that_turso_captures_are_not_captured_by_triggers_too(path: Path) -> None:
    run(path, TABLE)
    with (
        closing(sqlite3.connect(path, isolation_level=None)) as connection,
        pytest.raises(PreflightError, match="Turso"),
    ):
        enable(connection)


def test_triggers_are_fired_by_turso_as_by_any_writer(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE t(id INTEGER PRIMARY KEY, n TEXT)")
        enable(connection)
    found = run(path, "INSERT INTO t VALUES (1, 'a')", "UPDATE t SET n = 'b'", mode="off")
    assert found == [[], []]
    assert [(change.type, change.row("after")) for change in rows(path)] == [(1, (1, "a")), (0, (1, "b"))]


def test_a_table_of_the_first_version_is_read_with_a_commit_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(
            "CREATE TABLE turso_cdc(change_id INTEGER PRIMARY KEY AUTOINCREMENT, change_time INTEGER, "
            'change_type INTEGER, table_name TEXT, id, "before" BLOB, "after" BLOB, updates BLOB)'
        )
        connection.execute("CREATE TABLE t(id INTEGER PRIMARY KEY, n)")
        connection.commit()
    run(path, "INSERT INTO t VALUES (1, 'a')", "DELETE FROM t")
    with closing(sqlite3.connect(path)) as connection:
        tape = Tape(connection)
        assert tape.version == "v1"
        (batch,) = tape.iterate()
        assert [change.type for change in batch] == [1, -1, 2]
        assert [len(group.changes) for group in tape.transactions()] == [2]
        connection.execute("UPDATE turso_cdc_version SET version = 'v3'")
        with pytest.raises(PreflightError, match="v3"):
            Tape(connection)
