"""What every state store must do, as tests to inherit.

class TestMine(StoreContract):
    @pytest.fixture
    def address(self, tmp_path): return MyStore("shop", tmp_path, …)
"""

from __future__ import annotations

import pickle
import threading
from datetime import timedelta

import pytest

from tailrace.errors import ConfigError, Finding, LostError, OwnedError, TableError, TailraceError
from tailrace.model.change import START, Position
from tailrace.model.delivery_status import DeliveryStatus
from tailrace.model.last_batch import LastBatch
from tailrace.state import BatchRecord, Owner, RunRecord, SourceStatus, StateStore, StoreAddress, TableUpdate
from tailrace.state.activity import BatchDetail, Sample
from tailrace.state.record import ChangeCounts
from tailrace.state.state_machine import WAY, TableState, TransitionError
from tailrace.testing.standing import (
    AT,
    Stores,
    TableContract,
    VersionContract,
    all_versions,
    known,
    letter,
    move,
    orders,
)

ELSEWHERE = Owner(4711, "another-host", AT)


class ProgressContract(Stores):
    """Batches, the receiving half, requests and dead letters."""

    def test_a_batch_counts_once_however_often_it_comes(self, store: StateStore) -> None:
        update = TableUpdate("1", changes_applied=7, position="ab", last_change_committed_at=AT)
        batch = BatchRecord(3, {"lsn": 5, "copy": {}}, "ab", 7, 2**40, 0.5, AT)
        assert store.apply_batch(batch, [update])
        assert not store.apply_batch(BatchRecord(3, {"copy": {}, "lsn": 5}), [update])
        table = known(store)
        assert (table.changes_applied, table.last_change_committed_at) == (7, AT)
        assert table.last_applied_at is not None
        assert store.last_batch() == batch

    def test_an_old_batch_with_another_offset_is_refused(self, store: StateStore) -> None:
        store.apply_batch(BatchRecord(5, {"lsn": 5}))
        with pytest.raises(LostError, match="batch 5 comes again"):
            store.apply_batch(BatchRecord(5, {"lsn": 6}))
        with pytest.raises(LostError, match="batch 0 comes again"):
            store.apply_batch(BatchRecord(0, {"lsn": 1}))

    def test_the_last_two_batches_that_were_planned_are_kept_to_the_letter(self, store: StateStore) -> None:
        assert store.planned_batches() == {}
        store.record_planned({-1: '{"at": 0}'})
        store.record_planned({0: "v1\n{}\nzero"})
        assert store.planned_batches() == {-1: '{"at": 0}', 0: "v1\n{}\nzero"}
        store.record_planned({0: "v1\n{}\nzero", 1: "v1\n{}\none"})
        store.record_planned({1: "v1\n{}\none", 2: "v1\n{}\nt\u00e4\u20ac"})
        store.record_planned({2: "v1\n{}\nt\u00e4\u20ac"})
        assert store.planned_batches() == {1: "v1\n{}\none", 2: "v1\n{}\nt\u00e4\u20ac"}
        store.forget_pipeline()
        assert store.planned_batches() == {}

    def test_what_the_destination_holds_is_recorded_and_the_last_word_counts(self, store: StateStore) -> None:
        assert (store.applied_batch(), store.held_batches()) == (None, {})
        store.record_applied(LastBatch(0, 2**63 - 1), {"1": LastBatch(0, 2**63 - 1, version=4)})
        store.record_applied(LastBatch(1, 5), {"": LastBatch(1, 5), "1": LastBatch(1, None, None, -1, "a.b")})
        assert store.applied_batch() == LastBatch(1, 5)
        assert store.held_batches() == {"": LastBatch(1, 5), "1": LastBatch(1, None, None, -1, "a.b")}
        store.forget_table("1")
        assert store.held_batches() == {"": LastBatch(1, 5)}
        store.forget_pipeline()
        assert (store.applied_batch(), store.held_batches()) == (None, {})

    def test_a_batch_with_one_bad_update_leaves_no_trace(self, store: StateStore) -> None:
        with pytest.raises(TransitionError):
            store.apply_batch(BatchRecord(0, {}), [TableUpdate("1", changes_applied=1), TableUpdate("unknown")])
        assert known(store).changes_applied == 0
        assert store.last_batch() is None

    def test_two_updates_of_one_table_add_up(self, store: StateStore) -> None:
        store.apply_batch(BatchRecord(0, {}), [TableUpdate("1", rows_copied=1), TableUpdate("1", rows_copied=2)])
        assert known(store).rows_copied == 3

    def test_old_batches_go(self, store: StateStore) -> None:
        store.apply_batch(BatchRecord(0, {}))
        store.apply_batch(BatchRecord(1000, {}))
        store.apply_batch(BatchRecord(1001, {}))
        assert [batch.id for batch in store.recent_batches(5)] == [1001, 1000]

    def test_the_position_of_the_last_batch_moves_on_over_what_concerns_nobody(self, store: StateStore) -> None:
        store.pass_over("05")
        for number in range(2):
            store.apply_batch(BatchRecord(number, {}, position="02"))
        for position in ("04", "03"):
            store.pass_over(position)
        assert [batch.position for batch in store.recent_batches(2)] == ["04", "02"]

    def test_the_source_status_is_the_last_one_said(self, store: StateStore) -> None:
        assert store.source_status() is None
        store.put_source_status(SourceStatus("backlog", "01", 10, "02", error="down\0"))
        store.put_source_status(SourceStatus("streaming", "03", 20, "04", at=AT))
        assert store.source_status() == SourceStatus("streaming", "03", 20, "04", at=AT)

    def test_what_changed_is_counted_by_table_and_hour(self, store: StateStore, address: StoreAddress) -> None:
        hour = AT.replace(minute=0, second=0, microsecond=0)
        for number, at in enumerate((AT, AT, AT + timedelta(hours=1))):
            update = TableUpdate("1", counts=ChangeCounts(number, 1, 2, 3))
            store.apply_batch(BatchRecord(number, {}, at=at), [update])
        store.apply_batch(BatchRecord(3, {}, at=AT), [TableUpdate("1")])
        with address.open_reading() as reader:
            assert reader.totals() == {"1": ChangeCounts(3, 3, 6, 9)}
            first, second = reader.activity(hour)
            assert (first.upstream_id, first.hour, first.counts) == ("1", hour, ChangeCounts(1, 2, 4, 6))
            assert second.counts == ChangeCounts(2, 1, 2, 3)
            assert reader.activity(AT + timedelta(seconds=1), "1") == [second]
            assert reader.activity(hour, "2") == []
        # A new copy counts from nothing; what happened in an hour stays, for two days.
        store.apply_batch(
            BatchRecord(4, {}, at=AT), [TableUpdate("1", (TableState.DATA_SYNC,), counts=ChangeCounts(5))]
        )
        store.fail_table("1", "why")
        store.apply_batch(BatchRecord(5, {}, at=AT), [TableUpdate("1", (TableState.INIT,))])
        assert store.totals() == {}
        assert len(store.activity(hour)) == 2
        later = AT + timedelta(hours=49)
        store.apply_batch(BatchRecord(6, {}, at=later), [TableUpdate("1", counts=ChangeCounts(inserts=1))])
        assert [each.hour for each in store.activity(hour)] == [hour + timedelta(hours=1), hour + timedelta(hours=49)]
        store.forget_table("1")
        assert (store.activity(hour), store.totals()) == ([], {})

    def test_a_batch_is_kept_with_what_it_did_and_its_phases(self, store: StateStore) -> None:
        update = TableUpdate("1", counts=ChangeCounts(0, 1, 2, 3))
        store.apply_batch(BatchRecord(0, {}, phases={"read": 0.5, "write": 1.25}), [update])
        store.apply_batch(BatchRecord(1, {}))
        assert store.batch_details(5) == [
            BatchDetail(1),
            BatchDetail(0, ChangeCounts(0, 1, 2, 3), {"read": 0.5, "write": 1.25}),
        ]
        store.apply_batch(BatchRecord(1001, {}))
        assert [detail.id for detail in store.batch_details(5)] == [1001]

    def test_samples_are_kept_for_a_day(self, store: StateStore, address: StoreAddress) -> None:
        first = Sample(AT, 10.0, ChangeCounts(1, 2, 3, 4), 5, 0.5, 6, 7, 8, "reserved", 9)
        second = Sample(AT + timedelta(hours=23), 10.0)
        for sample in (second, first, first):
            store.put_sample(sample)
        with address.open_reading() as reader:
            assert reader.samples(AT) == [first, second]
            assert reader.samples(AT + timedelta(seconds=1)) == [second]
        store.put_sample(third := Sample(AT + timedelta(hours=25), 10.0))
        assert store.samples(AT) == [second, third]
        store.forget_pipeline()
        assert store.samples(AT) == []

    def test_a_report_replaces_the_one_before_it(self, store: StateStore, address: StoreAddress) -> None:
        assert (store.last_run(), store.notices(), store.delivery()) == (None, [], None)
        run = RunRecord(AT)
        notice = Finding("warning", "publication", "lacks public.a\0", "ALTER PUBLICATION …;", "public.a")
        for each in (run, run.end(TableError("no\0 room", table="public.a", fix="make some"))):
            store.put_run(each)
            store.put_notices([notice, notice] if each == run else [notice])
            store.put_delivery(DeliveryStatus(pending=3, failures=1 if each == run else 2, error="refused"))
        with address.open_reading() as reader:
            last = reader.last_run()
            assert last is not None
            assert (last.begun_at, last.kind, last.table, last.fix) == (AT, "TableError", "public.a", "make some")
            assert last.ended_at is not None
            assert reader.notices() == [notice]
            assert reader.delivery() == DeliveryStatus(pending=3, failures=2, error="refused")
        store.forget_pipeline()
        assert (store.last_run(), store.notices(), store.delivery()) == (None, [], None)

    def test_a_request_stays_open_until_it_is_done(self, store: StateStore) -> None:
        first = store.ask("resync", "public.orders")
        assert store.recent_requests(1) == [first]
        assert store.ask("resync", "public.orders") == first
        skip = store.ask("skip", "public.orders", "7")
        assert store.ask("skip", "public.orders", "8").id not in (first.id, skip.id)
        assert [(request.kind, request.argument) for request in store.open_requests()] == [
            ("resync", None),
            ("skip", "7"),
            ("skip", "8"),
        ]
        store.finish_request(first.id, "copied again")
        store.finish_request(first.id, "something else")
        done = store.request(first.id)
        assert done is not None
        assert (done.outcome, done.done_at is None) == ("copied again", False)
        assert first.id not in [request.id for request in store.open_requests()]
        assert store.ask("resync", "public.orders").id != first.id
        assert store.request(10**9) is None

    def test_of_pauses_and_resumes_that_wait_the_last_one_counts(self, store: StateStore) -> None:
        for kind in ("pause", "resume", "resume", "pause", "pause"):
            store.ask(kind, "public.orders")
        assert [request.kind for request in store.open_requests()] == ["pause", "resume", "pause"]

    def test_a_letter_is_kept_once_and_counts_its_tries(self, store: StateStore) -> None:
        first = letter(store, 5)
        assert letter(store, 5, reason="still too long") == first
        kept = store.dead_letter(first)
        assert kept is not None
        assert (kept.tries, kept.reason, kept.raw, kept.status) == (2, "still too long", b"\0\xff", "waiting")
        assert kept.first_at <= kept.last_at
        assert "xff" not in repr(kept)

    def test_the_code_of_the_error_that_stopped_a_table_is_kept_until_another_or_its_end(
        self, store: StateStore, address: StoreAddress
    ) -> None:
        store.add_table("1", "public.a"), store.add_table("2", "public.b")
        assert store.failure_codes() == {}
        store.fail_table("1", "no", code="unfit")
        store.fail_table("2", "no")
        assert store.failure_codes() == {"1": "unfit"}
        store.fail_table("1", "the journal is full")
        assert store.failure_codes() == {"1": "unfit"}
        store.fail_table("1", "no", code="schema-changed")
        with address.open_reading() as reader:
            assert reader.failure_codes() == {"1": "schema-changed"}
        store.forget_table("1")
        assert store.failure_codes() == {}

    def test_letters_are_listed_by_table_and_status(self, store: StateStore) -> None:
        one, two = letter(store, 1), letter(store, 2)
        store.settle_dead_letter(two, "skipped")
        store.settle_dead_letter(two, "skipped")
        assert [kept.id for kept in store.dead_letters()] == [one, two]
        assert [kept.id for kept in store.dead_letters("public.a", "waiting")] == [one]
        assert [kept.id for kept in store.dead_letters(status="skipped")] == [two]
        assert store.letter_counts() == {"1": 1}
        recent = store.recent_letters(5, "public.a")
        assert [(kept.id, kept.status, kept.raw) for kept in recent] == [(two, "skipped", None), (one, "waiting", None)]
        assert [kept.id for kept in store.recent_letters(1)] == [two]
        assert store.recent_letters(5, "public.b") == []
        assert store.dead_letters("public.b") == []

    def test_a_resolved_letter_that_fails_again_waits_and_a_skipped_one_stays_skipped(self, store: StateStore) -> None:
        store.settle_dead_letter(letter(store, 1), "resolved")
        store.settle_dead_letter(letter(store, 2), "skipped")
        letter(store, 1), letter(store, 2)
        assert [(kept.status, kept.tries) for kept in store.dead_letters()] == [("waiting", 2), ("skipped", 2)]

    def test_what_is_skipped_is_what_the_table_has_not_passed(self, store: StateStore) -> None:
        for commit in (3, 1, 2):
            store.settle_dead_letter(letter(store, commit), "skipped")
        letter(store, 4)
        positions = [str(Position(commit, 0)) for commit in (1, 2, 3)]
        assert store.skips() == {"1": positions}
        store.apply_batch(BatchRecord(0, {}), [TableUpdate("1", changes_applied=1, position=positions[1])])
        assert store.skips() == {"1": positions[2:]}

    def test_a_new_copy_drops_the_letters_that_wait(self, store: StateStore) -> None:
        move(store, "1", TableState.DATA_SYNC)
        waiting, skipped = letter(store, 1), letter(store, 2)
        store.settle_dead_letter(skipped, "skipped")
        move(store, "1", *WAY[:2])
        assert [kept.id for kept in store.dead_letters()] == [skipped]
        assert letter(store, 1) not in (waiting, skipped)


class RunContract(Stores):
    """Writers, readers, and what a store remembers."""

    def test_a_new_store_knows_its_pipeline_and_keeps_its_epoch(self, address: StoreAddress) -> None:
        with address.open() as store:
            first = store.pipeline()
        with address.open() as store:
            assert store.pipeline() == first
        assert (first.name, first.run, first.owner) == (address.name, 0, None)

    def test_an_address_travels_between_processes(self, address: StoreAddress) -> None:
        assert pickle.loads(pickle.dumps(address)) == address  # noqa: S301 - made in the line itself

    def test_reading_before_the_first_run_says_so(self, address: StoreAddress) -> None:
        with pytest.raises(ConfigError, match="has not run yet"):
            address.open_reading()

    def test_a_reader_sees_what_a_running_writer_has_committed(self, store: StateStore, address: StoreAddress) -> None:
        store.claim_run()
        with address.open_reading() as reader:
            assert [table.name for table in reader.tables()] == ["public.a"]
            store.add_table("2", "public.b")
            store.put_schema(orders(), START)
            assert [table.name for table in reader.tables()] == ["public.a", "public.b"]
            assert reader.schema_at("16400") == store.schema_at("16400")

    def test_a_reader_cannot_write(self, store: StateStore, address: StoreAddress) -> None:
        with address.open_reading() as reader, pytest.raises(TailraceError, match="read-only"):
            reader.add_table("2", "public.b")

    def test_a_closed_store_says_so(self, store: StateStore) -> None:
        store.claim_run()
        store.close()
        store.close()
        with pytest.raises(TailraceError, match="was closed"):
            store.renew_lease()
        with pytest.raises(TailraceError, match="was closed"):
            store.last_batch()

    def test_a_runner_that_was_replaced_can_write_no_more(self, store: StateStore, address: StoreAddress) -> None:
        store.claim_run()
        with address.open() as other:
            other.claim_run()
            with pytest.raises(OwnedError, match="run 2 of the pipeline has begun"):
                store.apply_batch(BatchRecord(0, {}))
            with pytest.raises(OwnedError):
                store.require_owner()
            with pytest.raises(OwnedError):
                store.renew_lease()
            store.release_lease()
            other.renew_lease()
            assert other.apply_batch(BatchRecord(0, {}))
            assert other.lease_holder() is not None

    def test_a_lease_keeps_others_out_until_it_ends(self, store: StateStore, address: StoreAddress) -> None:
        store.claim_run(ELSEWHERE, seconds=60)
        held = store.pipeline()
        assert (held.owner, store.lease_holder()) == (ELSEWHERE, ELSEWHERE)
        assert held.lease_until is not None
        with address.open() as other:
            with pytest.raises(OwnedError, match="process 4711 on another-host; its lease ends at 2") as refused:
                other.claim_run()
            assert f"{held.lease_until:%Y-%m-%d %H:%M:%S}" in refused.value.message
            store.require_owner()
            store.release_lease()
            assert store.pipeline().lease_until is None
            assert other.claim_run() == 2

    def test_a_lease_that_ended_or_whose_holder_is_dead_can_be_taken(
        self, store: StateStore, address: StoreAddress
    ) -> None:
        store.claim_run(ELSEWHERE, seconds=-1)
        assert store.lease_holder() is None
        with address.open() as other:
            assert other.claim_run(ELSEWHERE, seconds=60) == 2
            assert other.claim_run(ELSEWHERE, seconds=60) == 3
            assert store.claim_run(takes_over=True) == 4

    def test_a_renewed_lease_lasts_longer(self, store: StateStore) -> None:
        store.claim_run(ELSEWHERE, seconds=60)
        before = store.pipeline().lease_until
        store.renew_lease()
        after = store.pipeline().lease_until
        assert before is not None
        assert after is not None
        assert before <= after < before + timedelta(seconds=60)

    def test_a_joined_process_writes_for_its_run_only(self, store: StateStore, address: StoreAddress) -> None:
        run = store.claim_run()
        with address.join(run) as joined:
            assert joined.put_schema(orders(), START).version == 1
            store.claim_run()
            with pytest.raises(OwnedError):
                joined.put_schema(orders("a"), Position(1, 0))
        with pytest.raises(OwnedError):
            address.join(run)

    def test_the_runner_sees_what_a_joined_process_stored(self, store: StateStore, address: StoreAddress) -> None:
        run = store.claim_run()
        store.add_table("16400", "public.orders")
        first = store.put_schema(orders(), START)
        assert known(store, "16400").version == 1
        with address.join(run) as joined:
            second = joined.put_schema(orders("a"), Position(5, 0))
            assert store.schema("16400", 2) == second
            assert store.schema_at("16400", Position(1, 0)) == first
            store.require_owner()
            assert store.schema_at("16400") == second
            assert known(store, "16400").version == 2
            third = joined.put_schema(orders("b"), Position(6, 0))
        store.add_table("1", "public.renamed")
        assert store.schema_at("16400") == third

    def test_what_is_remembered_is_what_is_stored(self, store: StateStore, address: StoreAddress) -> None:
        store.claim_run()
        store.add_table("16400", "public.orders"), store.add_table("2", "public.b"), store.add_table("3", "public.c")
        assert len(store.tables()) == 4
        store.put_schema(orders(), START), store.put_schema(orders("a"), Position(9, 0))
        update = TableUpdate("16400", WAY[1:], 5, 10, 1, 2, 3, str(Position(9, 0)), AT)
        store.apply_batch(BatchRecord(0, {"a": [1]}, rows=3, at=AT), [update, TableUpdate("2", WAY[1:3])])
        store.fail_table("2", "no", fix="yes", retry="timed", attempts=3, next_try=AT, resume=str(Position(1, 0)))
        store.pause_table("1")
        store.recover_table("2")
        move(store, "16400", TableState.INIT)
        store.forget_table("3")
        store.put_schema(orders("b"), Position(9, 0)), store.prune_schemas(Position(9, 0))
        with pytest.raises(TransitionError):
            move(store, "1", TableState.READY)
        store.add_table("1", "public.z")
        with address.open_reading() as reader:
            assert store.tables() == reader.tables()
            assert all_versions(store, "16400") == all_versions(reader, "16400")
            assert (store.table("2"), store.table("3")) == (reader.table("2"), None)

    def test_several_threads_share_one_store(self, store: StateStore) -> None:
        def add(worker: int) -> None:
            for index in range(5):
                store.add_table(f"{worker}-{index}", f"public.t{worker}_{index}")

        store.claim_run()
        threads = [threading.Thread(target=add, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(store.tables()) == 21


class StoreContract(TableContract, VersionContract, ProgressContract, RunContract):
    """All of it. A suite gives `address`: that of an empty store of its own for each test."""
