"""A pipeline: one source, some tables, one destination, a state store, and its life as a service."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tailrace.alert.watch import AlertWatch, tell_refusal
from tailrace.config import pipeline as configuration
from tailrace.config.pipeline import PipelineConfig
from tailrace.config.registry import check, open_destination, open_source
from tailrace.destination import Batch, Committer, Destination, EventDestination, Stage
from tailrace.errors import ConfigError, Finding, TailraceError, UnavailableError, problems, require, require_some
from tailrace.model.last_batch import LastBatch
from tailrace.source.follower import Limit, Offset
from tailrace.source.source import PIPELINE, Source, SourceContext
from tailrace.state import RunnerLock, StateStore, StoreAddress
from tailrace.state.applied import WHOLE
from tailrace.state.status import PipelineStatus
from tailrace.stream.block import Pickled
from tailrace.stream.checkpoint import Checkpoint
from tailrace.stream.commit_listener import CommitListener
from tailrace.stream.data_source import Feed, bound, drain_file, lanes_for, note_cores
from tailrace.stream.destination_check import DestinationCheck
from tailrace.stream.executor_check import ExecutorGate, kept_gate, require_executors
from tailrace.stream.former import forget_former
from tailrace.stream.inspection import Inspection
from tailrace.stream.micro_batch import Applier, KnownTables
from tailrace.stream.progress import EVENT_SECONDS, ProgressRecorder
from tailrace.stream.run_record import record_refusal, recorded
from tailrace.stream.shared_folder import shared_folder_findings, shared_folders
from tailrace.stream.spark_error import passed_on, portable_errors, recognise
from tailrace.stream.spark_session import build_session
from tailrace.stream.supervisor import Supervisor
from tailrace.system import trace
from tailrace.system.backoff import Backoff, wait
from tailrace.system.failpoint import reach
from tailrace.system.ticker import Ticker

BACKOFF = Backoff((0.5, 1.0, 2.0, 5.0, 10.0, 30.0))
ONCE_ATTEMPTS = 8
STATUS_SECONDS = 0.5
CHECK_SECONDS = 0.05
CHECK_PATIENCE_SECONDS = 60.0
"""How long the end of a run with `--once` waits for the check before a retry: the upstream may not answer."""
QUIET_SECONDS = 0.5
"""Two signs of the current batch are less than this apart."""

_log = logging.getLogger(__name__)

OnProgress = Callable[[PipelineStatus], None]


@dataclass(frozen=True)
class PipelineRun:
    """What one call of `Pipeline.run` works with."""

    session: SparkSession
    store: StateStore
    number: int
    recorder: ProgressRecorder
    supervisor: Supervisor
    listener: CommitListener
    committer: Committer
    check: DestinationCheck
    once: bool
    on_progress: OnProgress | None

    def show(self) -> None:
        if self.on_progress is not None:
            self.on_progress(self.recorder.status())

    def poll(self) -> bool:
        """Between batches: supervise the tables and report the status. Whether a retry waits for a check."""
        self.committer.poll()
        gear = self.recorder.note_source()
        self.recorder.note_delivery(self.committer.delivery())
        is_checking = self.supervisor.poll(is_full=gear == "full" and not self.recorder.waits_for_another())
        self.show()
        return is_checking

    def is_done(self, should_stop: Callable[[], bool]) -> bool:
        """Whether the run ends with the query. With `once` it goes on for a left-out table that may go on now."""
        if not self.once:
            return True
        until = time.monotonic() + CHECK_PATIENCE_SECONDS
        while self.poll() and time.monotonic() < until and not should_stop():
            wait(CHECK_SECONDS, should_stop)
        return not self.recorder.has_freed()


class Pipeline:
    """`Pipeline(name=…, source={…}, tables={…}, destination={…}, state=…)`: the words of the YAML file.

    Source, destination and store may also be objects, such as `MySource(MyOptions(…))`, `MyDestination(…)` or a
    `StoreAddress`: they become parts of this pipeline.
    `run` blocks; `drain` from another thread or a signal handler ends it at a batch boundary, `stop` at once.
    """

    def __init__(
        self,
        *,
        name: str,
        source: Source | Mapping[str, Any],
        destination: Destination | Mapping[str, Any],
        store: StoreAddress | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        sections = {**options, "name": name, "destination": destination}
        sections["source"] = source.options if isinstance(source, Source) else source
        if store is not None and not isinstance(store, StoreAddress):
            sections["store"] = store
        config = configuration.from_dict(sections)
        bound = None
        if isinstance(source, Source):
            bound = source.bind(SourceContext(config.name, config.tables, config.state))
            config = config.model_copy(update={"source": bound.options})
        address = store.bind(config.name, config.state) if isinstance(store, StoreAddress) else None
        self._init(config, bound, address)

    @classmethod
    def from_config(cls, config: PipelineConfig) -> Self:
        pipeline = cls.__new__(cls)
        pipeline._init(config)
        return pipeline

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        return cls.from_config(configuration.load(path))

    def _init(self, config: PipelineConfig, source: Source | None = None, store: StoreAddress | None = None) -> None:
        self.config = config
        self.store = store or config.store_address
        self.source = source if source is not None else open_source(config)
        self.destination = open_destination(config)
        self._draining = threading.Event()
        self._in_batch = threading.Event()
        self._query: StreamingQuery | None = None

    # -- for people ---------------------------------------------------------------------------------------

    def check(self) -> list[Finding]:
        """Everything that would prevent a run. Changes nothing."""
        shared = shared_folder_findings(self._shared_folders, self.config.spark.master)
        return [*check(self.source, self.destination), *shared]

    def status(self) -> PipelineStatus:
        """The status in the state store; needs neither Spark nor the upstream."""
        with self.store.open_reading() as store:
            return PipelineStatus.read(store)

    def drain(self) -> None:
        """Finish the current batch, then end `run`, or the next run when none is under way.

        Returns at once; a repeat changes nothing.
        """
        self._draining.set()

    def stop(self) -> None:
        """End `run` without waiting for the batch: the next start repeats it."""
        self._draining.set()
        if (query := self._query) is not None:
            query.stop()

    def run(self, once: bool = False, on_progress: OnProgress | None = None) -> None:
        """Copy what is missing and follow the changes: with `once` up to the source's position now, else until drained.

        Unavailable systems are retried with backoff. Every other error is raised and names its fix.
        """
        with trace.kept(Path(self.config.state)), ExitStack() as stack:
            # A drain request ends this run only.
            stack.callback(self._draining.clear)
            findings = self._require_ready()
            stack.enter_context(RunnerLock(self.config.state))
            store = stack.enter_context(self.store.open())
            # This process holds the folder's lock, so no other one on this machine runs the pipeline.
            lease = self.config.store.lease
            number = store.claim_run(seconds=lease, takes_over=not store.shared)
            stack.callback(_quietly, store.release_lease)
            # The ticker stops once a later run has begun; this run then fails with its next write to the store.
            stack.enter_context(Ticker(partial(_quietly, store.renew_lease), lease / 3))
            stack.enter_context(recorded(store))
            if self.config.alerts is not None:
                stack.enter_context(AlertWatch(self.config.alerts, store, once=once))
            self._checkpoint.require(store)
            is_moved = self._note_destination(store)
            drain_file(Path(self.config.state)).unlink(missing_ok=True)
            try:
                self._receive(store, stack)
            except UnavailableError:
                if self._draining.is_set():
                    return
                raise
            committer = stack.enter_context(self.destination.committer(self.config.name))
            recorder = ProgressRecorder(store, self.source, self.config.tables)
            recorder.open_tables(self.source.tables())
            self._record_last_batch(recorder)
            recorder.stop_tables(problems(findings), self._checkpoint.planned())
            # After a reset the same pipeline counts its batches from 0 again, under a new epoch.
            life = f"{self.config.name}/{store.pipeline().epoch}"
            check = DestinationCheck(store, self.destination, life, recorder)
            inspection = stack.enter_context(Inspection(self.check, self.source.notices, recorder.note_notices))
            supervisor = Supervisor(
                store,
                self.config.tables,
                recorder.is_stopped,
                problems_since=inspection.problems_since,
                fits=check.fits,
            )
            supervisor.poll()
            if self._draining.is_set():
                return
            session = self._open_session()
            listener = CommitListener(self.config.name, partial(self._committed, recorder, committer))
            session.streams.addListener(listener)
            stack.callback(session.streams.removeListener, listener)
            stack.callback(self.destination.shutdown)
            require_executors(session, self.config.spark.master, self._shared_folders)
            run = PipelineRun(
                session, store, number, recorder, supervisor, listener, committer, check, once, on_progress
            )
            self._keep_running(run, is_compared=is_moved)
            if once:
                committer.drain(self._draining.is_set)

    # -- before the first batch ---------------------------------------------------------------------------

    def _require_ready(self) -> list[Finding]:
        """The findings of a check. Raises PreflightError for errors about the pipeline itself, and for a pipeline that
        never ran and of which no table can be followed."""
        try:
            findings = self.check()
            require(findings)
            if problems(findings) and not self._has_run():
                require_some(findings, [str(table.table) for table in self.source.tables()])
        except TailraceError as error:
            record_refusal(self.store, error)
            tell_refusal(self.config.alerts, self.store, error)
            raise
        return findings

    def _has_run(self) -> bool:
        try:
            with self.store.open_reading() as store:
                return store.last_batch() is not None
        except ConfigError:
            return False

    def _receive(self, store: StateStore, stack: ExitStack) -> None:
        """Prepare the source, and receive what it pushes until the stack is closed."""
        self.source.prepare(self._draining.is_set)
        reach("pipeline.prepared")
        self._require_received(store)
        forget_former(self.source, self.store, {PIPELINE})
        stack.enter_context(self.source.receive())

    def _require_received(self, store: StateStore) -> None:
        if (status := store.source_status()) is not None and status.received is not None:
            self.source.require_received(status.received)

    def _open_session(self) -> SparkSession:
        return build_session(self.config.name, self.config.spark.master, self.config.spark.conf, self._modules)

    @property
    def _modules(self) -> list[str]:
        return [type(part).__module__ for part in (self.source, self.destination)]

    def _cores_of(self, session: SparkSession) -> int:
        """The cores that are registered now, as far as they are this pipeline's."""
        return session.sparkContext.defaultParallelism

    def _lanes_of(self, cores: int) -> int:
        return self.destination.lanes or lanes_for(cores)

    @property
    def _checkpoint(self) -> Checkpoint:
        return Checkpoint(Path(self.config.state) / "checkpoint")

    @property
    def _stage(self) -> Stage:
        return Stage(Path(self.config.state) / "staged", self.config.name)

    @property
    def _shared_folders(self) -> dict[str, Path]:
        return shared_folders(self.source, self.destination, self._stage.folder)

    def _note_destination(self, store: StateStore) -> bool:
        """Warn about a new destination, and return whether it is: a table that is missing there stops with its next
        change."""
        name = self.destination.name
        before = self._checkpoint.note_destination(name, store)
        if before is not None and store.last_batch() is not None:
            _log.warning(
                "earlier batches were written to %s; from now on they are written to %s. Unless you moved the tables,"
                " set `destination` back, or begin again: tailrace reset FILE, then tailrace run FILE",
                before,
                name,
            )
            return True
        return False

    def _record_last_batch(self, recorder: ProgressRecorder) -> None:
        """Record the last batch of Spark's log if a crash kept it from being recorded."""
        last = self._checkpoint.last_commit()
        if last is not None and last[0] > recorder.last_batch:
            self._checkpoint.sync("commits", last[0])
            recorder.committed(*last, seconds=0.0)

    # -- running ------------------------------------------------------------------------------------------

    def _require_fit(self, run: PipelineRun) -> None:
        """Stop the tables that are older or newer than the state. Raises LostError for a destination as a whole."""
        applied, planned = run.store.applied_batch(), self._checkpoint.last_planned()
        is_pending = planned is not None and (applied is None or planned.id > applied.id)
        if (known := run.recorder.held()) is not None:
            next_batch = planned.id if planned is not None and is_pending else (applied.id if applied else -1) + 1
            run.committer.require_fit(Batch(run.check.pipeline, next_batch, known=known))
        run.check.compare(planned if is_pending else None)

    def _keep_running(self, run: PipelineRun, *, is_compared: bool) -> None:
        attempt = 0
        while not self._draining.is_set():
            applied = run.recorder.last_batch
            try:
                if not is_compared:
                    self._require_fit(run)
                    is_compared = True
                with kept_gate(
                    self.config.spark.master, self.config.name, self._shared_folders, is_new=run.recorder.last_batch < 0
                ) as gate:
                    self._run_query(run, gate)
                if run.is_done(self._draining.is_set):
                    return
            except UnavailableError as error:
                # A batch that was committed shows that everything was available in between.
                attempt = 0 if run.recorder.last_batch != applied else attempt + 1
                if run.once and attempt >= ONCE_ATTEMPTS:
                    raise
                self._wait(run, error, BACKOFF.delay(attempt + 1))

    def _wait(self, run: PipelineRun, error: UnavailableError, seconds: float) -> None:
        """Wait before the next attempt: report the error, and keep supervising the rest."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._draining.is_set():
            run.committer.poll()
            # The store itself may be what is unavailable.
            with suppress(UnavailableError):
                run.recorder.waiting(error)
                run.recorder.note_delivery(run.committer.delivery())
                run.show()
            wait(min(left, STATUS_SECONDS), self._draining.is_set)

    def _run_query(self, run: PipelineRun, gate: ExecutorGate) -> None:
        config, session, recorder = self.config, run.session, run.recorder
        self._record_last_batch(recorder)
        # Executors may come and go, so lanes follow the cores from batch to batch, unless the destination sets them.
        cores = self._note_cores(session)
        lanes = self._lanes_of(cores)
        stage = self._stage
        limit = Limit(config.batch.max_rows, config.batch.max_bytes)
        # A name that was registered in one session cannot be registered in the next.
        format_name = f"tailrace_{uuid.uuid4().hex}"
        feed = Feed(self.source, limit, lanes, Pickled.of(self.destination), self.store, run.number, stage)
        feed = replace(feed, follows_cores=not self.destination.lanes, gate=gate)
        session.dataSource.register(bound(feed, format_name))
        applier = Applier(self.source, self.destination, lanes, stage, not run.once, gate)

        @portable_errors()
        def apply(blocks: DataFrame, batch_id: int) -> None:
            self._in_batch.set()
            try:
                recorder.require_owner()
                # The state must not know of this batch while a power cut could still undo the commit of the one before.
                self._checkpoint.sync("commits", batch_id - 1)
                self._checkpoint.sync("offsets", batch_id)
                if run.store.shared:
                    reach("pipeline.before_planned")
                    run.store.record_planned(self._checkpoint.entries(batch_id))
                reach("pipeline.before_apply")
                end = self._checkpoint.end_of(batch_id)
                known = recorder.known_tables()
                batch = Batch(run.check.pipeline, batch_id, end, self._known_whole(known))
                with run.committer.batch(batch):
                    lanes = self._lanes_of(self._cores_of(session))
                    results = replace(applier, lanes=lanes).apply(blocks, batch, known)
                recorder.applied(batch, results, run.committer.last_batch(batch.pipeline))
                reach("pipeline.applied")
            except Py4JJavaError as error:
                raise passed_on(error) from None
            finally:
                self._in_batch.clear()

        try:
            writer = (
                session.readStream.format(format_name)
                .load()
                .writeStream.foreachBatch(apply)
                .queryName(config.name)
                .option("checkpointLocation", str(self._checkpoint.folder))
            )
            if run.once:
                writer = writer.trigger(availableNow=True)
            else:
                writer = writer.trigger(processingTime=f"{config.batch.interval} seconds")
            self._query = writer.start()
            self._watch(self._query, run)
        except Exception as error:
            raise recognise(error) from error
        finally:
            if self._query is not None:
                self._query.stop()
                self._query = None
            run.show()

    def _note_cores(self, session: SparkSession) -> int:
        """The cores that are registered now, also noted for the planner."""
        cores = self._cores_of(session)
        note_cores(Path(self.config.state), cores)
        return cores

    def _known_whole(self, known: KnownTables) -> LastBatch | None:
        """The last batch that the destination holds as a whole. An event destination writes all tables together."""
        if isinstance(self.destination, EventDestination) and self.destination.takes_events and WHOLE not in known.held:
            return max(known.held.values(), key=lambda last: last.id, default=None)
        return known.held.get(WHOLE)

    def _watch(self, query: StreamingQuery, run: PipelineRun) -> None:
        """Wait until the query ends by itself, fails, or is drained."""
        shown = 0.0
        # Each look is a call into the JVM. A run with `once` ends with its query, for which someone waits.
        pause = CHECK_SECONDS if run.once else STATUS_SECONDS
        while query.isActive and not self._draining.wait(pause):
            run.listener.raise_failure()
            if time.monotonic() - shown >= STATUS_SECONDS:
                self._note_cores(run.session)
                run.poll()
                shown = time.monotonic()
        if self._draining.is_set():
            self._settle(query, run)
        if (failure := query.exception()) is not None:
            raise failure
        # The last batch's progress event may arrive after the query has ended.
        deadline = time.monotonic() + EVENT_SECONDS
        while run.recorder.unconfirmed and time.monotonic() < deadline:
            time.sleep(0.02)
        run.listener.raise_failure()

    def _committed(
        self,
        recorder: ProgressRecorder,
        committer: Committer,
        batch_id: int,
        offset: Offset,
        seconds: float,
        phases: Mapping[str, float],
    ) -> None:
        """Spark has logged the batch: make the log entry durable, then let the upstream forget."""
        reach("pipeline.before_release")
        self._checkpoint.sync("commits", batch_id)
        recorder.committed(batch_id, offset, seconds, phases)
        committer.settled(recorder.level)
        reach("pipeline.released")

    def _settle(self, query: StreamingQuery, run: PipelineRun) -> None:
        """Let the current batch finish and be committed. Stopping within a batch is safe, but the batch is repeated."""
        flag = drain_file(Path(self.config.state))
        flag.touch()
        quiet_since = time.monotonic()
        while query.isActive and time.monotonic() - quiet_since < QUIET_SECONDS:
            run.listener.raise_failure()
            if self._in_batch.is_set() or run.recorder.unconfirmed or _is_planning(query):
                quiet_since = time.monotonic()
            time.sleep(0.02)


def _is_planning(query: StreamingQuery) -> bool:
    """Whether Spark plans. If it is stopped then, it breaks connections within PySpark, which prints tracebacks."""
    status = query.status
    is_starting = status["message"] == "Initializing sources"
    return bool(is_starting or (status["isTriggerActive"] and status["isDataAvailable"]))


def _quietly(act: Callable[[], None]) -> None:
    # A lease that cannot be renewed now is renewed the next time; one that cannot be released expires.
    with suppress(UnavailableError):
        act()
