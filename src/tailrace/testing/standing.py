"""What every state store must do with tables and their schema versions; part of `tailrace.testing.store`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from tailrace.model.change import START, Position, end_of
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.state import BatchRecord, StateStore, StoreAddress, TableRecord, TableUpdate
from tailrace.state.state_machine import WAY, TableState, TransitionError

AT = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)


def orders(*extra: str) -> TableSchema:
    """The table `public.orders` with a key and some columns."""
    columns = tuple(Column(name, pa.int64()) for name in ("id", *extra))
    return TableSchema(TableName("public", "orders"), columns, ("id",), upstream_id="16400")


def known(store: StateStore, upstream_id: str = "1") -> TableRecord:
    """A table that must be there."""
    table = store.table(upstream_id)
    assert table is not None
    return table


def move(store: StateStore, upstream_id: str, *steps: TableState) -> None:
    """A batch that takes a table through these states. A copy that begins in it was asked for."""
    last = store.last_batch()
    update = TableUpdate(upstream_id, steps, asked=TableState.INIT in steps)
    store.apply_batch(BatchRecord(last.id + 1 if last else 0, {}), [update])


def all_versions(store: StateStore, upstream_id: str) -> list[tuple[Position, TableSchema]]:
    """All versions of a table with where they begin, by position."""
    return store.schemas_between(upstream_id, START, end_of(1 << 62))


def letter(store: StateStore, commit: int, *, upstream_id: str = "1", reason: str = "too long") -> int:
    kept = store.put_dead_letter(
        upstream_id, "public.a", str(Position(commit, 0)), kind="UnfitError", reason=reason, raw=b"\0\xff", version=1
    )
    return kept.id


class Stores:
    """The fixtures of the suite: `store` is open for writing, without a run."""

    @pytest.fixture
    def address(self) -> StoreAddress:
        raise AssertionError("a suite gives the address of an empty store")

    @pytest.fixture
    def store(self, address: StoreAddress) -> Iterator[StateStore]:
        with address.open() as opened:
            opened.add_table("1", "public.a")
            yield opened

    def reread(self, address: StoreAddress, upstream_id: str = "1") -> TableRecord:
        """A table as another process sees it."""
        with address.open_reading() as reader:
            return known(reader, upstream_id)


class TableContract(Stores):
    """Table states and their life."""

    def test_a_table_begins_in_init_and_follows_a_rename(self, store: StateStore) -> None:
        added = known(store)
        move(store, "1", TableState.DATA_SYNC)
        renamed = store.add_table("1", "public.sales")
        assert added.state is TableState.INIT
        assert (renamed.name, renamed.state) == ("public.sales", TableState.DATA_SYNC)
        assert set(renamed.since) == {TableState.INIT, TableState.DATA_SYNC}
        assert store.add_table("1", "public.sales") == known(store) == renamed

    def test_tables_are_listed_by_name(self, store: StateStore) -> None:
        for number, name in enumerate(["public.B", "public.ä", "a.z", "public.a"]):
            store.add_table(f"9{number}", name)
        names = [table.name for table in store.tables()]
        assert names == sorted(names)

    def test_a_move_that_is_not_allowed_changes_nothing(self, store: StateStore) -> None:
        before = known(store)
        with pytest.raises(TransitionError):
            move(store, "1", TableState.DATA_SYNC, TableState.READY)
        assert known(store) == before

    def test_a_table_nobody_added_cannot_move(self, store: StateStore) -> None:
        with pytest.raises(TransitionError, match="not known"):
            move(store, "unknown", TableState.DATA_SYNC)

    def test_states_that_only_pass_are_shown_by_the_store_that_saw_them_and_never_stored(
        self, store: StateStore, address: StoreAddress
    ) -> None:
        store.claim_run()
        move(store, "1", *WAY[1:4])
        assert known(store).state is TableState.SYNC_WAIT
        move(store, "1", TableState.CATCHUP)
        assert [table.state for table in store.tables()] == [TableState.CATCHUP]
        stored = self.reread(address)
        assert stored.state is TableState.FINISHED_COPY
        assert {TableState.SYNC_WAIT, TableState.CATCHUP} <= set(stored.since)
        move(store, "1", TableState.SYNC_DONE)
        assert known(store).state is self.reread(address).state is TableState.SYNC_DONE

    def test_an_overlay_shows_until_the_table_goes_on(self, store: StateStore, address: StoreAddress) -> None:
        move(store, "1", *WAY[1:3])
        store.overlay("1", TableState.CATCHUP)
        assert known(store).state is TableState.CATCHUP
        assert self.reread(address).state is TableState.FINISHED_COPY
        store.overlay("1", None)
        assert known(store).state is TableState.FINISHED_COPY
        store.overlay("1", TableState.SYNC_WAIT)
        move(store, "1", TableState.INIT)
        assert known(store).state is TableState.INIT
        with pytest.raises(TransitionError, match="Ready is stored"):
            store.overlay("1", TableState.READY)

    def test_an_error_tells_its_fix_and_is_gone_once_the_table_goes_on(self, store: StateStore) -> None:
        move(store, "1", TableState.DATA_SYNC)
        store.fail_table("1", "no key", fix="ALTER TABLE …", resume="ff")
        store.fail_table("1", "still\0no key", fix="ALTER TABLE …", retry="timed", attempts=2, next_try=AT)
        failed = known(store)
        assert (failed.state, failed.reason, failed.retry) == (TableState.ERRORED, "still\ufffdno key", "timed")
        assert (failed.failed_in, failed.attempts, failed.next_try) == (TableState.DATA_SYNC, 2, AT)
        store.recover_table("1")
        fixed = known(store)
        assert fixed.state is TableState.DATA_SYNC
        assert (fixed.reason, fixed.fix, fixed.retry, fixed.resume, fixed.failed_in) == (None,) * 5
        assert fixed.next_try is None

    def test_attempts_count_until_a_copy_is_complete(self, store: StateStore) -> None:
        store.fail_table("1", "no", attempts=3)
        store.recover_table("1")
        store.recover_table("1")
        assert (known(store).state, known(store).attempts) == (TableState.INIT, 3)
        store.apply_batch(BatchRecord(0, {}), [TableUpdate("1", (TableState.DATA_SYNC,), chunks_total=3)])
        assert known(store).attempts == 3
        store.apply_batch(BatchRecord(1, {}), [TableUpdate("1", rows_copied=1)])
        assert known(store).attempts == 3
        store.apply_batch(BatchRecord(2, {}), [TableUpdate("1", (TableState.FINISHED_COPY,), rows_copied=1)])
        assert known(store).attempts == 0

    @pytest.mark.parametrize("passed", range(1, len(WAY) + 1))
    def test_a_table_recovers_to_where_it_failed_or_has_to_catch_up(
        self, store: StateStore, address: StoreAddress, passed: int
    ) -> None:
        move(store, "1", *WAY[1:passed])
        state = WAY[min(passed, 3) - 1]
        store.fail_table("1", "no")
        store.recover_table("1")
        assert known(store).state is self.reread(address).state is state

    def test_a_pause_leaves_the_state_and_outlives_a_reset(self, store: StateStore) -> None:
        store.pause_table("1")
        paused = known(store)
        store.pause_table("1")
        move(store, "1", TableState.DATA_SYNC)
        move(store, "1", TableState.INIT)
        assert paused.paused_at is not None
        assert known(store).paused_at == paused.paused_at
        store.resume_table("1")
        store.resume_table("1")
        assert known(store).paused_at is None

    def test_a_reset_begins_again_from_everywhere(self, store: StateStore) -> None:
        update = TableUpdate("1", (TableState.DATA_SYNC,), 5, 10, 1, 2, 3, str(Position(9, 0)), AT)
        store.apply_batch(BatchRecord(0, {}), [update])
        store.fail_table("1", "no", attempts=4, next_try=AT)
        move(store, "1", TableState.INIT)
        table = known(store)
        assert (table.state, set(table.since)) == (TableState.INIT, {TableState.INIT})
        assert (table.rows_copied, table.chunks_done, table.changes_applied, table.attempts) == (0, 0, 0, 0)
        assert (table.rows_total, table.chunks_total, table.position, table.reason, table.next_try) == (None,) * 5

    def test_a_forgotten_table_leaves_nothing(self, store: StateStore) -> None:
        store.add_table("16400", "public.orders")
        store.put_schema(orders(), Position(1, 0))
        waiting = letter(store, 1, upstream_id="16400")
        store.forget_table("16400")
        store.forget_table("16400")
        assert [table.upstream_id for table in store.tables()] == ["1"]
        assert (store.schema_at("16400"), store.dead_letter(waiting)) == (None, None)

    def test_hostile_names_are_only_names(self, store: StateStore) -> None:
        for number, name in enumerate(['a."; DROP TABLE table_state; --', "a.%s", "a.:name", "a.{0}", "a.🐟 '\\"]):
            assert store.add_table(f"x{number}", name) == known(store, f"x{number}")
            assert store.ask("retry", name).table == name
        assert len(store.tables()) == 6


class VersionContract(Stores):
    """Schema versions by position."""

    def test_a_schema_holds_from_its_position_until_the_next(self, store: StateStore) -> None:
        first = store.put_schema(orders(), Position(100, 0))
        second = store.put_schema(orders("a"), Position(200, 5))
        assert store.put_schema(orders("a"), Position(999, 0)) == second
        assert (first.version, second.version) == (1, 2)
        assert store.schema_at("16400", Position(99, 0)) is None
        assert store.schema_at("16400", Position(200, 4)) == first
        assert store.schema_at("16400", Position(200, 5)) == second
        assert store.schema_at("16400") == store.schema("16400", 2) == second
        assert store.schema("16400", 3) is None

    def test_a_version_may_come_late_and_holds_by_its_position(self, store: StateStore) -> None:
        last = store.put_schema(orders("a", "b"), Position(300, 0))
        between = store.put_schema(orders("a"), Position(200, 0))
        assert (last.version, between.version) == (1, 2)
        assert store.schema_at("16400") == last
        assert all_versions(store, "16400") == [(Position(200, 0), between), (Position(300, 0), last)]

    def test_another_schema_at_the_same_position_takes_its_place_under_a_new_number(self, store: StateStore) -> None:
        store.add_table("16400", "public.orders")
        store.put_schema(orders(), START)
        second = store.put_schema(orders("a"), START)
        assert second.version == known(store, "16400").version == 2
        assert all_versions(store, "16400") == [(START, second)]
        assert store.schema("16400", 1) is None

    def test_a_range_gets_the_version_it_begins_with_and_those_inside(self, store: StateStore) -> None:
        one, two, three = (
            store.put_schema(schema, Position(commit, 0))
            for schema, commit in ((orders(), 100), (orders("a"), 200), (orders("a", "b"), 300))
        )
        places = [(Position(100, 0), one), (Position(200, 0), two), (Position(300, 0), three)]
        assert store.schemas_between("16400", Position(150, 0), Position(300, 0)) == places
        assert store.schemas_between("16400", Position(200, 0), Position(299, 0)) == places[1:2]
        assert store.schemas_between("16400", START, Position(200, 0)) == places[:2]
        assert store.schemas_between("16400", START, Position(99, 0)) == []
        assert store.schemas_between("unknown", START, Position(99, 0)) == []

    def test_pruning_keeps_every_version_that_a_later_position_needs(self, store: StateStore) -> None:
        for schema, commit in ((orders(), 100), (orders("a"), 200), (orders("a", "b"), 300)):
            store.put_schema(schema, Position(commit, 0))
        assert store.prune_schemas(end_of(250)) == 1
        assert store.prune_schemas(end_of(250)) == 0
        assert store.schema_at("16400", Position(250, 1)) == orders("a").at_version(2)
        assert store.prune_schemas(end_of(2**40)) == 1
        assert store.schema_at("16400") == orders("a", "b").at_version(3)

    def test_a_number_is_not_given_twice_whatever_was_pruned(self, store: StateStore) -> None:
        store.put_schema(orders("a"), Position(200, 0))
        store.put_schema(orders(), Position(100, 0))
        store.prune_schemas(end_of(500))
        assert store.put_schema(orders("b"), Position(300, 0)).version == 3

    def test_a_table_knows_the_version_that_holds_last(self, store: StateStore) -> None:
        store.put_schema(orders("a"), Position(200, 0))
        assert store.add_table("16400", "public.orders").version == 1
        store.put_schema(orders(), Position(100, 0))
        assert known(store, "16400").version == 1
        store.put_schema(orders("b"), Position(300, 0))
        assert known(store, "16400").version == 3

    def test_initial_values_are_part_of_a_version(self, store: StateStore) -> None:
        def initial(value: float) -> TableSchema:
            columns = (Column("id", pa.int64()), Column("x", pa.float64(), initial=pa.scalar(value)))
            return TableSchema(TableName("public", "orders"), columns, ("id",), upstream_id="16400")

        assert store.put_schema(initial(float("nan")), START).version == 1
        assert store.put_schema(initial(float("nan")), Position(1, 0)).version == 1
        assert store.put_schema(initial(0.5), Position(1, 0)).version == 2
