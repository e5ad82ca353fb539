"""The served file under other programs: no page is lost, and no program is held up.

Here they are connections of apsw: two copies of SQLite in one process do not see each other's locks.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import apsw
import pytest

import tailrace
from tailrace.errors import PreflightError, UnavailableError
from tailrace.sync.hrana import Step, encode_query
from tailrace.sync.page_history import PageHistory
from tailrace.sync.remote import FileRemote, RefusedPushError
from tailrace.sync.served_file import ServedFile, UnknownRevisionError
from tailrace.system import turso_lock
from tests.support.sqlite_process import running


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "served.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("PRAGMA journal_mode = WAL; CREATE TABLE note (id INTEGER PRIMARY KEY, text BLOB)")
    return path


def image(served: ServedFile, at: str = "") -> bytes:
    with served.pulling("", at) as (_, _, numbers, revision):
        return b"".join(data for chunk in served.read(revision, numbers) for _, data in chunk)


def test_old_revisions_keep_pages_that_a_smaller_file_no_longer_has(file: Path) -> None:
    served = ServedFile(file)
    with closing(apsw.Connection(str(file))) as writer, closing(served):
        writer.executemany("INSERT INTO note VALUES (?, randomblob(3000))", ((number,) for number in range(50)))
        served.advance()
        name, before = served.revision, image(served)
        writer.execute("DELETE FROM note WHERE id > 2")
        writer.execute("VACUUM")
        served.advance()
        assert len(image(served)) < len(before)
        assert image(served, name) == before


def test_a_reader_and_checkpoints_of_other_programs_lose_no_page(file: Path) -> None:
    served = ServedFile(file)
    reader = apsw.Connection(str(file))
    with closing(apsw.Connection(str(file))) as writer, closing(served), closing(reader):
        kept = {served.revision: image(served)}
        for turn in range(40):
            if turn % 10 == 3:
                reader.execute("BEGIN")
                reader.execute("SELECT count(*) FROM note").fetchall()
            if turn % 10 == 8:
                reader.execute("COMMIT")
            writer.execute("INSERT INTO note VALUES (?, randomblob(9000))", (turn,))
            writer.execute("UPDATE note SET text = randomblob(100) WHERE id % 5 = ?", (turn % 5,))
            mode = ("PASSIVE", "RESTART", "TRUNCATE")[turn % 3]
            writer.execute(f"PRAGMA wal_checkpoint({mode})")
            if turn % 2:
                served.advance()
                with closing(apsw.Connection(str(file))) as now:
                    expected = now.serialize("main")
                got = image(served)
                assert got[:18] + got[20:] == expected[:18] + expected[20:]
                kept[served.revision] = got
        assert all(image(served, name) == data for name, data in kept.items())


def test_a_program_that_truncates_the_log_does_not_wait_for_the_server(file: Path) -> None:
    served = ServedFile(file)
    with closing(apsw.Connection(str(file))) as writer, closing(served):
        writer.execute("INSERT INTO note VALUES (1, 'a')")
        while served.has_news():
            served.advance()
        blocked = next(iter(writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")))[0]
        assert blocked  # the pin still reads from the log, and everything is written back now
        while served.has_news():
            served.advance()
        assert writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone() == (0, 0, 0)


def test_history_beyond_its_bound_is_not_given_and_changes_since_then_are(file: Path) -> None:
    served = ServedFile(file, history_bytes=40 * 4096)
    with closing(apsw.Connection(str(file))) as writer, closing(served):
        first = served.revision
        for number in range(60):
            writer.execute("INSERT INTO note VALUES (?, randomblob(5000))", (number,))
            served.advance()
        with pytest.raises(UnknownRevisionError):
            image(served, first)
        with served.pulling(first, "") as (_, pages, numbers, _):
            assert 0 < len(numbers) <= pages


def test_a_pull_that_takes_very_long_does_not_keep_the_history_for_ever(file: Path) -> None:
    served = ServedFile(file, history_bytes=40 * 4096)
    with closing(apsw.Connection(str(file))) as writer, closing(served):
        writer.execute("INSERT INTO note VALUES (0, zeroblob(100000))")
        served.advance()
        with served.pulling("", "") as (_, _, numbers, revision):
            for turn in range(30):
                writer.execute("UPDATE note SET text = randomblob(100000)")
                served.advance()
                if turn == 1:  # beyond the bound, and still complete
                    assert sum(len(chunk) for chunk in served.read(revision, numbers)) == len(numbers)
            with closing(apsw.Connection(f"{file}-sync")) as history:
                (count,) = next(history.execute("SELECT count(*) FROM old_page"))
            assert count <= 80
            with pytest.raises(UnknownRevisionError):
                list(served.read(revision, numbers))


def test_a_history_that_could_not_be_written_has_the_right_pages_later(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = ServedFile(file)

    def fail(*arguments: object) -> bool:
        raise apsw.FullError("the disk is full")

    with closing(apsw.Connection(str(file))) as writer, closing(served):
        writer.execute("INSERT INTO note VALUES (0, zeroblob(100000))")
        for begins_log in (False, True):
            served.advance()
            while begins_log and served.has_news():
                served.advance()
            name, before = served.revision, image(served)
            if begins_log:
                writer.execute("PRAGMA wal_checkpoint(RESTART)")
            with monkeypatch.context() as patch:
                patch.setattr(PageHistory, "record", fail)
                for _ in range(3):
                    writer.execute("UPDATE note SET text = randomblob(100000)")
                    with pytest.raises(apsw.FullError):
                        served.advance()
            assert served.advance()
            assert image(served) != before
            assert image(served, name) == before


def test_an_index_that_a_dying_writer_left_half_written_is_recovered(file: Path) -> None:
    served = ServedFile(file)
    with closing(apsw.Connection(str(file))) as writer, closing(served):
        writer.execute("INSERT INTO note VALUES (1, 'a')")
        index = os.open(f"{file}-shm", os.O_RDWR)  # closed last: closing it would release SQLite's locks
        os.pwrite(index, b"\x7f", 8)
        assert served.advance()
        writer.execute("INSERT INTO note VALUES (2, 'b')")
        assert served.advance()
        os.close(index)


def test_revisions_of_a_file_that_was_put_back_are_other_ones(file: Path, tmp_path: Path) -> None:
    ServedFile(file).close()
    saved = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    names = list[str]()
    for text in ("a", "b"):
        for path in tmp_path.iterdir():
            path.unlink()
        for path, data in saved.items():
            path.write_bytes(data)
        served = ServedFile(file)
        with closing(apsw.Connection(str(file))) as writer, closing(served):
            writer.execute("INSERT INTO note VALUES (1, ?)", (text,))
            served.advance()
            names.append(served.revision)
    assert names[0] != names[1]


def test_a_copy_of_a_replica_is_refused_before_its_changes_are_lost(file: Path, tmp_path: Path) -> None:
    original, copy = tmp_path / "original.db", tmp_path / "copy.db"
    tailrace.sync(original, file)
    copy.write_bytes(original.read_bytes())
    for replica in (original, copy):
        with closing(sqlite3.connect(replica, isolation_level=None)) as connection:
            connection.execute("INSERT INTO note VALUES (?, 'x')", (len(replica.name),))
    assert tailrace.sync(original, file).pushed == 1
    with pytest.raises(PreflightError, match="copy of another replica"):
        tailrace.sync(copy, file)


def test_a_push_that_arrives_after_its_changes_were_replayed_by_a_pull_is_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, late = tmp_path / "replica.db", list[Sequence[Step]]()
    tailrace.sync(replica, file)
    with closing(sqlite3.connect(replica, isolation_level=None)) as local:
        local.execute("INSERT INTO note VALUES (1, 'ours')")

    def lose(remote: FileRemote, steps: Sequence[Step]) -> None:
        late.append(steps)
        raise UnavailableError("the answer never came")

    with monkeypatch.context() as patch:
        patch.setattr(FileRemote, "push", lose)
        with pytest.raises(UnavailableError):
            tailrace.sync(replica, file)
    with closing(apsw.Connection(str(file))) as writer:
        writer.execute("INSERT INTO note VALUES (2, 'theirs')")
    pull, refused = FileRemote.pull, list[bool]()

    def deliver_late(remote: FileRemote, revision: str, image: Path) -> str | None:
        pulled = pull(remote, revision, image)
        try:
            FileRemote(file).push(late[0])
        except RefusedPushError:
            refused.append(True)
        return pulled

    monkeypatch.setattr(FileRemote, "pull", deliver_late)
    assert tailrace.sync(replica, file).pushed == 1
    assert refused == [True, True]


def test_a_file_as_remote_takes_many_changes_and_own_ddl_in_one_push(file: Path, tmp_path: Path) -> None:
    replica = tmp_path / "replica.db"
    tailrace.sync(replica, file)
    with closing(sqlite3.connect(replica, isolation_level=None)) as connection:
        connection.execute("CREATE INDEX by_text ON note (text)")
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO note VALUES (?, 'x')", ((number,) for number in range(25_000)))
        connection.execute("COMMIT")
    assert tailrace.sync(replica, file).pushed >= 25_000
    assert (tailrace.sync(replica, file).pushed, tailrace.sync(replica, file).pulled) == (0, 0)
    with closing(apsw.Connection(str(file))) as connection:
        assert connection.execute("SELECT count(*) FROM note").fetchone() == (25_000,)


@pytest.mark.parametrize(("policy", "kept"), [("local", "ours"), ("remote", "theirs"), (None, "both")])
def test_a_conflict_is_decided_by_its_policy_or_function(file: Path, tmp_path: Path, policy: str, kept: str) -> None:
    replica = tmp_path / "replica.db"
    with closing(apsw.Connection(str(file))) as remote:
        remote.execute("INSERT INTO note VALUES (1, 'a')")
        tailrace.sync(replica, file)
        remote.execute("UPDATE note SET text = 'theirs'")
    with closing(sqlite3.connect(replica, isolation_level=None)) as local:
        local.execute("UPDATE note SET text = 'ours'")
    with pytest.raises(Exception, match="conflicts with one of the remote"):
        tailrace.sync(replica, file, conflict="stop")
    decide = None if policy else (lambda conflict: {"text": "both"})
    assert tailrace.sync(replica, file, conflict=policy, on_conflict=decide).conflicts == {"update-update": 1}
    for path in (file, replica):
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("SELECT * FROM note").fetchall() == [(1, kept)]


def test_rows_with_a_null_key_are_told_apart_and_tables_without_rowid_are_refused(tmp_path: Path) -> None:
    remote, replica = tmp_path / "remote.db", tmp_path / "replica.db"
    with closing(apsw.Connection(str(remote))) as connection:
        connection.execute("CREATE TABLE w (a TEXT PRIMARY KEY, b)")
        connection.execute("INSERT INTO w VALUES (NULL, 1), (NULL, 2)")
        tailrace.sync(replica, remote)
        with closing(sqlite3.connect(replica, isolation_level=None)) as local:
            local.execute("UPDATE w SET b = 9 WHERE b = 1")
        tailrace.sync(replica, remote)
        assert sorted(connection.execute("SELECT b FROM w").fetchall()) == [(2,), (9,)]
        connection.execute("CREATE TABLE v (a TEXT PRIMARY KEY) WITHOUT ROWID")
    with pytest.raises(PreflightError, match="rowid"):
        tailrace.sync(tmp_path / "other.db", remote)


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_served_file_that_is_replaced_takes_no_push(file: Path, tmp_path: Path, *, is_removed: bool) -> None:
    served = ServedFile(file)
    with closing(served):
        served.has_news()
        if is_removed:
            file.unlink()
        else:
            (tmp_path / "other.db").touch()
            (tmp_path / "other.db").rename(file)
        for used in (served.has_news, lambda: served.push(encode_query("SELECT 1"))):
            with pytest.raises(UnavailableError, match="removed or replaced"):
                used()


def test_files_behind_links_are_served_and_synced(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "links"
    folder.mkdir()
    for name in ("served.db", "replica.db"):
        (folder / name).symlink_to(tmp_path / name)
    served = ServedFile(folder / "served.db")
    with closing(apsw.Connection(str(file))) as writer, closing(served):
        writer.execute("INSERT INTO note VALUES (1, 'a')")
        assert served.advance()
    assert tailrace.sync(folder / "replica.db", folder / "served.db").pulled == 1
    assert {path.name for path in folder.iterdir()} == {"served.db", "replica.db"}
    assert tailrace.sync(tmp_path / "replica.db", file).pulled == 0


def test_turso_cannot_open_a_served_file_whose_log_it_would_overwrite(file: Path, tmp_path: Path) -> None:
    script = (
        "import sys, turso\n"
        "connection = turso.connect(sys.argv[1], experimental_features='multiprocess_wal', isolation_level=None)\n"
        "connection.execute('INSERT INTO note VALUES (NULL, 1)')\n"
    )

    def write_with_turso() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", script, str(file)], stderr=subprocess.DEVNULL)

    assert write_with_turso().wait() == 0  # it ends without closing the file, and leaves the index of its log
    served = ServedFile(file)
    with closing(served), closing(apsw.Connection(str(file))) as writer:
        writer.execute("INSERT INTO note VALUES (NULL, 2)")
        waiting = write_with_turso()
        # Other programs of SQLite are not kept out, neither as a remote nor as a source.
        assert tailrace.sync(tmp_path / "replica.db", file).pulled == 2
        assert not turso_lock.is_shared(file)
        assert waiting.poll() != 0
        waiting.kill()
        waiting.wait()
        assert [text for (text,) in writer.execute("SELECT text FROM note")] == [1, 2]
    assert write_with_turso().wait() == 0
    with closing(apsw.Connection(str(file))) as reader:
        assert [text for (text,) in reader.execute("SELECT text FROM note")] == [1, 2, 1]


def test_a_file_that_turso_has_open_is_neither_served_nor_a_remote(file: Path, tmp_path: Path) -> None:
    with running(tmp_path / "app.db", "turso shared") as application:
        application.insert(1)
        with pytest.raises(UnavailableError, match="open in Turso"):
            ServedFile(tmp_path / "app.db")
        with pytest.raises(UnavailableError, match="open in Turso"):
            tailrace.sync(tmp_path / "replica.db", tmp_path / "app.db")
        assert application.insert(1) == 2
