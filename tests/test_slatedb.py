"""The WAL of a real SlateDB, read by `tailrace.slatedb` and by `tailrace slatedb tail`."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tailrace.errors import ConfigError, LostError
from tailrace.slatedb import Cursor, WalReader, WalRow
from tailrace.testing.wait import wait_until
from tests.support.slatedb_bucket import Buckets
from tests.support.slatedb_writing import Writer

TAILRACE = str(Path(sys.executable).with_name("tailrace"))


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    with Writer(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def reader(tmp_path: Path, writer: Writer) -> WalReader:
    return WalReader("db1", store=tmp_path / "store")


def rows_of(reader: WalReader, cursor: Cursor | None = None) -> list[WalRow]:
    return [row for _, rows in reader.tail(cursor) for row in rows]


def test_files_come_in_order_with_their_rows_as_they_were_written(writer: Writer, reader: WalReader) -> None:
    writer.put(b"a", b"1", expire_after=3_600_000)
    writer.merge(b"a", b"2")
    writer.delete(b"a")
    files = reader.list()
    assert [file.id for file in files] == [1, 2, 3, 4]
    assert [file.id for file in reader.list(start=2, end=4)] == [2, 3]
    assert all(file.size_bytes and file.last_modified for file in files[1:])
    [fence, put, merge, delete] = [file.rows() for file in files]
    assert fence == []
    assert put is not None
    assert merge is not None
    [first] = put
    assert (first.key, first.kind, first.value, first.seq) == (b"a", "value", b"1", 1)
    assert first.create_ts is not None
    assert first.expire_ts == first.create_ts + 3_600_000
    assert [(row.kind, row.value, row.seq) for row in merge] == [("merge", b"2", 2)]
    assert delete is not None
    assert [(row.kind, row.value, row.seq) for row in delete] == [("tombstone", None, 3)]


def test_a_file_need_not_be_there_yet_or_any_more(writer: Writer, reader: WalReader) -> None:
    following = reader.get(2)
    assert following.rows() is None
    writer.put(b"a", b"1")
    rows = following.rows()
    assert rows is not None
    assert [row.key for row in rows] == [b"a"]
    writer.flush()
    writer.put(b"b", b"1")
    writer.flush()
    writer.collect()
    assert following.rows() is None


def test_a_cursor_skips_what_was_seen_and_nothing_else(writer: Writer, reader: WalReader) -> None:
    writer.write((b"a", b"1"), (b"b", b"1"))
    writer.put(b"c", b"1")
    assert [row.key for row in rows_of(reader)] == [b"a", b"b", b"c"]
    assert [row.key for row in rows_of(reader, Cursor(2, 1))] == [b"c"]
    assert [row.key for row in rows_of(reader, Cursor(2))] == [b"a", b"b", b"c"]
    file = reader.get(2)
    assert [row.key for row in Cursor(2, 0).unseen(file)] == [b"a", b"b"]
    cursor = Cursor().after(file)
    assert list(cursor.unseen(file)) == []
    assert Cursor.parse(str(cursor)) == cursor
    assert Cursor.parse("7") == Cursor(7, 0)
    with pytest.raises(ValueError, match="WAL_ID"):
        Cursor.parse("7:x")


def test_deleted_files_are_a_loss_unless_they_were_read(writer: Writer, reader: WalReader) -> None:
    for number in range(4):
        writer.put(b"%d" % number, b"")
    writer.fence()
    seen = reader.list()[-2]
    cursor = Cursor().after(seen)
    writer.flush()
    writer.put(b"5", b"")
    writer.flush()
    writer.collect()
    assert reader.list()[0].id > seen.id + 1
    # The numbers of the rows show that none is missing in between.
    assert [row.key for row in rows_of(reader, cursor)] == [b"5"]
    with pytest.raises(LostError, match="deleted WAL files after"):
        rows_of(reader, Cursor(2, 1))


def test_a_store_is_a_folder_a_url_or_what_a_pipeline_file_has(tmp_path: Path, writer: Writer) -> None:
    writer.put(b"a", b"")
    place = tmp_path / "store"
    for store in (str(place), place.as_uri(), {"type": "local", "path": str(place)}):
        assert [row.key for row in rows_of(WalReader("db1", store=store))] == [b"a"]
    for wrong in ("ftp://x", "s3://bucket/folder", {"type": "s3"}):
        with pytest.raises(ConfigError):
            WalReader("db1", store=wrong)


def test_following_lists_once_and_then_asks_for_each_file_by_its_id() -> None:
    with Buckets() as buckets:
        ledger, wal = buckets.store("ledger"), buckets.store("wal")
        with Writer(ledger, wal=wal) as writer:
            for key in (b"a", b"b", b"c"):
                writer.put(key, b"")
        [*_, last] = [name for name in sorted(buckets.objects) if "/wal/" in name and buckets.objects[name].body]
        kept = buckets.objects.pop(last)  # it appears later
        buckets.asked.clear()
        found: list[bytes] = []
        polls = 0

        def should_stop() -> bool:
            nonlocal polls
            polls += 1
            if polls == 20:
                buckets.objects[last] = kept
            return len(found) == 3

        for _, rows in WalReader("db1", ledger, wal).tail(follow=True, poll_seconds=0.01, should_stop=should_stop):
            found += [row.key for row in rows]
        assert found == [b"a", b"b", b"c"]
        assert len([path for path in buckets.asked if "list-type" in path and "wal%2F" in path]) == 1


def run_tail(*arguments: object) -> list[dict[str, Any]]:
    command = [TAILRACE, "slatedb", "tail", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_command_prints_each_row_once_and_goes_on_from_its_cursor(writer: Writer, tmp_path: Path) -> None:
    store, cursor = tmp_path / "store", tmp_path / "db1.cursor"
    writer.put(b"caf\xc3\xa9", b"\xff\x00")
    writer.put(b"\xfe", b"text")
    writer.delete(b"\xfe")
    found = run_tail(store, "db1", "--cursor", cursor)
    assert [list(row) for row in found] == [
        ["wal_id", "seq", "kind", "key", "value_b64", "create_ts", "expire_ts"],
        ["wal_id", "seq", "kind", "key_b64", "value", "create_ts", "expire_ts"],
        ["wal_id", "seq", "kind", "key_b64", "value", "create_ts", "expire_ts"],
    ]
    assert found[0]["key"] == "café"
    assert base64.b64decode(found[0]["value_b64"]) == b"\xff\x00"
    assert (found[1]["wal_id"], found[1]["seq"], found[1]["kind"]) == (3, 2, "value")
    assert (found[2]["kind"], found[2]["value"]) == ("tombstone", None)
    assert json.loads(cursor.read_text()) == {"wal_id": 4, "last_seq": 3}
    assert run_tail(store, "db1", "--cursor", cursor) == []
    writer.put(b"new", b"")
    assert [row["key"] for row in run_tail(store, "db1", "--cursor", cursor, "--from", "1")] == ["new"]
    assert [row["seq"] for row in run_tail(store, "db1", "--from", "3:2")] == [3, 4]


def test_the_command_follows_until_a_signal_and_keeps_its_cursor(writer: Writer, tmp_path: Path) -> None:
    cursor, output = tmp_path / "db1.cursor", tmp_path / "output"
    writer.put(b"a", b"")
    command = [TAILRACE, "slatedb", "tail", str(tmp_path / "store"), "db1", "--follow"]
    with output.open("wb") as file:
        process = subprocess.Popen([*command, "--cursor", str(cursor), "--poll", "0.05"], stdout=file)
        try:
            wait_until(lambda: output.read_text().count("\n") == 1)
            writer.put(b"b", b"")
            wait_until(lambda: output.read_text().count("\n") == 2)
            wait_until(lambda: json.loads(cursor.read_text())["last_seq"] == 2)
            process.terminate()
            assert process.wait() == 0
        finally:
            process.kill()
            process.wait()
    assert [json.loads(line)["key"] for line in output.read_text().splitlines()] == ["a", "b"]
