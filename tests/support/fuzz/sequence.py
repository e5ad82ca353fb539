"""Runs a script from an empty schema to the comparison of both ends, in one database of a running server."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import psycopg

from tailrace.destination.delta.destination import DeltaDestination
from tailrace.option.table import TableOptions
from tailrace.source import discovery
from tailrace.source.follower import Limit
from tailrace.source.postgres import connection, event_trigger, frame_builder
from tailrace.source.postgres.slot import drop_slot
from tailrace.stream import data_source
from tests.support.database import PostgresDatabase
from tests.support.fuzz.comparison import differences, held_in_lake, held_in_memory, unpublished
from tests.support.fuzz.memory_destination import KEPT, MemoryDestination
from tests.support.fuzz.schema_statement import ALL_ACTIONS
from tests.support.fuzz.script import (
    Alone,
    Batch,
    Discover,
    Receive,
    Restart,
    Resync,
    Script,
    Setting,
    Settle,
    Step,
    Transaction,
)
from tests.support.fuzz.session_pool import SessionPool
from tests.support.fuzz.stepped_pipeline import SteppedPipeline
from tests.support.fuzz.stepped_source import SteppedSource
from tests.support.source_making import make_postgres

NAME = "fuzz"
SCHEMA, EXCLUDED = "app", "other"
"""Unqualified names are of the followed schema; tables of the other one match no pattern."""

PREPARATION = f"""
DROP SCHEMA IF EXISTS {SCHEMA}, {EXCLUDED} CASCADE;
CREATE SCHEMA {SCHEMA}; CREATE SCHEMA {EXCLUDED};
CREATE FUNCTION {EXCLUDED}.run(command text) RETURNS void LANGUAGE plpgsql AS 'BEGIN EXECUTE command; END';
CREATE FUNCTION {EXCLUDED}.plus(value bigint) RETURNS bigint LANGUAGE sql IMMUTABLE AS 'SELECT value + 1';
"""

PARTITIONS = re.compile(
    r"\b(ATTACH|DETACH) PARTITION\b|\bPARTITION OF\b|^(TRUNCATE|DROP TABLE) leaf|\bleaf\w* SET UNLOGGED\b",
    re.I,
)
"""What docs/schema-changes.md says is not seen without the event trigger, as far as sequences do it."""


def execute(session: psycopg.Connection[Any], step: Transaction) -> None:
    """The statements as the application sends them, within its transaction."""
    for statement in ["; ".join(step.statements)] if step.joined else step.statements:
        session.execute(statement.encode())


class SequenceError(AssertionError):
    """A sequence after which the two ends differ, or that ended with an error; with the script of it."""

    def __init__(self, reason: str, script: Script) -> None:
        super().__init__(f"{reason}\n\n{script}")
        self.reason = reason
        self.script = script


class Sequence:
    """One sequence under way. `session` is the application's."""

    def __init__(self, database: PostgresDatabase, session: psycopg.Connection[Any], setting: Setting) -> None:
        self.session = session
        self.setting = setting
        self.folder = Path(tempfile.mkdtemp(prefix="tailrace-fuzz-", dir=_fast_folder()))
        self.removed: set[int] = set()
        self.unseen: set[int] = set()
        made = make_postgres(
            database.dsn,
            self.folder,
            NAME,
            TableOptions(include=[f"{SCHEMA}.*"]),
            slot=f"{NAME}_{database.name}",
            copying={"chunk_bytes": 8192, "parallel": 1},
            journal={"segment_bytes": 2000},
            heartbeat=10.0,
        )
        source = SteppedSource(made.options, made.context)
        place = str(self.folder)
        KEPT[place] = {}
        lake = DeltaDestination(path=str(self.folder / "lake"))
        destination = lake if setting.destination == "delta" else MemoryDestination(place=place)
        self.pipeline = SteppedPipeline(
            source,
            destination,
            session,
            limit=Limit(setting.limit, setting.limit_bytes),
            lanes=setting.lanes,
            pieces=setting.pieces,
        )

    def begin(self, tables: Iterable[str]) -> None:
        self.session.execute(f"DROP PUBLICATION IF EXISTS {NAME}")
        self.session.execute(PREPARATION.encode())
        drop_slot(self.session, self.pipeline.source.options.slot)
        self.session.execute(f"SET search_path = {SCHEMA}")
        for statement in tables:
            self.session.execute(statement.encode())
        self.pipeline.source.prepare()

    def take(self, step: Step) -> None:
        pipeline = self.pipeline
        match step:
            case Transaction():
                self._commit(step)
            case Alone(statement):
                with suppress(psycopg.Error):
                    self.session.execute(statement.encode())
            case Receive(crash):
                with pipeline.dying(crash):
                    pipeline.receive(keeps=bool(crash))
            case Batch(crash):
                with pipeline.dying(crash):
                    pipeline.batch()
            case Discover():
                pipeline.discover()
            case Restart():
                pipeline.crash()
            case Resync(table):
                pipeline.run.store.ask("resync", table)
            case Settle():
                pipeline.settle()

    def _commit(self, step: Transaction) -> None:
        before = self._roots() if any(map(PARTITIONS.search, step.statements)) else set()
        published = self._members()
        with suppress(psycopg.Error), self.session.transaction():
            execute(self.session, step)
            # What was taken out of the publication stays out. CASCADE takes out a table whose listed column is dropped.
            now = self._members()
            self.removed = (self.removed | (published - now)) - now
            if before:
                self.unseen |= before | self._roots()

    def _members(self) -> set[int]:
        rows = self.session.execute(
            "SELECT r.prrelid::int8 FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid"
            " WHERE p.pubname = %s",
            [NAME],
        )
        return {oid for (oid,) in rows.fetchall()}

    def _publishes_all(self) -> bool:
        row = self.session.execute(
            "SELECT pubinsert AND pubupdate AND pubdelete AND pubtruncate FROM pg_publication WHERE pubname = %s",
            [NAME],
        ).fetchone()
        assert row is not None
        return bool(row[0])

    def _roots(self) -> set[int]:
        return {oid for (oid,) in self.session.execute("SELECT oid::int8 FROM pg_class WHERE relkind = 'p'").fetchall()}

    def finish(self) -> None:
        """Bring the pipeline to its end, and raise AssertionError when the two ends differ without anyone saying so."""
        pipeline = self.pipeline
        if not self._publishes_all():
            # What is not published now cannot arrive.
            self._commit(Transaction((f"ALTER PUBLICATION {NAME} SET (publish = '{ALL_ACTIONS}')",)))
        if not self.setting.trigger:
            # The catalog shows some changes only at the next start.
            pipeline.settle()
            pipeline.crash()
        pipeline.settle()
        found = self._found()
        assert not found, "; ".join(found.values())

    def _found(self) -> dict[int, str]:
        """By OID, what is wrong without anyone saying so; with the trigger, also what is said."""
        errored = {int(table.upstream_id): str(table.reason) for table in self.pipeline.errored()}
        left_out = {
            oid: f"{name} is not followed"
            for oid, name in unpublished(self.session, NAME, SCHEMA).items()
            if oid not in self.removed
        }
        is_lake = self.setting.destination == "delta"
        held = held_in_lake(self.folder / "lake") if is_lake else held_in_memory(str(self.folder))
        found = left_out | differences(self.session, NAME, SCHEMA, held, lenient=not self.setting.trigger)
        if self.setting.trigger:
            return found | {oid: f"Errored: {reason}" for oid, reason in errored.items()}
        # A table in error says that it is not what it is upstream.
        return {oid: text for oid, text in found.items() if oid not in errored.keys() | self.unseen}

    def close(self) -> None:
        self.pipeline.crash()
        KEPT.pop(str(self.folder), None)
        shutil.rmtree(self.folder, ignore_errors=True)


class Fuzzer:
    """Two databases of one server, one with the event trigger and one without, in which sequences run."""

    def __init__(self, make_database: Callable[[], PostgresDatabase]) -> None:
        self._make_database = make_database
        self._pool = SessionPool()
        self._databases: dict[bool, tuple[PostgresDatabase, psycopg.Connection[Any]]] = {}

    def _database(self, *, trigger: bool) -> tuple[PostgresDatabase, psycopg.Connection[Any]]:
        if trigger not in self._databases:
            database = self._make_database()
            session = database.connect(prepare_threshold=None)
            session.add_notice_handler(lambda notice: None)
            session.execute("SET client_min_messages = error")
            if trigger:
                event_trigger.install(session)
            self._databases[trigger] = (database, session)
        return self._databases[trigger]

    def close(self) -> None:
        self._pool.close()
        for _, session in self._databases.values():
            session.close()

    @contextmanager
    def _stopped_clock(self, setting: Setting) -> Iterator[None]:
        with ExitStack() as stack:
            # The script says when the pipeline looks for tables, and when it reads what stops one.
            stack.enter_context(mock.patch.object(discovery, "DISCOVERY_SECONDS", float("inf")))
            stack.enter_context(mock.patch.object(data_source, "IDLE_SECONDS", 0.0))
            stack.enter_context(mock.patch.object(connection, "connect", self._pool.connect))
            stack.enter_context(mock.patch.object(frame_builder, "FRAME_BYTES", setting.frame_bytes))
            yield

    def run(
        self,
        tables: tuple[str, ...],
        steps: Callable[[psycopg.Connection[Any]], Iterable[Step]],
        setting: Setting,
    ) -> Script:
        """Run the steps, each asked for once the one before it is done. Raises SequenceError."""
        database, session = self._database(trigger=setting.trigger)
        taken: list[Step] = []
        with self._stopped_clock(setting):
            sequence = Sequence(database, session, setting)
            try:
                sequence.begin(tables)
                for step in steps(session):
                    taken.append(step)
                    sequence.take(step)
                sequence.finish()
            except Exception as error:
                reason = str(error) if type(error) is AssertionError else f"{type(error).__name__}: {error}"
                raise SequenceError(reason, Script(tables, tuple(taken), setting)) from error
            finally:
                sequence.close()
        return Script(tables, tuple(taken), setting)

    def replay(self, script: Script) -> Script:
        return self.run(script.tables, lambda _: script.steps, script.setting)


def _fast_folder() -> str | None:
    """A folder in memory where the machine has one: nothing here tests what a power cut leaves."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
