"""Runs pipelines in a separate process with one warm Spark session, so that memory and CPU time can be measured."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.process import Usage, cpu_by_process, cpu_seconds

MASTER = "local[2]"
_START_SECONDS = 120.0


@dataclass(frozen=True)
class MicroBatch:
    """What Spark reported for one batch; `at` is when Spark began to ask for new offsets."""

    id: int
    at: float
    milliseconds: dict[str, int]


@dataclass(frozen=True)
class Run:
    """One `Pipeline.run`. `seconds` is the time from the start of the query to its end."""

    called_at: float
    started_at: float
    ended_at: float
    batches: list[MicroBatch]
    cpu: Usage = field(default_factory=lambda: Usage(0, 0))
    cpu_by_process: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.ended_at - self.started_at

    @property
    def startup_seconds(self) -> float:
        """The time until Spark asked for the first batch: the fixed cost of a query."""
        return (self.batches[0].at if self.batches else self.ended_at) - self.started_at


class Runner:
    """The owner's side of the process, which ends with its owner."""

    def __init__(self, folder: Path, conf: dict[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._end, other = context.Pipe()
        self._process = context.Process(target=_serve, args=[other, str(folder), conf], daemon=True)
        self._process.start()
        other.close()
        if not self._end.poll(_START_SECONDS):
            raise RuntimeError(f"no Spark session within {_START_SECONDS:.0f} s")
        self._end.recv()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def once(self, pipeline: dict[str, Any]) -> Run:
        """Run a pipeline up to the source's current position."""
        before, each_before = cpu_seconds(self.pid), cpu_by_process(self.pid)
        run: Run = self._ask("once", pipeline)
        used, each = cpu_seconds(self.pid) - before, cpu_by_process(self.pid)
        each = {name: seconds - each_before.get(name, 0.0) for name, seconds in each.items()}
        return replace(run, cpu=used, cpu_by_process=each)

    def start(self, pipeline: dict[str, Any]) -> None:
        self._ask("start", pipeline)

    def drain(self) -> Run:
        run: Run = self._ask("drain", {})
        return run

    def close(self) -> None:
        self._end.close()
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, command: str, pipeline: dict[str, Any]) -> Any:
        self._end.send((command, pipeline))
        answer = self._end.recv()
        if isinstance(answer, str):
            raise RuntimeError(f"the pipeline failed: {answer}")  # noqa: TRY004 - the answer says so
        return answer


def _serve(commands: Connection, folder: str, conf: dict[str, str]) -> None:
    """The process itself. Answers commands until its owner ends."""
    from tailrace.stream import pipeline as module
    from tailrace.stream.spark_session import build_session

    witness = _ProgressListener()
    session = build_session("bench", MASTER, {"spark.local.dir": folder, **conf})

    def build_watched(*given: Any) -> Any:
        """Add a listener to each session: a session calls only its own listeners, and every run has a new one."""
        built = build_session(*given)
        witness.listen(built)
        return built

    module.build_session = build_watched  # type: ignore[assignment]
    commands.send("ready")
    running: _Running | None = None
    while True:
        try:
            command, pipeline = commands.recv()
        except EOFError:
            session.stop()
            return
        try:
            if command == "drain":
                assert running is not None
                running.pipeline.drain()
            else:
                running = _Running(pipeline, witness, once=command == "once")
            commands.send(None if command == "start" else running.wait())
        except Exception as error:  # noqa: BLE001 - the owner raises it
            commands.send(f"{type(error).__name__}: {error}")


class _Running:
    def __init__(self, options: dict[str, Any], witness: _ProgressListener, *, once: bool) -> None:
        from tailrace.stream.pipeline import Pipeline

        witness.batches = []
        self.witness = witness
        self.pipeline = Pipeline(**options, spark={"master": MASTER})
        self.error: Exception | None = None
        self.called_at = time.time()
        self.ended_at = 0.0
        self._thread = threading.Thread(target=self._run, args=[once])
        self._thread.start()

    def _run(self, once: bool) -> None:
        try:
            self.pipeline.run(once=once)
        except Exception as error:  # noqa: BLE001 - raised by `wait`
            self.error = error
        self.ended_at = time.time()

    def wait(self) -> Run:
        self._thread.join()
        if self.error is not None:
            raise self.error
        return Run(self.called_at, self.witness.started_at, self.ended_at, list(self.witness.batches))


class _ProgressListener:
    """Keeps what Spark reports about the query. Spark calls it directly, so it costs one call per batch."""

    def __init__(self) -> None:
        self.started_at = 0.0
        self.batches: list[MicroBatch] = []

    def listen(self, session: Any) -> None:
        from py4j.java_gateway import java_import  # type: ignore[import-untyped]
        from pyspark import SparkContext
        from pyspark.java_gateway import ensure_callback_server_started

        gateway = SparkContext._gateway
        assert gateway is not None
        ensure_callback_server_started(gateway)  # type: ignore[no-untyped-call]
        java_import(gateway.jvm, "org.apache.spark.sql.streaming.*")
        session.streams._jsqm.addListener(gateway.jvm.PythonStreamingQueryListenerWrapper(self))

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's name
        self.started_at = time.time()

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        progress = json.loads(event.progress().json())
        if "addBatch" in progress["durationMs"]:
            at = datetime.fromisoformat(progress["timestamp"]).timestamp()
            self.batches.append(MicroBatch(progress["batchId"], at, progress["durationMs"]))

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        pass

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        pass

    class Java:
        implements = ("org.apache.spark.sql.streaming.PythonStreamingQueryListener",)
