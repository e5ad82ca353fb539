"""The log of a real SlateDB under everything that may happen to it."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tailrace.errors import LostError, StaleCopyError, TableError
from tailrace.option.table import TableOptions
from tailrace.source.follower import Limit, TableDirectives
from tailrace.source.schema_file import follow_alone
from tailrace.source.slatedb import follower
from tailrace.source.slatedb.expiry_index import ExpiryIndex
from tailrace.source.slatedb.log_split import ExpirySplit, WalSplit
from tailrace.source.slatedb.object_store import ObjectStore, SlateDbDatabase, binding, run
from tailrace.source.slatedb.option import SlateDbOptions
from tailrace.source.slatedb.source import SlateDbSource
from tailrace.source.slatedb.wal_archive import archived_numbers
from tailrace.source.source import PIPELINE, SourceContext
from tailrace.testing.replay import SourceReplay
from tailrace.testing.wait import wait_until
from tests.support.slatedb_writing import Writer
from tests.support.source_making import make_slatedb

LIMIT = Limit(10_000, 64_000_000)
TABLE = "slatedb.db1"
HOUR_MILLIS = 3_600_000


def keys(replay: SourceReplay) -> list[bytes]:
    return sorted(key[0] for key in replay.tables[TABLE].rows)


def levels(source: SlateDbSource) -> dict[str, str]:
    return {finding.subject: finding.level for finding in source.check()}


def test_a_log_that_goes_on_is_followed_over_crashed_and_fenced_writers(tmp_path: Path) -> None:
    with Writer(tmp_path / "store") as writer, SourceReplay(writer.source(tmp_path / "state"), LIMIT) as replay:
        for number in range(3):
            writer.put(b"k%d" % number, b"v")
            writer.fence()
            replay.catch_up()
        assert keys(replay) == [b"k0", b"k1", b"k2"]
        assert replay.offset is not None
        fenced = replay.offset["wal"]
        writer.fence()
        replay.catch_up()
        assert replay.offset["wal"] == fenced + 1


def test_a_batch_ends_at_a_file_near_its_limit(tmp_path: Path) -> None:
    with (
        Writer(tmp_path / "store") as writer,
        SourceReplay(writer.source(tmp_path / "state"), Limit(3, 1 << 30)) as replay,
    ):
        replay.catch_up()
        for number in range(12):
            writer.put(b"%d" % number, b"v")
        batches = 0
        while replay.step():
            batches += 1
        assert len(replay.tables[TABLE].rows) == 12
        assert batches >= 4


def test_every_write_of_a_batch_has_its_position(tmp_path: Path) -> None:
    with Writer(tmp_path / "store") as writer, SourceReplay(writer.source(tmp_path / "state"), LIMIT) as replay:
        replay.catch_up()
        writer.write((b"b", b"1"), (b"a", b"1"), (b"b", b"2"))
        writer.put(b"c", b"1")
        replay.plan()
        assert replay.offset is not None
        assert replay.planned is not None
        changes = [
            (change["row"]["key"], change["row"]["value"], change["commit"], change["ordinal"])
            for split in replay.follower.plan(replay.offset, replay.planned)
            for chunk in replay.source.read(split)
            for change in chunk.batch.to_pylist()
        ]
        assert changes == [(b"a", b"1", 1, 0), (b"b", b"2", 1, 2), (b"c", b"1", 2, 0)]


def test_a_collected_file_stops_with_the_way_out(tmp_path: Path) -> None:
    with Writer(tmp_path / "store") as writer, SourceReplay(writer.source(tmp_path / "state"), LIMIT) as replay:
        replay.catch_up()
        lose_files(writer)
        with pytest.raises(LostError, match="only a new snapshot helps") as caught:
            wait_until(replay.step)
        assert f"re-snapshot: tailrace resync FILE {TABLE}" in str(caught.value.fix)
        replay.directives = TableDirectives(resync={TABLE: 1})
        replay.catch_up()
        assert keys(replay) == [b"lost0", b"lost1", b"lost2", b"lost3"]


def test_a_collected_file_is_answered_with_a_new_copy_where_that_is_configured(tmp_path: Path) -> None:
    with Writer(tmp_path / "store") as writer:
        writer.put(b"gone", b"")
        source = writer.source(tmp_path / "state", on_collected="resnapshot")
        with SourceReplay(source, LIMIT) as replay:
            replay.catch_up()
            writer.delete(b"gone")
            lose_files(writer)
            replay.catch_up()
            assert keys(replay) == [b"lost0", b"lost1", b"lost2", b"lost3"]


@pytest.mark.parametrize(("policy", "kind"), [("stop", TableError), ("resnapshot", StaleCopyError)])
def test_a_file_that_is_collected_after_it_was_planned_concerns_its_tables(
    policy: str, kind: type[TableError], tmp_path: Path
) -> None:
    with Writer(tmp_path / "store") as writer:
        source = writer.source(tmp_path / "state", on_collected=policy)
        with SourceReplay(source, LIMIT) as replay:
            replay.catch_up()
            writer.put(b"a", b"")
            writer.put(b"b", b"")
            assert replay.plan()
            lose_files(writer)
            assert replay.offset is not None
            assert replay.planned is not None
            [split] = replay.follower.plan(replay.offset, replay.planned)[:1]
            with pytest.raises(kind) as caught:
                list(source.read(split))
            assert caught.value.table == TABLE


def lose_files(writer: Writer) -> None:
    for number in range(4):
        writer.put(b"lost%d" % number, b"")
    writer.flush()
    writer.put(b"lost3", b"")
    writer.flush()
    writer.collect()


def test_kept_files_are_read_though_slatedb_has_collected_them(tmp_path: Path) -> None:
    with Writer(tmp_path / "store") as writer:
        source = writer.source(tmp_path / "state", keep_wal=(tmp_path / "kept"))
        with SourceReplay(source, LIMIT) as replay:
            replay.catch_up()
            kept = source.keep_wal
            assert kept is not None
            before = max(archived_numbers(kept))
            for number in range(4):
                writer.put(b"%d" % number, b"")
            wait_until(lambda: max(archived_numbers(kept)) >= before + 4)
            writer.flush()
            writer.put(b"4", b"")
            writer.flush()
            writer.collect()
            replay.catch_up()
            assert keys(replay) == [b"0", b"1", b"2", b"3", b"4"]
            assert len(archived_numbers(kept)) == 1


def test_rows_leave_when_they_expire_and_stay_when_they_were_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Writer(tmp_path / "store") as writer:
        writer.put(b"copied", b"", expire_after=HOUR_MILLIS)
        writer.flush()
        source = writer.source(tmp_path / "state")
        with SourceReplay(source, LIMIT) as replay:
            replay.catch_up()
            writer.put(b"short", b"", expire_after=HOUR_MILLIS)
            writer.put(b"again", b"", expire_after=HOUR_MILLIS)
            writer.put(b"again", b"for good")
            writer.put(b"long", b"", expire_after=24 * HOUR_MILLIS)
            replay.catch_up()
            assert keys(replay) == [b"again", b"copied", b"long", b"short"]
            replay.crash()
            later = follower.read_clock() + 2 * HOUR_MILLIS
            monkeypatch.setattr(follower, "read_clock", lambda: later)
            wait_until(lambda: not replay.step() and keys(replay) == [b"again", b"long"])
            assert replay.tables[TABLE].rows[(b"again",)]["value"] == b"for good"


def test_a_row_that_is_read_after_its_time_never_arrives(tmp_path: Path) -> None:
    with Writer(tmp_path / "store") as writer, SourceReplay(writer.source(tmp_path / "state"), LIMIT) as replay:
        writer.put(b"k", b"before")
        replay.catch_up()
        writer.put(b"k", b"after", expire_after=1)
        time.sleep(0.01)
        replay.catch_up()
        assert keys(replay) == []


def test_keys_that_were_written_and_expire_together_leave_at_places_of_their_own(tmp_path: Path) -> None:
    with Writer(tmp_path / "store") as writer:
        source = writer.source(tmp_path / "state")
        [table] = source.tables()
        index = ExpiryIndex(source.expiry_folder, TABLE)
        gone = pa.array([b"%d" % number for number in range(50)], pa.binary())
        index.note("wal-1-1", pa.array([9] * 50, pa.int64()), gone, pa.array([7] * 50, pa.int64()))
        split = ExpirySplit(table=table, since=0, clock=10)
        [left], [again] = (list(source.read(split)) for _ in range(2))
        places = list(zip(left.numpy("commit"), left.numpy("ordinal"), strict=True))
        assert len(set(places)) == 50
        assert places == sorted(places)
        assert sorted(left.row.field("key").to_pylist()) == sorted(gone.to_pylist())
        assert again.batch.equals(left.batch)


def test_the_expiry_index_forgets_and_stays_small(tmp_path: Path) -> None:
    index = ExpiryIndex(tmp_path, "slatedb.db1")
    for batch in range(100):
        times = pa.array([1000 + batch, 5000 + batch], pa.int64())
        index.note(
            f"wal-{batch}", times, pa.array([b"a%d" % batch, b"b"], pa.binary()), pa.array([batch, batch], pa.int64())
        )
        index.tidy(1000 + batch - 50)
    assert len(list(index.folder.glob("*.arrow"))) < 25
    assert not index.is_due(1099, 4999)
    assert index.is_due(1099, 5000)
    assert index.between(1050, 1060).column("key").to_pylist() == [b"a%d" % batch for batch in range(51, 61)]
    assert index.between(0, 9999).to_pylist()[-1] in ({"key": b"b", "seq_max": 99}, {"key": b"a99", "seq_max": 99})
    index.tidy(9999)
    assert not list(index.folder.glob("*.arrow"))


def test_partitions_share_the_keys_without_overlap(tmp_path: Path) -> None:
    options = {"type": "slatedb", "path": "db1", "store": {"type": "local", "path": str(tmp_path / "store")}}
    with Writer(tmp_path / "store") as writer:
        writer.write(*((b"copied%d" % number, b"") for number in range(50)))
        writer.flush()
        found: list[bytes] = []
        for index in range(3):
            given = SlateDbOptions.model_validate({**options, "partition": {"of": 3, "index": index}})
            source = SlateDbSource(given, SourceContext(f"part{index}", TableOptions(), tmp_path / f"state{index}"))
            with SourceReplay(source, LIMIT) as replay:
                replay.catch_up()
                if index == 0:
                    writer.write(*((b"logged%d" % number, b"") for number in range(50)))
                replay.catch_up()
                assert 10 < len(keys(replay)) < 60
                found += keys(replay)
    assert sorted(found) == sorted(writer_keys(50))


def writer_keys(count: int) -> list[bytes]:
    return [b"%s%d" % (kind, number) for kind in (b"copied", b"logged") for number in range(count)]


def test_a_database_without_wal_is_refused(tmp_path: Path) -> None:
    with Writer(tmp_path / "store", wal_enabled="false") as writer:
        source = writer.source(tmp_path / "state")
        writer.run(writer._db.put(b"k", b"v"))
        writer.flush()
        [finding] = [one for one in source.check() if one.level == "error"]
        assert "wal_enabled=false" in finding.message


@pytest.mark.parametrize("keep", [False, True])
def test_rows_that_bypass_the_log_of_a_running_pipeline_are_noticed(
    keep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.source.slatedb.follower.BYPASS_SECONDS", 0.0)
    options: dict[str, Any] = {"keep_wal": tmp_path / "kept"} if keep else {}
    with (
        Writer(tmp_path / "store") as writer,
        SourceReplay(writer.source(tmp_path / "state", **options), LIMIT) as replay,
    ):
        writer.put(b"k", b"v")
        writer.flush()
        replay.catch_up()
        writer._settings["wal_enabled"] = "false"
        writer.fence()
        replay.catch_up()
        writer.run(writer._db.put(b"unseen", b"v"))
        writer.flush()
        with pytest.raises(LostError, match="wal_enabled=false"):
            wait_until(replay.step)


def test_a_database_that_is_not_there_is_an_error_of_check(tmp_path: Path) -> None:
    source = make_slatedb({"type": "local", "path": tmp_path}, tmp_path / "s")
    assert levels(source) == {"database db1": "error"}


def test_a_recreated_database_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    with Writer(tmp_path / "old") as writer, SourceReplay(writer.source(tmp_path / "state"), LIMIT) as replay:
        for number in range(5):
            writer.put(b"%d" % number, b"")
        replay.catch_up()
        replay.crash()
        with Writer(tmp_path / "new") as other:
            replay.source = other.source(tmp_path / "state")
            with pytest.raises(LostError, match="another database"):
                replay.step()
            replay.crash()


def test_the_age_of_unread_files_is_warned_about(tmp_path: Path) -> None:
    with Writer(tmp_path / "store") as writer:
        source = writer.source(tmp_path / "state", min_age=0.4)
        with SourceReplay(source, Limit(1, 1 << 30)) as replay:
            replay.catch_up()
            assert source.status().error is None
            for number in range(5):
                writer.put(b"%d" % number, b"")
            time.sleep(0.3)
            replay.crash()
            replay.step()
            assert "may delete it" in (source.status().error or "")
            assert "keep_wal" in (source.status().fix or "")
            assert levels(source)["WAL retention"] == "warning"


def test_a_fence_file_does_not_hide_the_age_of_unread_files(tmp_path: Path) -> None:
    with Writer(tmp_path / "store") as writer:
        source = writer.source(tmp_path / "state", min_age=0.4)
        with SourceReplay(source, LIMIT) as replay:
            replay.catch_up()
            writer.fence()
            writer.put(b"unread", b"")
            time.sleep(0.3)
            replay.crash()
            replay.step()
            assert "may delete it" in (source.status().error or "")


def test_a_stopped_table_continues_after_its_last_position(tmp_path: Path) -> None:
    with Writer(tmp_path / "store") as writer, SourceReplay(writer.source(tmp_path / "state"), LIMIT) as replay:
        writer.put(b"a", b"1")
        replay.catch_up()
        assert replay.offset is not None
        [standing] = replay.source.progress(replay.offset)
        for number in range(6):
            writer.put(b"b%d" % number, b"")
            assert replay.plan()
            replay.commit()  # these batches fail for the table: nothing of them is written
        replay.directives = TableDirectives(stopped={TABLE: str(standing.position)})
        assert replay.step()
        assert [one.phase for one in replay.source.progress(replay.offset)] == ["stopped"]
        replay.directives = TableDirectives()
        replay.catch_up()
        assert keys(replay) == [b"a", *(b"b%d" % number for number in range(6))]


def test_a_paused_table_waits_and_goes_on(tmp_path: Path) -> None:
    with Writer(tmp_path / "store") as writer, SourceReplay(writer.source(tmp_path / "state"), LIMIT) as replay:
        writer.put(b"a", b"1")
        replay.catch_up()
        replay.directives = TableDirectives(paused=[TABLE])
        replay.step()
        writer.put(b"b", b"")
        assert not replay.step()
        replay.directives = TableDirectives()
        replay.catch_up()
        assert keys(replay) == [b"a", b"b"]


def test_files_between_a_lagging_table_and_the_others_are_not_read(tmp_path: Path) -> None:
    tables = TableOptions.model_validate({"settings": {"slatedb.text": {"mapping": {"prefix": "t:"}}}})
    with (
        Writer(tmp_path / "store", tables) as writer,
        SourceReplay(writer.source(tmp_path / "state", tables), Limit(8, 1 << 30)) as replay,
    ):
        writer.write((b"a", b""), (b"t:a", b""))
        replay.catch_up()
        replay.directives = TableDirectives(paused=["slatedb.text"])
        replay.step()
        for number in range(40):
            writer.put(b"%d" % number, b"")
        while len(replay.tables[TABLE].rows) < 41:
            replay.step()
        replay.directives = TableDirectives()
        writer.write((b"b", b""), (b"t:b", b""))
        assert replay.plan()
        assert replay.offset is not None
        assert replay.planned is not None
        splits = [one for one in replay.follower.plan(replay.offset, replay.planned) if isinstance(one, WalSplit)]
        assert all(split.ranges for split in splits)
        files = [number for split in splits for number in range(split.first, split.last + 1)]
        wanted = {one for split in splits for one in split.ranges.values()}
        assert len(wanted) == 2
        assert files == [n for n in range(99) if any(one.after.wal < n <= one.upto.wal for one in wanted)]
        replay.catch_up()
        assert sorted(replay.tables["slatedb.text"].rows) == [(b"a",), (b"b",)]
        assert len(keys(replay)) == 42


def test_a_large_table_is_copied_in_ranges_and_a_crash_goes_on_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.source.slatedb.follower._RANGE_BYTES", 1000)
    monkeypatch.setattr("tailrace.source.slatedb.follower._RANGES_PER_BATCH", 1)
    with Writer(tmp_path / "store") as writer:
        for part in range(6):
            writer.write(*((b"%d-%d" % (part, number), b"v" * 50) for number in range(50)))
            writer.flush()
        source = writer.source(tmp_path / "state")
        with SourceReplay(source, LIMIT) as replay:
            batches = 0
            while not replay.tables:
                replay.step()
                replay.crash()
                writer.put(b"2-%d" % batches, b"changed")
                batches += 1
            assert batches >= 5
            replay.catch_up()
            assert {key[0]: row["value"] for key, row in replay.tables[TABLE].rows.items()} == {
                key: value for key, (_, value, _, _) in writer.rows().items()
            }


def test_a_source_travels_and_shows_no_credentials(tmp_path: Path) -> None:
    options = SlateDbOptions.model_validate(
        {
            "type": "slatedb",
            "path": "db1",
            "store": {"type": "s3", "bucket": "b", "options": {"secret_access_key": "CANARY", "region": "eu-west-1"}},
            "wal_store": {"type": "memory", "name": "wal"},
        }
    )
    source = SlateDbSource(options, SourceContext("s", TableOptions(), tmp_path))
    assert "CANARY" not in repr(source)
    assert "CANARY" not in options.model_dump_json()
    assert pickle.loads(pickle.dumps(source)) == source
    assert source.database.store.options["secret_access_key"] == "CANARY"


def test_a_store_in_memory_is_the_same_for_everyone_in_the_process(tmp_path: Path) -> None:
    database = SlateDbDatabase("db1", ObjectStore("memory", f"of {tmp_path}"))

    async def write() -> None:
        db = await binding().DbBuilder("db1", database.store.open()).build()
        handle = await db.put(b"k", b"v")
        await handle.await_durable()
        await db.shutdown()

    run(write(), "writing")
    source = make_slatedb({"type": "memory", "name": f"of {tmp_path}"}, tmp_path)
    with SourceReplay(source, LIMIT) as replay:
        replay.catch_up()
        assert keys(replay) == [b"k"]


def test_a_reader_of_one_table_has_a_place_of_its_own(tmp_path: Path) -> None:
    tables = TableOptions.model_validate({"settings": {"slatedb.t": {"mapping": {"prefix": "t:"}}}})
    with Writer(tmp_path / "store", tables) as writer:
        source = writer.source(tmp_path / "state", tables).for_reader("other", "slatedb.t")
        assert [str(table.table) for table in source.tables()] == ["slatedb.t"]
        assert source.expiry_folder != source.for_reader(PIPELINE).expiry_folder
        follower = follow_alone(source)
        follower.stop()
        source.reset()
        source.reset()
