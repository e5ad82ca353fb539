"""A change that cannot be read, and tables that are paused: only they wait, and all of it by command.

One run for all of these tests; every test leaves the tables as equal as it found them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tailrace.config.pipeline import load
from tailrace.demo.server import EmbeddedPostgres
from tailrace.model.schema import TableName
from tailrace.state import DeadLetter, SqliteStore, TableState
from tailrace.testing.wait import wait_until
from tests.support.database import PostgresDatabase
from tests.support.invocation import invoke
from tests.support.postgres_to_delta import Following
from tests.support.scenario import Scenario

pytestmark = pytest.mark.xdist_group("poison")

CANARY = "c4naryRow"
# A database of this encoding takes any bytes for text, and a destination that keeps text as UTF-8 does not.
POISON = f"'{CANARY}' || convert_from('\\xc3', 'SQL_ASCII')"
BAD, WIDE = "public.bad", TableName("public", "wide")
WIDE_ROWS = 12_000
TABLES = [
    "CREATE TABLE bad (id int PRIMARY KEY, v text)",
    "CREATE TABLE good (id int PRIMARY KEY, v text)",
    "CREATE TABLE bag (v int)",
    "INSERT INTO bad VALUES (1, 'copied')",
]


@pytest.fixture(scope="module")
def following(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Following]:
    """A pipeline that runs and has copied everything, from a database whose texts may be any bytes."""
    with postgres.connect() as session:
        session.execute("CREATE DATABASE poison ENCODING 'SQL_ASCII' TEMPLATE template0 LOCALE 'C'")
    database = PostgresDatabase(postgres, "poison")
    try:
        scenario = Scenario(
            tmp_path_factory.mktemp("poison"),
            database.dsn,
            name="poison",
            tables={"settings": {BAD: {"errors": {"attempts": 2, "backoff": "100ms"}}}},
            source={"copy": {"chunk_bytes": "1 MB"}},
            batch={"max_bytes": "1 MB"},
        ).prepare()
        scenario.sql(*TABLES)
        with Following(scenario) as running:
            running.catch_up()
            yield running
            said = running.run.log_file.read_text(errors="replace")
            assert CANARY not in said, "a row's value was logged"
    finally:
        database.drop()


def ask(following: Following, *words: str) -> str:
    """`tailrace WORDS`, with FILE for the pipeline's file; what it printed."""
    done = invoke(*(following.scenario.file if word == "FILE" else word for word in words))
    assert done.exit_code == 0, done.output
    assert CANARY not in done.output
    return done.stdout


def ask_json(following: Following, *words: str) -> Any:
    return json.loads(ask(following, *words, "--json"))


def letters(following: Following) -> list[DeadLetter]:
    with SqliteStore("shop", following.scenario.state).open_reading() as store:
        return store.dead_letters(BAD)


def wait_until_tried(following: Following, times: int) -> DeadLetter:
    """The last change that could not be read, once its table was tried so often and waits for a command."""
    oid = following.oid("bad")
    following.wait_for(
        oid, lambda bad: bad.state is TableState.ERRORED and bad.retry == "manual" and bad.attempts >= times
    )
    return letters(following)[-1]


def bad_ids(following: Following) -> set[int]:
    return set(following.lake("bad"))


def test_only_the_table_of_a_change_that_cannot_be_read_waits_and_goes_on_without_it_after_a_skip(
    following: Following, tmp_path: Path
) -> None:
    following.sql(
        f"INSERT INTO bad VALUES (2, 'before'); INSERT INTO bad VALUES (3, {POISON}); INSERT INTO good VALUES (1, 'x')",
        "INSERT INTO bad VALUES (4, 'after it')",
        "INSERT INTO good VALUES (2, 'y')",
    )
    letter = wait_until_tried(following, 2)
    following.catch_up(without=(BAD,))
    following.require_same(without=(BAD,))
    assert bad_ids(following) == {1}

    record = following.records()[following.oid("bad")]
    assert "column v holds text that is not UTF-8" in (record.reason or "")
    assert record.resume is not None
    assert record.resume < letter.position
    assert (letter.status, letter.tries, letter.kind) == ("waiting", 2, "UnfitError")
    assert letter.raw is not None
    assert CANARY.encode() + b"\xc3" in letter.raw
    (listed,) = ask_json(following, "errors", "list", "FILE")["errors"]
    assert (listed["id"], listed["table"], listed["position"]) == (letter.id, BAD, letter.position)
    ask(following, "errors", "show", "FILE", str(letter.id), "--raw", str(tmp_path / "change"))
    assert (tmp_path / "change").read_bytes() == letter.raw
    (bad,) = (table for table in ask_json(following, "status", "FILE")["tables"] if table["name"] == BAD)
    assert (bad["state"], bad["letters"], bad["retry"], bad["attempts"]) == ("Errored", 1, "manual", 2)
    assert BAD in ask(following, "tables", "FILE")

    ask(following, "errors", "retry", "FILE", str(letter.id))
    assert wait_until_tried(following, 3).tries == 3

    ask(following, "skip", "FILE", BAD)
    following.catch_up()
    assert bad_ids(following) == {1, 2, 4}
    assert [(one.id, one.status) for one in letters(following)] == [(letter.id, "skipped")]
    following.sql("UPDATE bad SET v = 'fixed' WHERE id = 3")
    following.catch_up()
    following.require_same()


def test_several_changes_that_cannot_be_read_are_skipped_one_after_the_other(following: Following) -> None:
    following.sql(
        f"BEGIN; INSERT INTO bad VALUES (11, 'a'), (12, {POISON}), (13, 'b');"
        f" UPDATE bad SET v = {POISON} WHERE id = 11; UPDATE bad SET v = 'fixed' WHERE id IN (11, 12); COMMIT"
    )
    first = wait_until_tried(following, 2)
    ask(following, "errors", "skip", "FILE", str(first.id))
    following.wait_for(following.oid("bad"), lambda _: letters(following)[-1].id != first.id)
    second = wait_until_tried(following, 2)
    assert second.position > first.position
    ask(following, "errors", "skip", "FILE", str(second.id))
    following.catch_up()
    following.require_same()


def test_a_resync_makes_a_table_whole_again_once_its_value_is_fixed(following: Following) -> None:
    following.sql(f"INSERT INTO bad VALUES (21, {POISON})", "INSERT INTO bad VALUES (22, 'after it')")
    letter = wait_until_tried(following, 2)
    following.sql("UPDATE bad SET v = 'fixed' WHERE id = 21")
    ask(following, "resync", "FILE", BAD)
    following.catch_up()
    following.require_same()
    assert letter.id not in [one.id for one in letters(following)]


def test_a_paused_table_stays_where_it_is_and_catches_up_when_it_is_resumed(following: Following) -> None:
    before = following.records()
    for table in ("public.good", "public.bag"):
        ask(following, "pause", "FILE", table)
    for table in ("good", "bag"):
        following.wait_for(following.oid(table), lambda table: table.paused_at is not None)
    following.catch_up(without=("public.good", "public.bag"))
    kept = following.lake("good")
    following.sql(
        "INSERT INTO good SELECT i, 'while paused' FROM generate_series(100, 200) i",
        "INSERT INTO bag SELECT generate_series(1, 100)",
        "INSERT INTO bad VALUES (31, 'not paused')",
    )
    following.catch_up(without=("public.good", "public.bag"))
    assert following.lake("good") == kept
    assert 31 in bad_ids(following)
    paused = following.records()[following.oid("good")]
    assert paused.state is TableState.FINISHED_COPY
    assert paused.changes_applied == before[following.oid("good")].changes_applied

    ask(following, "resume", "FILE")
    following.catch_up()
    following.require_same()


def test_a_copy_that_is_paused_keeps_the_chunks_it_has(following: Following) -> None:
    following.sql(
        "BEGIN; CREATE TABLE wide (id int PRIMARY KEY, filler text);"
        f" INSERT INTO wide SELECT i, repeat(md5(i::text), 50) FROM generate_series(1, {WIDE_ROWS}) i; COMMIT"
    )
    oid = following.oid("wide")
    following.wait_for(oid, lambda wide: wide.chunks_done >= 2)
    # A process that asks for it might start more slowly than the rest of the copy goes.
    with load(following.scenario.file, connects=False).store_address.open() as store:
        store.ask("pause", str(WIDE))
    following.wait_for(oid, lambda wide: wide.paused_at is not None)
    following.sql(
        "INSERT INTO good VALUES (300, 'next to a paused copy')", "UPDATE wide SET filler = 'new' WHERE id = 1"
    )
    following.catch_up(without=(str(WIDE),))
    paused = following.records()[oid]
    assert paused.state is TableState.DATA_SYNC
    assert 2 <= paused.chunks_done < (paused.chunks_total or 0)

    ask(following, "resume", "FILE", str(WIDE))
    following.catch_up()
    following.require_same()
    # Every row once, and what the update wrote.
    assert following.records()[oid].rows_copied == WIDE_ROWS


def test_a_single_run_ends_with_code_8_while_a_table_is_in_error_and_does_what_was_asked_meanwhile(
    following: Following,
) -> None:
    following.run.terminate()
    assert following.run.wait() == 0
    following.sql(f"INSERT INTO bad VALUES (41, {POISON})", "INSERT INTO good VALUES (400, 'z')")
    oid = following.oid("bad")
    # The run plans a batch, then that the table rests, then that this was all: here its second attempt comes due.
    with following.scenario.run(once=True, failpoints="stream.planned:pause@3!once") as once:
        wait_until(lambda: bool(once.paused()))
        wait_until(lambda: following.records()[oid].state is not TableState.ERRORED)
        once.resume()
        assert once.wait() == 8
    assert "column v holds text that is not UTF-8" in following.run.log_tail()
    following.require_same(without=(BAD,))
    ask(following, "skip", "FILE", BAD)
    following.sql("UPDATE bad SET v = 'fixed' WHERE id = 41")
    following.scenario.apply()
    following.require_same()


def test_a_single_run_does_what_was_asked_for_a_table_that_failed_in_the_last_batch_before_a_kill(
    following: Following,
) -> None:
    following.run.kill()
    following.sql(f"INSERT INTO bad VALUES (51, {POISON})")
    # The first batch fails, the second one, which leaves the table out, is never begun.
    assert following.scenario.run_once(failpoints="stream.planned:kill@2") != 0
    ask(following, "skip", "FILE", BAD)
    following.sql("UPDATE bad SET v = 'fixed' WHERE id = 51")
    following.scenario.apply()
    following.require_same()
