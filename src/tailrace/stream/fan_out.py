"""Several destinations of one source: a pipeline for each, in one process and one Spark, fed by one receiver."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from tailrace.config import pipeline as configuration
from tailrace.config.pipeline import MemberConfig, PipelineConfig
from tailrace.config.registry import open_source, require_apart
from tailrace.destination import Destination
from tailrace.errors import ConfigError, Finding, LostError, TailraceError
from tailrace.source.source import PIPELINE, Source, reader_of
from tailrace.state import RunnerLock, StateStore
from tailrace.state.status import PipelineStatus
from tailrace.stream.former import forget_former
from tailrace.stream.pipeline import OnProgress, Pipeline
from tailrace.stream.run_record import record_first_refusal
from tailrace.stream.spark_session import build_session
from tailrace.system.backoff import LOOK_SECONDS, Backoff, wait
from tailrace.system.failpoint import reach

BACKOFF = Backoff((1.0, 2.0, 5.0, 10.0, 30.0))
STOP_SECONDS = 10.0
"""How long a run that is stopped at once waits for its destinations."""
LEAST_SLOTS = 2
"""Tasks that each destination can run at the same time, however few cores there are."""

_LOCAL = re.compile(r"local(?:\[(\*|\d+)(,[^]]*)?\])?")
_log = logging.getLogger(__name__)


class SharedSource:
    """The source of all destinations: prepared, and received from, once. Safe to use from several threads."""

    def __init__(self, source: Source, members: Sequence[MemberConfig]) -> None:
        self.lock = threading.Lock()
        self.members = members
        self._source = source
        self._received = ExitStack()
        self._is_open = False
        self._lost: dict[str, LostError] = {}

    def open(self, member: MemberConfig, store: StateStore, draining: threading.Event) -> None:
        """Prepare the source and receive from it, unless that is done. Raises LostError where what the source may have
        forgotten, as this destination knows it, is no longer here."""
        with self.lock:
            if not self._is_open:
                self._lost = self._find_lost()
                self._source.prepare(draining.is_set)
                reach("pipeline.prepared")
                kept = {reader_of(each.member) for each in self.members}
                forget_former(self._source, member.store_address, kept)
                self._received.enter_context(self._source.receive())
                self._is_open = True
        # After a reset of this destination nothing is lost to it any more.
        if member.member in self._lost and store.source_status() is not None:
            raise self._lost[member.member]

    def _find_lost(self) -> dict[str, LostError]:
        found: dict[str, LostError] = {}
        for member in self.members:
            # A destination that has not run yet has no state.
            with suppress(ConfigError), member.store_address.open_reading() as store:
                status = store.source_status()
                try:
                    if status is not None and status.received is not None:
                        self._source.require_received(status.received)
                except LostError as error:
                    found[member.member] = error
        return found

    def close(self) -> None:
        """Receive no more."""
        self._received.close()


class Member(Pipeline):
    """One of the destinations. It has its own state, cursor, retries and errors, and shares the source's receiver."""

    config: MemberConfig
    _shared: SharedSource

    def share(self, shared: SharedSource) -> None:
        """Before a run: the source that it gets its changes from."""
        self._shared = shared
        self._draining.clear()

    def _receive(self, store: StateStore, stack: ExitStack) -> None:
        self._shared.open(self.config, store, self._draining)

    def _open_session(self) -> SparkSession:
        spark = self.config.spark
        master = widen_master(spark.master, len(self._shared.members))
        # A destination whose tasks hang must leave the others theirs.
        conf = {"spark.scheduler.mode": "FAIR", **spark.conf}
        with self._shared.lock:
            session = build_session(self.config.place.name, master, conf, self._modules)
        session.sparkContext.setLocalProperty("spark.scheduler.pool", self.config.name)
        return session

    def _cores_of(self, session: SparkSession) -> int:
        return max(1, super()._cores_of(session) // len(self._shared.members))

    def _lanes_of(self, cores: int) -> int:
        # Tasks of a lane may hang in the destination, and must then leave the others their share.
        return min(super()._lanes_of(cores), cores)


class FanOut:
    """`FanOut(name=…, source={…}, destinations={"lake": {…}, "search": {…}}, …)`: the words of the YAML file.

    A destination may also be an object, such as `MyDestination(…)`. `run` blocks; `drain` from another thread or a
    signal handler ends it at a batch boundary of each destination, `stop` at once. Nothing that happens to one
    destination stops or delays another.
    """

    def __init__(
        self,
        *,
        name: str,
        source: Mapping[str, Any],
        destinations: Mapping[str, Destination | Mapping[str, Any]],
        **options: Any,
    ) -> None:
        listed = [(key, each if isinstance(each, Destination) else dict(each)) for key, each in destinations.items()]
        sections = {**options, "name": name, "source": source, "destinations": listed}
        self._init(configuration.all_from_dict(sections))

    @classmethod
    def from_configs(cls, configs: Sequence[PipelineConfig]) -> FanOut:
        """All destinations of a file, as `tailrace.config.pipeline.load_all` reads it."""
        found = cls.__new__(cls)
        found._init(configs)
        return found

    @classmethod
    def from_file(cls, path: str | Path) -> FanOut:
        return cls.from_configs(configuration.load_all(path))

    def _init(self, configs: Sequence[PipelineConfig]) -> None:
        members = [each for each in configs if isinstance(each, MemberConfig)]
        if not members:
            raise ConfigError("a FanOut has several destinations", fix="use Pipeline for one")
        require_apart(members)
        self.members = {each.member: Member.from_config(each) for each in members}
        self.name, self.state = members[0].place.name, members[0].place.state
        source = open_source(members[0])
        self.source: Source = replace(source, context=replace(source.context, reader=PIPELINE))
        self._draining = threading.Event()
        self._errors: dict[str, Exception] = {}
        self._progress = threading.Lock()

    def check(self) -> dict[str, list[Finding]]:
        """Everything that would prevent a run, by destination. Changes nothing."""
        return {name: member.check() for name, member in self.members.items()}

    def status(self) -> dict[str, PipelineStatus]:
        """The status of each destination that has run; needs neither Spark nor the upstream."""
        found: dict[str, PipelineStatus] = {}
        for name, member in self.members.items():
            with suppress(ConfigError):
                found[name] = member.status()
        return found

    def drain(self) -> None:
        """Finish the current batch of each destination, then end `run`. A repeat changes nothing."""
        self._draining.set()
        for member in self.members.values():
            member.drain()

    def stop(self) -> None:
        """End `run` without waiting for batches: the next start repeats them."""
        self._draining.set()
        for member in self.members.values():
            member.stop()

    def run(self, once: bool = False, on_progress: OnProgress | None = None) -> None:
        """Run every destination: with `once` up to the source's position now, else until drained.

        A destination that fails is tried again while another one runs. Raises the error of the first that failed once
        none runs any more. `on_progress` gets the status of one destination at a time.
        """
        with ExitStack() as stack:
            stack.callback(self._draining.clear)
            stack.enter_context(RunnerLock(self.state))
            shared = SharedSource(self.source, [member.config for member in self.members.values()])
            stack.callback(shared.close)
            self._errors.clear()
            failed, threads = False, []
            for name, member in self.members.items():
                member.share(shared)
                arguments = (name, member, once, on_progress)
                threads.append(threading.Thread(target=self._keep, args=arguments, name=f"run {name}", daemon=True))
            for thread in threads:
                thread.start()
            try:
                while any(thread.is_alive() for thread in threads):
                    for thread in threads:
                        thread.join(LOOK_SECONDS)
                    if len(self._errors) == len(self.members) and not self._draining.is_set():
                        failed = True
                        self._draining.set()
            except BaseException:
                self.stop()
                for thread in threads:
                    thread.join(STOP_SECONDS)
                raise
            if failed or (once and self._errors):
                raise next(iter(self._errors.values()))

    def _keep(self, name: str, member: Member, once: bool, on_progress: OnProgress | None) -> None:
        """Run one destination until it is done, again and again while it fails and another one does not."""

        def show(status: PipelineStatus) -> None:
            self._errors.pop(name, None)
            if on_progress is not None:
                with self._progress:
                    on_progress(status)

        attempt = 0
        while not self._draining.is_set():
            batches = _last_batch(member)
            try:
                member.run(once=once, on_progress=show)
            except Exception as error:  # noqa: BLE001 - the run raises it once no destination runs any more
                self._errors[name] = error
                if isinstance(error, TailraceError):
                    record_first_refusal(member.store, error)
                if once:
                    return
                attempt = 1 if _last_batch(member) != batches else attempt + 1
                seconds = BACKOFF.delay(attempt)
                message = error.located if isinstance(error, TailraceError) else f"unexpected {type(error).__name__}"
                _log.warning("the destination %s stopped and is tried again in %.0f s: %s", name, seconds, message)
            else:
                return
            wait(seconds, self._draining.is_set)


def _last_batch(member: Member) -> int | None:
    """By which a run shows that it has done something."""
    try:
        return member.status().batch
    except TailraceError:
        return None


def widen_master(master: str, members: int) -> str:
    """The Spark master with slots for the tasks of so many destinations, each as many as it would have alone. A cluster
    has the slots that it has: there each gets its share. Pure but for the number of this machine's cores."""
    found = _LOCAL.fullmatch(master)
    if found is None:
        return master
    named = found[1] or "1"
    cores = os.cpu_count() or 1 if named == "*" else int(named)
    return f"local[{max(LEAST_SLOTS, cores) * members}{found[2] or ''}]"
