"""After any operations in any order, the store answers as a few dictionaries would, and so does a reader of it."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from bisect import bisect_right
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tailrace.errors import OwnedError
from tailrace.model.change import Position
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.state import BatchRecord, SqliteStore, StateStore, StoreAddress, TableState, TableUpdate
from tailrace.state.postgres import PostgresStore
from tailrace.state.state_machine import TRANSITIONS, TransitionError, durable, resumed
from tailrace.testing.standing import all_versions
from tests.support.database import PostgresDatabase

IDS = st.sampled_from(["1", "2", "3"])
COMMITS = st.integers(0, 6)
STATES = st.sampled_from(list(TableState))
COLUMNS = st.sets(st.sampled_from("abc")).map(sorted)

Model = dict[str, Any]


def schema_of(upstream_id: str, columns: list[str], version: int = 1) -> TableSchema:
    named = tuple(Column(name, pa.int64()) for name in ["id", *columns])
    return TableSchema(TableName("public", f"t{upstream_id}"), named, ("id",), version, upstream_id)


class StoreMachine(RuleBasedStateMachine):
    """The store of a runner next to its model. `seen` is what a table looks like to the runner."""

    address: ClassVar[StoreAddress]
    pipelines = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        name = f"p{next(self.pipelines)}"
        self.place = self.address.bind(name, self.folder)
        self.store = self.place.open()
        self.tables: dict[str, Model] = {}
        self.versions: dict[str, dict[Position, tuple[int, list[str]]]] = {}
        self.highest: dict[str, int] = {}
        self.letters: dict[tuple[str, int], list[Any]] = {}
        self.requests: set[tuple[str, str]] = set()
        self.batch = self.run = 0

    @initialize()
    def begin(self) -> None:
        self.run = self.store.claim_run()

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    # Tables

    @rule(upstream_id=IDS, name=st.sampled_from(["public.x", "public.y"]))
    def add(self, upstream_id: str, name: str) -> None:
        self.store.add_table(upstream_id, name)
        fresh = {"state": TableState.INIT, "rows": 0, "attempts": 0, "paused": False, "failed_in": None}
        self.tables.setdefault(upstream_id, fresh | {"position": None})["name"] = name

    def _restart(self, upstream_id: str) -> None:
        self.tables[upstream_id] |= {"rows": 0, "attempts": 0, "position": None}
        self._drop_letters(upstream_id)

    def _drop_letters(self, upstream_id: str) -> None:
        letters = self.letters.items()
        self.letters = {key: kept for key, kept in letters if key[0] != upstream_id or kept[1] != "waiting"}

    def _walk(self, upstream_id: str, steps: list[TableState]) -> bool:
        """Whether the model may go this way; then it has."""
        table = self.tables.get(upstream_id)
        ends = [table["state"], *steps] if table else []
        if table is None or any(b not in TRANSITIONS[a] for a, b in itertools.pairwise(ends)):
            return False
        if TableState.INIT in steps:
            self._restart(upstream_id)
        if steps:
            failed_in = table["failed_in"]
            for start, end in itertools.pairwise(ends):
                failed_in = resumed(start) if end is TableState.ERRORED else None
            table |= {"state": steps[-1], "failed_in": failed_in}
        return True

    @rule(upstream_id=IDS, steps=st.lists(STATES.filter(lambda state: state is not TableState.ERRORED), max_size=3))
    def move(self, upstream_id: str, steps: list[TableState]) -> None:
        update = TableUpdate(upstream_id, tuple(steps), asked=TableState.INIT in steps)
        batch = BatchRecord(self.batch, {"lsn": self.batch})
        if self._walk(upstream_id, steps):
            self.store.apply_batch(batch, [update])
            self.batch += 1
        else:
            with pytest.raises(TransitionError):
                self.store.apply_batch(batch, [update])

    @rule(upstream_id=IDS, attempts=st.integers(0, 5))
    def fail(self, upstream_id: str, attempts: int) -> None:
        table = self.tables.get(upstream_id)
        if table is None:
            return
        self.store.fail_table(upstream_id, "no", retry="timed", attempts=attempts)
        if table["state"] is not TableState.ERRORED:
            self._walk(upstream_id, [TableState.ERRORED])
        table["attempts"] = attempts

    @rule(upstream_id=IDS)
    def recover(self, upstream_id: str) -> None:
        table = self.tables.get(upstream_id)
        if table is None:
            return
        self.store.recover_table(upstream_id)
        self._recover(upstream_id)

    def _recover(self, upstream_id: str) -> None:
        table = self.tables[upstream_id]
        if table["state"] is TableState.ERRORED:
            attempts = table["attempts"]
            self._walk(upstream_id, [table["failed_in"]])
            table["attempts"] = attempts

    @rule(upstream_id=IDS, paused=st.booleans())
    def pause(self, upstream_id: str, paused: bool) -> None:
        if upstream_id in self.tables:
            (self.store.pause_table if paused else self.store.resume_table)(upstream_id)
            self.tables[upstream_id]["paused"] = paused

    @rule(upstream_id=IDS)
    def forget(self, upstream_id: str) -> None:
        self.store.forget_table(upstream_id)
        self.tables.pop(upstream_id, None)
        self.versions.pop(upstream_id, None)
        self.highest.pop(upstream_id, None)
        self._drop_letters(upstream_id)

    @rule(upstream_id=IDS, rows=st.integers(0, 3), commit=COMMITS)
    def apply(self, upstream_id: str, rows: int, commit: int) -> None:
        position = str(Position(commit, 0))
        update = TableUpdate(upstream_id, rows_copied=rows, position=position)
        batch = BatchRecord(self.batch, {"lsn": self.batch})
        if upstream_id not in self.tables:
            with pytest.raises(TransitionError):
                self.store.apply_batch(batch, [update])
            return
        assert self.store.apply_batch(batch, [update])
        assert not self.store.apply_batch(batch, [update])
        self.batch += 1
        table = self.tables[upstream_id]
        table |= {"rows": table["rows"] + rows, "position": position}
        # What a copy has brought so far counts for nothing if it begins again.
        if rows and table["state"] is not TableState.DATA_SYNC:
            table["attempts"] = 0

    # Versions

    def _held(self, upstream_id: str, position: Position) -> tuple[int, list[str]] | None:
        versions = self.versions.get(upstream_id, {})
        index = bisect_right(sorted(versions), position) - 1
        return versions[sorted(versions)[index]] if index >= 0 else None

    @rule(upstream_id=IDS, columns=COLUMNS, commit=COMMITS, joined=st.booleans())
    def put(self, upstream_id: str, columns: list[str], commit: int, joined: bool) -> None:
        position = Position(commit, 0)
        held = self._held(upstream_id, position)
        if held is None or held[1] != columns:
            held = (self.highest.get(upstream_id, 0) + 1, columns)
            self.highest[upstream_id] = held[0]
            self.versions.setdefault(upstream_id, {})[position] = held
        if joined:
            with self.place.join(self.run) as second:
                stored = second.put_schema(schema_of(upstream_id, columns), position)
            self.store.require_owner()
        else:
            stored = self.store.put_schema(schema_of(upstream_id, columns), position)
        assert stored == schema_of(upstream_id, columns, held[0])

    @rule(commit=COMMITS)
    def prune(self, commit: int) -> None:
        dropped = 0
        for versions in self.versions.values():
            passed = sorted(position for position in versions if position <= Position(commit, 0))[:-1]
            for position in passed:
                if versions[position][0] != max(number for number, _ in versions.values()):
                    del versions[position]
                    dropped += 1
        assert self.store.prune_schemas(Position(commit, 0)) == dropped

    # Requests and letters

    @rule(table=IDS, kind=st.sampled_from(["resync", "pause", "retry"]))
    def ask(self, table: str, kind: Any) -> None:
        self.store.ask(kind, table)
        self.requests.add((kind, table))

    @rule()
    def finish_all(self) -> None:
        for request in self.store.open_requests():
            self.store.finish_request(request.id)
        self.requests.clear()

    @rule(upstream_id=IDS, commit=COMMITS)
    def keep(self, upstream_id: str, commit: int) -> None:
        self.store.put_dead_letter(upstream_id, "public.x", str(Position(commit, 0)), kind="a", reason="b")
        kept = self.letters.setdefault((upstream_id, commit), [0, "waiting"])
        kept[0] += 1
        kept[1] = "skipped" if kept[1] == "skipped" else "waiting"

    @rule(status=st.sampled_from(["waiting", "skipped", "resolved"]), index=st.integers(0, 9))
    def settle(self, status: Any, index: int) -> None:
        letters = self.store.dead_letters()
        if letters:
            letter = letters[index % len(letters)]
            self.store.settle_dead_letter(letter.id, status)
            self.letters[letter.upstream_id, Position.parse(letter.position).commit][1] = status

    @rule(upstream_id=IDS, count=st.integers(1, 2))
    def skip(self, upstream_id: str, count: int) -> None:
        if upstream_id not in self.tables:
            return
        letters = [each for each in self.store.dead_letters(status="waiting") if each.upstream_id == upstream_id][
            :count
        ]
        self.store.skip_dead_letters(upstream_id, [letter.id for letter in letters])
        for letter in letters:
            self.letters[upstream_id, Position.parse(letter.position).commit][1] = "skipped"
        self._recover(upstream_id)

    # Runs

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = self.place.open()
        self.run = self.store.claim_run()
        for table in self.tables.values():
            table["state"] = durable(table["state"])

    @rule()
    def be_replaced(self) -> None:
        later = self.place.open()
        self.run = later.claim_run()
        with pytest.raises(OwnedError):
            self.store.add_table("1", "public.fenced")
        self.store.close()
        self.store = later
        for table in self.tables.values():
            table["state"] = durable(table["state"])

    @invariant()
    def runner_and_reader_agree_with_the_model(self) -> None:
        if not self.run:
            return
        with self.place.open_reading() as reader:
            self._compare(self.store, shows_passing=True)
            self._compare(reader, shows_passing=False)
            assert [all_versions(self.store, i) for i in "123"] == [all_versions(reader, i) for i in "123"]

    def _compare(self, store: StateStore, *, shows_passing: bool) -> None:
        def state_of(state: TableState) -> TableState:
            return state if shows_passing else durable(state)

        seen = {
            table.upstream_id: {
                "name": table.name,
                "state": table.state,
                "rows": table.rows_copied,
                "attempts": table.attempts,
                "paused": table.paused_at is not None,
                "failed_in": table.failed_in,
                "position": table.position,
            }
            for table in store.tables()
        }
        assert seen == {key: table | {"state": state_of(table["state"])} for key, table in self.tables.items()}
        for upstream_id in "123":
            expected = sorted(self.versions.get(upstream_id, {}).items())
            assert all_versions(store, upstream_id) == [
                (position, schema_of(upstream_id, columns, number)) for position, (number, columns) in expected
            ]
            table = store.table(upstream_id)
            assert table is None or table.version == (expected[-1][1][0] if expected else None)
        assert {(request.kind, request.table) for request in store.open_requests()} == self.requests
        assert {
            (letter.upstream_id, Position.parse(letter.position).commit): [letter.tries, letter.status]
            for letter in store.dead_letters()
        } == self.letters


def check(address: StoreAddress, examples: int, steps: int) -> None:
    machine = type("Machine", (StoreMachine,), {"address": address})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_store_in_a_file_answers_as_dictionaries_would(tmp_path: Path) -> None:
    check(SqliteStore("any", tmp_path), examples=40, steps=40)


def test_a_store_in_postgres_answers_as_dictionaries_would(tmp_path: Path, database: PostgresDatabase) -> None:
    check(PostgresStore("any", tmp_path, database.dsn), examples=4, steps=25)
