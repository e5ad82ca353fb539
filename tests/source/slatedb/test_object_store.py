"""Object stores that are not folders: a server, and what may be wrong with one."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.errors import ConfigError, UnavailableError
from tailrace.option.table import TableOptions
from tailrace.source.follower import Limit
from tailrace.source.slatedb.object_store import ObjectStore, SlateDbDatabase
from tailrace.source.slatedb.option import SlateDbOptions
from tailrace.source.slatedb.source import SlateDbSource
from tailrace.source.slatedb.wal import read_head
from tailrace.source.source import SourceContext
from tailrace.testing.replay import SourceReplay
from tests.support.slatedb_bucket import Buckets
from tests.support.slatedb_writing import Writer

LIMIT = Limit(10_000, 64_000_000)
TABLES = TableOptions.model_validate(
    {"settings": {"slatedb.counter": {"mapping": {"prefix": "c:", "key": "utf8", "value": "int64", "merge": "sum"}}}}
)


@pytest.fixture
def buckets() -> Iterator[Buckets]:
    with Buckets() as server:
        yield server


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.source.slatedb.object_store.ANSWER_SECONDS", 0.5)


@pytest.mark.parametrize("apart", [False, True])
def test_a_database_in_buckets_is_copied_and_followed(apart: bool, tmp_path: Path, buckets: Buckets) -> None:
    wal = buckets.store("wal") if apart else None
    with Writer(buckets.store("ledger"), TABLES, wal=wal) as writer:
        writer.write(*((b"copied%d" % number, b"v") for number in range(20)))
        writer.merge(b"c:a", struct.pack(">q", 1))
        writer.flush()
        with SourceReplay(source_of(buckets, tmp_path, apart), LIMIT) as replay:
            replay.catch_up()
            writer.write((b"copied1", None), (b"logged", b"v"))
            writer.merge(b"c:a", struct.pack(">q", 2))
            writer.fence()
            replay.catch_up()
            assert {key[0] for key in replay.tables["slatedb.db1"].rows} == {
                key for key in writer.rows() if not key.startswith(b"c:")
            }
            assert replay.tables["slatedb.counter"].rows[("a",)]["value"] == 3
    assert any(name.startswith("wal/db1/wal/") for name in buckets.objects) == apart


def source_of(buckets: Buckets, state: Path, apart: bool) -> SlateDbSource:
    """As the file makes it."""
    store = {"type": "s3", "bucket": "ledger", "options": buckets.options}
    wal = {"wal_store": {**store, "bucket": "wal"}} if apart else {}
    options = SlateDbOptions.model_validate({"type": "slatedb", "path": "db1", "store": store, "poll": "10ms", **wal})
    return SlateDbSource(options, SourceContext("buckets", TABLES, state))


@pytest.mark.usefixtures("impatient")
def test_an_outage_of_the_store_is_reported_in_time_and_survived(tmp_path: Path, buckets: Buckets) -> None:
    with Writer(buckets.store("ledger")) as writer:
        writer.put(b"before", b"")
        with SourceReplay(writer.source(tmp_path), LIMIT) as replay:
            replay.catch_up()
            writer.put(b"after", b"")
            buckets.down = True
            with pytest.raises(UnavailableError, match="did not answer"):
                replay.step()
            buckets.down = False
            replay.catch_up()
            assert sorted(key[0] for key in replay.tables["slatedb.db1"].rows) == [b"after", b"before"]


@pytest.mark.usefixtures("impatient")
def test_check_does_not_wait_for_a_store_that_is_out_of_reach(tmp_path: Path, buckets: Buckets) -> None:
    buckets.down = True
    [finding] = source_of(buckets, tmp_path, apart=False).check()
    assert (finding.level, finding.subject) == ("error", "database db1")
    assert "credentials" in str(finding.fix)


def test_an_endpoint_without_encryption_has_to_be_allowed() -> None:
    store = ObjectStore("s3", "ledger", {"endpoint": "http://127.0.0.1:1", "region": "eu-west-1"})
    with pytest.raises(ConfigError, match="plain http") as caught:
        store.open()
    assert 'allow_http: "true"' in str(caught.value.fix)


def test_an_option_that_is_wrong_is_named_and_its_value_is_not(buckets: Buckets) -> None:
    with pytest.raises(ConfigError, match="regoin"):
        read_head(SlateDbDatabase("db1", ObjectStore("s3", "ledger", {"regoin": "eu"})))
    with pytest.raises(ConfigError, match="boolean") as caught:
        read_head(SlateDbDatabase("db1", ObjectStore("s3", "ledger", {**buckets.options, "allow_http": "CANARY"})))
    assert "CANARY" not in str(caught.value)
    assert caught.value.__cause__ is None
    with pytest.raises(ConfigError, match=r'failed to parse "[*]+" as Duration'):
        read_head(SlateDbDatabase("db1", ObjectStore("s3", "ledger", {"region": "A", "connect_timeout": "CANARY"})))
