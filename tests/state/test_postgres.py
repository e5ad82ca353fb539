"""The state in Postgres: what is true of the database and not of every store (see tests/contract/test_store.py)."""

from __future__ import annotations

import threading
from pathlib import Path

import psycopg
import pytest

from tailrace.errors import ConfigError, OwnedError, PreflightError, TailraceError, UnavailableError
from tailrace.state import BatchRecord, Owner, StoreAddress, TableState
from tailrace.state.layout import FORMAT
from tailrace.state.postgres import PostgresStore
from tailrace.state.status import PipelineStatus
from tailrace.testing.wait import wait_until
from tests.support.database import PostgresDatabase

CANARY = "c4nary-Pa55"


@pytest.fixture
def address(tmp_path: Path, database: PostgresDatabase) -> PostgresStore:
    return PostgresStore("shop", tmp_path, database.dsn)


def test_pipelines_share_a_schema_and_know_nothing_of_each_other(address: PostgresStore, tmp_path: Path) -> None:
    other = PostgresStore("office", tmp_path, address.dsn)
    with address.open() as shop, other.open() as office:
        assert (shop.claim_run(), shop.claim_run(), office.claim_run()) == (1, 2, 1)
        shop.add_table("1", "public.a")
        office.add_table("1", "public.b")
        shop.apply_batch(BatchRecord(0, {"lsn": 1}))
        office.forget_table("1")
        letter = shop.put_dead_letter("1", "public.a", "0", kind="a", reason="b")
        assert (office.tables(), office.last_batch(), office.dead_letter(letter.id)) == ([], None, None)
        assert [table.name for table in shop.tables()] == ["public.a"]
    with pytest.raises(ConfigError, match="holds no pipeline third"):
        PostgresStore("third", tmp_path, address.dsn).open_reading()


@pytest.mark.parametrize("schema", ['quo"te; --', "%s {x} :y", "select", "Grün", "x" * 63])
def test_a_hostile_schema_is_only_a_name(tmp_path: Path, database: PostgresDatabase, schema: str) -> None:
    address = PostgresStore("shop", tmp_path, database.dsn, schema)
    with address.open() as store:
        store.add_table("1", "public.a")
    with address.open_reading() as reader:
        assert len(reader.tables()) == 1
    assert (schema,) in database.rows("SELECT nspname FROM pg_namespace")
    assert database.rows("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == [(0,)]


def test_functions_of_others_in_the_schema_are_not_called(tmp_path: Path, database: PostgresDatabase) -> None:
    # On PostgreSQL 14 every role may create functions in `public`.
    database.run(
        "CREATE FUNCTION public.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql AS"
        " 'BEGIN RAISE ''called as %'', current_user; END'",
        "CREATE FUNCTION public.pg_advisory_xact_lock(bigint) RETURNS void LANGUAGE plpgsql AS"
        " 'BEGIN RAISE ''called as %'', current_user; END'",
    )
    with PostgresStore("shop", tmp_path, database.dsn, "public").open() as store:
        assert store.claim_run(Owner.here(), seconds=60) == 1


def test_several_processes_may_make_the_tables_at_once(address: StoreAddress) -> None:
    failures: list[BaseException] = []

    def open_it() -> None:
        try:
            address.open().close()
        except TailraceError as error:
            failures.append(error)

    threads = [threading.Thread(target=open_it) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_the_runner_of_the_status_is_the_holder_of_the_lease(address: StoreAddress) -> None:
    holder = Owner(4711, "another-host", Owner.here().started)
    with address.open() as store:
        assert PipelineStatus.read(store).runner is None
        store.claim_run(holder, seconds=60)
        with address.open_reading() as reader:
            assert PipelineStatus.read(reader).runner == holder
        store.release_lease()
        assert PipelineStatus.read(store).runner is None


def test_a_lost_connection_is_opened_again(address: StoreAddress, database: PostgresDatabase) -> None:
    with address.open() as store:
        store.claim_run()
        store.add_table("1", "public.a")
        database.run(
            "SELECT pg_terminate_backend(pid, 300000) FROM pg_stat_activity WHERE application_name = 'tailrace state'"
        )
        store.add_table("2", "public.b")
        assert [table.name for table in store.tables()] == ["public.a", "public.b"]


def let_updates_die(database: PostgresDatabase) -> None:
    """A session that updates the state of a table loses its connection, until the trigger is dropped."""
    database.run(
        "CREATE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NEW; END $$",
        "CREATE TRIGGER die BEFORE UPDATE ON tailrace.table_state FOR EACH ROW EXECUTE FUNCTION die()",
    )


def test_a_server_that_dies_within_a_write_leaves_memory_and_store_the_same(
    address: StoreAddress, database: PostgresDatabase
) -> None:
    with address.open() as store:
        store.claim_run()
        store.add_table("1", "public.a")
        let_updates_die(database)
        with pytest.raises(UnavailableError):
            store.pause_table("1")
        database.run("DROP TRIGGER die ON tailrace.table_state")
        table = store.table("1")
        assert table is not None
        assert table.paused_at is None
        store.pause_table("1")


@pytest.mark.parametrize("setting", ["idle_in_transaction_session_timeout", "transaction_timeout"])
def test_a_write_that_the_server_gave_up_because_the_process_slept_can_be_tried_again(
    address: StoreAddress, database: PostgresDatabase, setting: str
) -> None:
    backends = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'tailrace state'"
    with address.open() as store:
        store.claim_run()

        def sleep_within_a_write() -> None:
            with store._session.write() as tx:
                tx.run(f"SET LOCAL {setting} = '100ms'")
                wait_until(lambda: database.rows(f"{backends} AND datname = current_database()") == [])
                tx.run("SELECT 1")

        with pytest.raises(UnavailableError):
            sleep_within_a_write()
        store.renew_lease()


def test_a_runner_that_is_suspended_within_a_write_does_not_keep_the_next_runner_out(address: StoreAddress) -> None:
    with address.open() as old, address.open() as new:
        runs = [old.claim_run()]

        def sleep_within_a_write() -> None:
            with old._session.write() as tx:
                runs.append(new.claim_run(takes_over=True))
                tx.run("SELECT 1")

        with pytest.raises(UnavailableError):
            sleep_within_a_write()
        assert runs == [1, 2]


def test_a_skip_leaves_either_both_the_letter_and_the_table_or_neither(
    address: StoreAddress, database: PostgresDatabase
) -> None:
    with address.open() as store:
        store.claim_run()
        store.add_table("1", "public.a")
        store.fail_table("1", "no")
        letter = store.put_dead_letter("1", "public.a", "0", kind="UnfitError", reason="no")
        let_updates_die(database)
        with pytest.raises(UnavailableError):
            store.skip_dead_letters("1", [letter.id])
        database.run("DROP TRIGGER die ON tailrace.table_state")
        assert [(each.id, each.status) for each in store.dead_letters()] == [(letter.id, "waiting")]
        store.skip_dead_letters("1", [letter.id])
        assert [(each.id, each.status) for each in store.dead_letters()] == [(letter.id, "skipped")]
        assert [table.state for table in store.tables()] == [TableState.INIT]


def test_a_writer_waits_for_the_one_before_and_is_fenced_after_a_new_run(
    address: StoreAddress, database: PostgresDatabase
) -> None:
    refused: list[BaseException] = []
    with address.open() as old, address.open() as new:
        old.claim_run()
        with database.connect() as blocker:
            blocker.execute("BEGIN")
            blocker.execute("SELECT 1 FROM tailrace.pipeline FOR UPDATE")

            def write() -> None:
                try:
                    old.apply_batch(BatchRecord(0, {}))
                except OwnedError as error:
                    refused.append(error)

            writer = threading.Thread(target=write)
            writer.start()
            blocker.execute("UPDATE tailrace.pipeline SET run = run + 1")
            blocker.execute("COMMIT")
        writer.join()
        assert len(refused) == 1
        assert new.last_batch() is None


def test_another_format_is_refused(address: StoreAddress, database: PostgresDatabase) -> None:
    address.open().close()
    database.run("UPDATE tailrace.format SET version = 99")
    for attempt in (address.open, address.open_reading):
        with pytest.raises(ConfigError, match="has format 99, this tailrace reads up to 6"):
            attempt()


def test_a_schema_of_the_format_before_is_read_as_it_is_and_gets_what_it_lacks_from_a_writer(
    address: StoreAddress, database: PostgresDatabase
) -> None:
    with address.open() as store:
        store.claim_run()
    lacking = (
        "sender_lease",
        "sender_watermark",
        "sender_queue",
        "applied_batch",
        "held_batch",
        "report",
        "planned_batch",
        "activity",
        "batch_detail",
        "sample",
    )
    database.run(*(f"DROP TABLE tailrace.{table}" for table in lacking), "UPDATE tailrace.format SET version = 2")
    with address.open_reading() as reader:
        assert reader.pipeline().run == 1
        assert (reader.last_run(), reader.notices(), reader.delivery()) == (None, [], None)
    assert database.rows("SELECT version FROM tailrace.format") == [(2,)]
    with address.open() as store:
        assert store.claim_run() == 2
        store.forget_pipeline()
    assert database.rows("SELECT version FROM tailrace.format") == [(FORMAT,)]


def test_no_error_shows_the_password(tmp_path: Path, database: PostgresDatabase) -> None:
    dead = f"postgresql://me:{CANARY}@127.0.0.1:1/state"
    broken = f"postgresql://me:{CANARY}@[/state"
    missing = psycopg.conninfo.make_conninfo(database.dsn, dbname="nowhere", password=CANARY)
    stranger = psycopg.conninfo.make_conninfo(database.dsn, user="stranger", password=CANARY)
    for dsn, kind in (
        (dead, UnavailableError),
        (broken, ConfigError),
        (missing, PreflightError),
        (stranger, TailraceError),
    ):
        address = PostgresStore("shop", tmp_path, dsn)
        with pytest.raises(kind) as refused:
            address.open()
        assert CANARY not in f"{refused.value} {refused.value.__cause__} {address!r}"


def test_a_role_without_rights_is_refused_with_the_sql_that_grants_them(
    tmp_path: Path, database: PostgresDatabase
) -> None:
    database.run("DROP ROLE IF EXISTS plain_state", "CREATE ROLE plain_state LOGIN")
    dsn = psycopg.conninfo.make_conninfo(database.dsn, user="plain_state")
    address = PostgresStore("shop", tmp_path, dsn)
    try:
        with pytest.raises(PreflightError, match="may not use schema tailrace") as refused:
            address.open()
        assert refused.value.fix is not None
        assert 'CREATE SCHEMA "tailrace" AUTHORIZATION' in refused.value.fix
        database.run("CREATE SCHEMA tailrace AUTHORIZATION plain_state")
        with address.open() as store:
            assert store.claim_run() == 1
    finally:
        database.run("DROP SCHEMA IF EXISTS tailrace CASCADE", "DROP ROLE plain_state")
