"""A copy that takes longer than SlateDB keeps its WAL, and what waiting for the next file costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.errors import LostError
from tailrace.source.follower import Limit
from tailrace.source.slatedb import follower
from tailrace.source.slatedb.source import SlateDbSource
from tailrace.source.slatedb.wal_archive import archived_numbers
from tailrace.testing.replay import SourceReplay
from tailrace.testing.wait import wait_until
from tests.support.slatedb_bucket import Buckets
from tests.support.slatedb_writing import Writer

LIMIT = Limit(10_000, 64_000_000)
TABLE = "slatedb.db1"


def write_and_collect(writer: Writer, source: SlateDbSource | None, first: int) -> None:
    """Rows whose WAL files are deleted once they are flushed and, with a source, in its buffer."""
    for number in range(first, first + 4):
        writer.put(b"k%d" % number, b"")
    if source is not None:
        newest = max(int(path.stem) for path in Path(writer.database.store.place, "db1", "wal").glob("*.sst"))
        wait_until(lambda: newest in archived_numbers(source.wal_buffer))
    writer.flush()
    writer.put(b"last", b"")
    writer.flush()
    writer.collect()


def keys(replay: SourceReplay) -> list[bytes]:
    return sorted(key[0] for key in replay.tables[TABLE].rows)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_copy_may_take_longer_than_slatedb_keeps_the_log(restarted: bool, tmp_path: Path) -> None:
    with Writer(tmp_path / "store") as writer:
        writer.put(b"copied", b"")
        writer.flush()
        source = writer.source(tmp_path / "state")
        with SourceReplay(source, LIMIT) as replay:
            assert replay.step()  # the copy; the log since then is still to be read
            write_and_collect(writer, source, 0)
            if restarted:
                replay.crash()
            replay.catch_up()
            assert keys(replay) == [b"copied", b"k0", b"k1", b"k2", b"k3", b"last"]
            replay.step()
            assert archived_numbers(source.wal_buffer) == []
            assert replay.offset is not None
            assert replay.offset["tables"][TABLE]["copy"] == 1


def test_a_full_buffer_loses_nothing_silently(tmp_path: Path) -> None:
    with Writer(tmp_path / "store") as writer:
        writer.put(b"copied", b"")
        writer.flush()
        source = writer.source(tmp_path / "state", copy_buffer=1)
        with SourceReplay(source, LIMIT) as replay:
            assert replay.step()
            writer.put(b"fills", b"")
            wait_until(lambda: bool(archived_numbers(source.wal_buffer)))
            write_and_collect(writer, None, 0)
            with pytest.raises(LostError, match="only a new snapshot helps"):
                wait_until(lambda: not replay.step() and False)


def test_a_copy_that_lost_its_log_waits_longer_each_time_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.source.slatedb.wal_tail.LOOK_SECONDS", 0.0)
    with Writer(tmp_path / "store") as writer:
        writer.put(b"copied", b"")
        writer.flush()
        source = writer.source(tmp_path / "state", copy_buffer=0, on_collected="resnapshot")
        with SourceReplay(source, LIMIT) as replay:
            assert replay.step()
            write_and_collect(writer, None, 0)

            def lost() -> bool:
                replay.step()
                assert replay.offset is not None
                return bool(replay.offset["tables"][TABLE]["phase"] == "init")

            wait_until(lost)
            wait_until(lambda: "the copy of slatedb.db1 needed, 1 times" in (_status(replay, source) or ""))
            assert "copy_buffer" in (source.status().fix or "")
            assert replay.offset is not None
            assert replay.offset["copies"] == 1  # it does not begin again at once
            delays = [follower.COPY_RETRIES.delay(failures) for failures in (1, 2, 3)]
            assert delays == sorted(set(delays))
            monkeypatch.setattr("tailrace.source.slatedb.follower.CopyAttempt.seconds_left", 0.0)
            replay.catch_up()
            assert keys(replay) == [b"copied", b"k0", b"k1", b"k2", b"k3", b"last"]


def _status(replay: SourceReplay, source: SlateDbSource) -> str | None:
    replay.step()
    return source.status().error


def test_kept_files_before_a_gap_stay_where_they_are(tmp_path: Path) -> None:
    with Writer(tmp_path / "store") as writer:
        writer.put(b"a", b"")
        source = writer.source(tmp_path / "state", keep_wal=tmp_path / "kept", on_collected="resnapshot")
        assert source.keep_wal is not None
        with SourceReplay(source, LIMIT) as replay:
            replay.catch_up()
            replay.follower.stop()  # nothing is copied while the pipeline is down
            before = archived_numbers(source.keep_wal)
            write_and_collect(writer, None, 0)
            replay.crash()
            wait_until(lambda: replay.step() and replay.offset is not None and replay.offset["copies"] == 2)
            assert set(before) <= set(archived_numbers(source.keep_wal))
            replay.catch_up()
            writer.put(b"after", b"")
            replay.catch_up()
            assert keys(replay) == [b"a", b"after", b"k0", b"k1", b"k2", b"k3", b"last"]


def test_waiting_for_the_next_file_costs_one_request(tmp_path: Path) -> None:
    with Buckets() as buckets, Writer(buckets.store("ledger"), manifest_poll_interval='"1h"') as writer:
        writer.put(b"a", b"")
        with SourceReplay(writer.source(tmp_path, poll=1e-9), LIMIT) as replay:
            replay.catch_up()
            replay.step()
            asked = [path for path in _asked_for(buckets, replay, 20) if "/wal/" in path]
            assert len(asked) <= 20 + 11  # one each time; in between SlateDB itself may be asked once
            writer.put(b"b", b"")
            replay.catch_up()
            assert keys(replay) == [b"a", b"b"]


def _asked_for(buckets: Buckets, replay: SourceReplay, times: int) -> list[str]:
    buckets.asked.clear()
    for _ in range(times):
        assert not replay.step()
    return list(buckets.asked)
