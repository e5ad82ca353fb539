"""Build the Spark session of a pipeline: settings for few, large rows, and a Java if the system has none."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

from tailrace.errors import PreflightError
from tailrace.stream import jvm
from tailrace.stream.class_archive import Archive
from tailrace.stream.java import java_home
from tailrace.stream.spark_home import spark_home
from tailrace.stream.spark_master import is_local, reaches_loopback

LOGGING = Path(__file__).with_name("log4j2.properties")

# The JVM only passes bytes on, so its second compiler costs more than it gains for minutes after every start.
JAVA_OPTIONS = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"

TASK_MODULES = ("pyspark.worker", "tailrace.stream.data_source", "tailrace.stream.micro_batch")
"""What every task of a pipeline imports."""

# A block is one row of up to a few MB, so limits that count rows are low.
SETTINGS = {
    "spark.sql.execution.arrow.maxRecordsPerBatch": "8",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.python.worker.reuse": "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "1g",
    # Blocks are compressed neither here nor in the journal: on one machine compression costs more than it saves.
    "spark.shuffle.compress": "false",
    "spark.shuffle.spill.compress": "false",
    # The default runs a shell command for every checkpoint file, which costs more than writing the file.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    # The checkpoint is private. Spark sets the modes of these files itself, whatever its umask.
    "spark.hadoop.fs.permissions.umask-mode": "077",
    # A batch is allocated and freed as a whole: the system's allocator returns its memory, Arrow's own keeps half.
    "spark.executorEnv.ARROW_DEFAULT_MEMORY_POOL": "system",
    # The default of 100 keeps as many offsets, each as large as the tables are many. Only the last is ever needed.
    "spark.sql.streaming.minBatchesToRetain": "10",
    # Adaptive execution would put the small shuffle of blocks, and so all tables, into one task.
    "spark.sql.adaptive.enabled": "false",
}


def java_options(more: str) -> str:
    """The options of the driver's JVM; `more` are those for the class archive."""
    return f"-Dlog4j2.configurationFile=file:{LOGGING} {JAVA_OPTIONS} {more}".rstrip()


def build_session(name: str, master: str, conf: Mapping[str, str], modules: Iterable[str] = ()) -> SparkSession:
    """A session of its own for the pipeline, in the running Spark or in a new one, which binds to loopback unless
    `conf` says otherwise. The settings of other sessions do not change. A new local Spark imports `modules` once for
    all its Python workers.

    Raises PreflightError for executors on other machines that could not reach the driver."""
    host = driver_host(master, conf)
    if home := java_home():
        os.environ["JAVA_HOME"] = home
    # YARN sends Spark's zipped Python modules to its machines, so it needs the original home, which has them.
    if not master.startswith("yarn"):
        os.environ["SPARK_HOME"] = str(spark_home())
    # Starting numpy's linear algebra threads takes as long as the rest of its import, and nothing here uses them.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Workers must import this same package, wherever it is installed.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    archive = Archive.here()
    builder = SparkSession.builder.appName(f"tailrace {name}").master(master)
    settings = {
        **SETTINGS,
        **host,
        "spark.driver.extraJavaOptions": java_options(archive.options if archive else ""),
        **conf,
    }
    if is_local(master):
        # Spark makes up a secret itself. Elsewhere executors on other machines would need it, too.
        settings.setdefault("spark.authenticate", "true")
        settings.setdefault("spark.python.daemon.module", "tailrace.stream.worker_daemon")
    else:
        # An executor's JVM passes bytes on as the driver's does: without these, a copy costs it twice the time.
        settings.setdefault("spark.executor.extraJavaOptions", JAVA_OPTIONS)
    for key, value in settings.items():
        builder = builder.config(key, value)
    with _keep_interrupt_handler(), jvm.started_as_child([*TASK_MODULES, *modules]):
        session = builder.create()
        jvm.require_token()
        return session


def driver_host(master: str, conf: Mapping[str, str]) -> dict[str, str]:
    """Where the driver listens: on loopback, where that is enough, else where `conf` says."""
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        return {}  # spark-submit has started the JVM, and said where
    if is_local(master) or (reaches_loopback(master) and "spark.driver.host" not in conf):
        return {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    if "spark.driver.host" not in conf:
        raise PreflightError(
            f"executors of {master} run on other machines, which cannot reach a driver on 127.0.0.1",
            fix="set `spark.driver.host` in `spark.conf` to the address by which they reach this machine",
        )
    # Spark listens there, too, unless `conf` has another `spark.driver.bindAddress`.
    return {}


@contextmanager
def _keep_interrupt_handler() -> Iterator[None]:
    """Restore the SIGINT handler: PySpark replaces it when a session starts, but the caller has already set one."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)
