"""A Delta table in an object store: commits of which exactly one wins, vectors, and answers that are lost."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.destination.delta.destination import DeltaDestination
from tailrace.destination.delta.option import Updates
from tailrace.errors import ConfigError, OwnedError, UnavailableError
from tailrace.model.schema import TableSchema
from tailrace.option.value import Secret
from tailrace.system import object_store
from tailrace.system.failpoint import VARIABLE, FailpointError
from tailrace.testing.destination import ITEMS, RowDict, changes_of, delete, insert, read, update
from tests.support.delta_table import forget_everything, queried, read_back, small_measures, snapshot_of
from tests.support.destination_writing import write
from tests.support.slatedb_bucket import BucketProcess, serving

ROWS = [insert(id=number, name=str(number), price=number) for number in range(20)]


@pytest.fixture(scope="module")
def server() -> Iterator[BucketProcess]:
    with serving() as process:
        yield process


@pytest.fixture
def bucket(
    server: BucketProcess, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Any:
    """The name of an empty bucket. What this machine stores for object stores is in a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget_everything()
    return f"b{abs(hash(request.node.name))}"


def lake(server: BucketProcess, bucket: str, updates: Updates = "merge_on_read", **more: str) -> DeltaDestination:
    options = {name: Secret(value) for name, value in {**server.options, **more}.items()}
    return DeltaDestination(path=f"s3://{bucket}/lake", storage_options=options, updates=updates)


def table_at(server: BucketProcess, bucket: str) -> DeltaTable:
    return DeltaTable(f"s3://{bucket}/lake/shop/items", storage_options=server.options)


def rows_at(server: BucketProcess, bucket: str) -> list[RowDict]:
    return sorted(queried(table_at(server, bucket)), key=lambda row: int(row["id"]))


@pytest.mark.parametrize("updates", ["copy_on_write", "merge_on_read"])
def test_a_table_in_an_object_store_takes_changes_and_is_read_by_others(
    server: BucketProcess, bucket: str, updates: Updates
) -> None:
    destination = lake(server, bucket, updates)
    with small_measures(file_rows=8):
        staged = destination.write_rows(ITEMS, changes_of(ITEMS, *(read(**one.row) for one in ROWS)))
        write(destination, 0, staged=[staged], begins_copy=True, completes_copy=True)
        for number in range(1, 5):
            write(destination, number, update(id=number, price=100), delete(id=number + 10))
            forget_everything()
        assert write(destination, 4, update(id=1, price=0)).repeated
        table_at(server, bucket).optimize.compact()
        write(destination, 5, update(id=1, price=5))
    expected = {number: number for number in range(20) if not 11 <= number <= 14} | dict.fromkeys(range(2, 5), 100)
    found = rows_at(server, bucket)
    assert {row["id"]: row["price"] for row in found} == expected | {1: 5}
    assert [row["name"] for row in found] == [str(row["id"]) for row in found]
    assert sorted(read_back(destination, ITEMS), key=lambda row: int(row["id"])) == found
    assert len(found) == 16
    assert snapshot_of(destination, ITEMS.table).has_vectors == (updates == "merge_on_read")


@pytest.mark.parametrize("version", [0, 1])
def test_a_commit_whose_answer_is_lost_is_found_to_be_ours(server: BucketProcess, bucket: str, version: int) -> None:
    destination = lake(server, bucket)
    for number in range(version):
        write(destination, number, *ROWS)
    server.lose_answer(f"_delta_log/{version:020}.json")
    write(destination, version, insert(id=50, name="x", price=1))
    assert write(destination, version, insert(id=50, name="never", price=1)).repeated
    assert snapshot_of(destination, ITEMS.table).version == version
    assert [row["name"] for row in rows_at(server, bucket) if row["id"] == 50] == ["x"]


def test_of_two_writers_one_commits_and_the_other_is_stopped(server: BucketProcess, bucket: str) -> None:
    destination = lake(server, bucket)
    write(destination, 0, *ROWS)

    def interrupt(table: TableSchema, keys: Any) -> Any:
        write(lake(server, bucket), 1, update(id=1, price=71))
        return replace(ITEMS).arrow.empty_table()

    with pytest.raises(OwnedError, match="another runner wrote batch 1"):
        write(destination, 1, update(id=1, price=72), update(id=99, price=1), refetch=interrupt)
    assert {row["id"]: row["price"] for row in rows_at(server, bucket)} == {n: n for n in range(20)} | {1: 71}
    assert len(rows_at(server, bucket)) == 20


def test_a_batch_is_computed_again_when_the_table_is_optimized_meanwhile(server: BucketProcess, bucket: str) -> None:
    destination = lake(server, bucket)
    with small_measures(file_rows=8):
        write(destination, 0, *ROWS)
        write(destination, 1, update(id=3, price=33))

        def interrupt(table: TableSchema, keys: Any) -> Any:
            if snapshot_of(destination, ITEMS.table).version == 1:
                table_at(server, bucket).optimize.compact()
            return ITEMS.arrow.empty_table()

        write(destination, 2, update(id=3, price=34), delete(id=4), update(id=99, price=1), refetch=interrupt)
    assert snapshot_of(destination, ITEMS.table).version == 3
    expected = {number: number for number in range(20) if number != 4} | {3: 34}
    assert [(row["id"], row["price"]) for row in rows_at(server, bucket)] == sorted(expected.items())


def test_a_batch_that_died_before_its_commit_is_written_by_the_next_process(
    server: BucketProcess, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = lake(server, bucket)
    write(destination, 0, *ROWS)
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, "delta.before_log_entry:raise")
        with pytest.raises(FailpointError):
            write(destination, 1, delete(id=1))
    forget_everything()
    assert len(rows_at(server, bucket)) == 20
    assert not write(destination, 1, delete(id=1)).repeated
    assert len(rows_at(server, bucket)) == 19


@pytest.mark.parametrize("updates", ["copy_on_write", "merge_on_read"])
def test_a_batch_into_a_table_takes_few_requests_and_lists_nothing(
    server: BucketProcess, bucket: str, updates: Updates
) -> None:
    destination = lake(server, bucket, updates)
    write(destination, 0, *(insert(id=number, name="n", price=number) for number in range(30_000)))
    before = server.requests()
    for number in range(1, 11):
        write(
            destination,
            number,
            update(id=17 * number, price=0),
            delete(id=number),
            insert(id=40_000 + number, name="n", price=1),
        )
        now = server.requests()
        done = {kind: now[kind] - before.get(kind, 0) for kind in now if now[kind] != before.get(kind, 0)}
        assert sum(done.values()) <= 5, done
        assert "LIST" not in done
        before = now
    forget_everything()
    assert len(rows_at(server, bucket)) == 30_000


_KEYS = st.integers(0, 12)
_BATCHES = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from(["upsert", "upsert", "delete"]), _KEYS), min_size=1, max_size=6),
        st.lists(st.sampled_from(["done"] * 5 + ["refused", "lost"]), max_size=25),
        st.sampled_from(["the same process", "another process"]),
        st.booleans(),
    ),
    min_size=2,
    max_size=6,
)


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(batches=_BATCHES, updates=st.sampled_from(["copy_on_write", "merge_on_read"]))
def test_refused_requests_and_lost_answers_lose_and_double_nothing(
    server: BucketProcess, monkeypatch: pytest.MonkeyPatch, batches: Any, updates: Updates
) -> None:
    bucket, expected = uuid.uuid4().hex, dict[int, int]()
    destination = lake(server, bucket, updates)
    with tempfile.TemporaryDirectory() as cache, monkeypatch.context() as patch, small_measures():
        patch.setenv("XDG_CACHE_HOME", cache)
        for number, (changes, fates, who, maintains) in enumerate(batches):
            rows = [
                update(id=key, name="n", price=number * 100 + at) if kind == "upsert" else delete(id=key)
                for at, (kind, key) in enumerate(changes)
            ]
            for at, (kind, key) in enumerate(changes):
                expected.pop(key, None)
                expected |= {key: number * 100 + at} if kind == "upsert" else {}
            server.plan(*fates)
            try:
                write(destination, number, *rows)
            except UnavailableError:
                server.plan()
                if who == "another process":
                    forget_everything()
                write(destination, number, *rows)
            server.plan()
            assert write(destination, number, *rows).repeated
            if maintains:
                server.plan(*fates[::-1])
                with suppress(UnavailableError, OSError, DeltaError):  # the next one does it
                    destination.maintain(ITEMS.table)
                server.plan()
        found = [(row["id"], row["price"]) for row in rows_at(server, bucket)]
        assert found == sorted(expected.items())
        commits = [one["tailrace.batch"] for one in table_at(server, bucket).history() if "tailrace.batch" in one]
        assert sorted(map(int, commits)) == list(range(len(batches)))


def test_options_of_delta_rs_alone_do_not_keep_a_commit_from_being_written(server: BucketProcess, bucket: str) -> None:
    more = {"AWS_S3_ALLOW_UNSAFE_RENAME": "false", "aws_force_credential_load": "false", "max_retries": "3"}
    write(lake(server, bucket, "auto", **more), 0, *ROWS)
    assert len(rows_at(server, bucket)) == 20


def test_keys_of_the_store_may_come_from_the_environment(
    server: BucketProcess, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {name: value for name, value in server.options.items() if not name.endswith(("_id", "_key"))}
    for name in ("access_key_id", "secret_access_key"):
        monkeypatch.setenv(f"AWS_{name.upper()}", server.options[name])
    object_store.put_new(f"s3://{bucket}/lake", options, "one", b"1")
    with pytest.raises(FileExistsError):
        object_store.put_new(f"s3://{bucket}/lake", options, "one", b"2")


def test_keys_and_region_may_come_from_a_profile_of_aws(
    server: BucketProcess, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = {"AWS_CONFIG_FILE": tmp_path / "config", "AWS_SHARED_CREDENTIALS_FILE": tmp_path / "credentials"}
    files["AWS_CONFIG_FILE"].write_text("[profile lake]\nregion = eu-west-1\n")
    files["AWS_SHARED_CREDENTIALS_FILE"].write_text("[lake]\naws_access_key_id = a\naws_secret_access_key = b\n")
    for name, path in files.items():
        monkeypatch.setenv(name, str(path))
    monkeypatch.setenv("AWS_PROFILE", "lake")
    options = {name: Secret(server.options[name]) for name in ("endpoint", "allow_http")}
    # delta-rs takes any endpoint for one of a store that is not Amazon's, and looks for no profile then.
    options["aws_force_credential_load"] = Secret("true")
    destination = DeltaDestination(path=f"s3://{bucket}/lake", storage_options=options, updates="merge_on_read")
    assert [finding.level for finding in destination.check(None)] == ["ok"]
    write(destination, 0, *ROWS)
    write(destination, 1, update(id=1, price=71))
    assert {row["id"]: row["price"] for row in rows_at(server, bucket)} == {n: n for n in range(20)} | {1: 71}
    monkeypatch.setenv("AWS_PROFILE", "another")
    object_store._open.cache_clear()
    with pytest.raises(ConfigError, match="AWS_PROFILE names another"):
        object_store.open_store(f"s3://{bucket}/lake", {})


def test_a_store_that_overwrites_what_is_there_is_refused_by_the_check(server: BucketProcess, bucket: str) -> None:
    assert [finding.level for finding in lake(server, bucket).check(None)] == ["ok"]
    server.ignore_conditions(True)
    try:
        (finding,) = lake(server, bucket).check(None)
    finally:
        server.ignore_conditions(False)
    assert finding.level == "error"
    assert "If-None-Match" in finding.message
    assert server.objects(bucket) == {}
