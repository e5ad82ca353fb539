"""The Spark session a pipeline runs on: settings that suit few, large rows, and a Java when the system has none."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

from tailrace.stream.class_archive import Archive
from tailrace.stream.java import java_home
from tailrace.stream.spark_home import spark_home

LOGGING = Path(__file__).with_name("log4j2.properties")

# Java only passes bytes on: its second compiler costs more than it wins, for minutes after every start.
JAVA_OPTIONS = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"

# A block is one row of up to a few MB, so what Spark counts in rows is set low.
SETTINGS = {
    "spark.sql.execution.arrow.maxRecordsPerBatch": "8",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.python.worker.reuse": "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "1g",
    # Blocks are compressed neither here nor in the journal: on one machine it costs more than it saves.
    "spark.shuffle.compress": "false",
    "spark.shuffle.spill.compress": "false",
    # The default asks a shell about every checkpoint file, which costs more than writing it.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    # Batches come and go whole: the system's allocator gives their memory back, Arrow's own keeps half of it.
    "spark.executorEnv.ARROW_DEFAULT_MEMORY_POOL": "system",
    # Adaptive execution would put the small shuffle of blocks, and so all tables, into one task.
    "spark.sql.adaptive.enabled": "false",
}


def java_options(more: str) -> str:
    """What the driver's Java is started with; `more` is about its archive of classes."""
    return f"-Dlog4j2.configurationFile=file:{LOGGING} {JAVA_OPTIONS} {more}".rstrip()


def build_session(name: str, master: str, conf: Mapping[str, str]) -> SparkSession:
    """A session of the pipeline's own, in the Spark that runs already or in a new one, which binds to loopback unless
    `conf` says otherwise. Sessions of other people keep their settings."""
    if home := java_home():
        os.environ["JAVA_HOME"] = home
    # YARN sends Spark's zipped Python to its machines, and takes it from the home that has it.
    if not master.startswith("yarn"):
        os.environ["SPARK_HOME"] = str(spark_home())
    # numpy's threads for linear algebra take as long to start as all else it loads, and nothing here is linear algebra.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Workers must import this very package, wherever it is installed.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    archive = Archive.here()
    builder = SparkSession.builder.appName(f"tailrace {name}").master(master)
    settings = {
        **SETTINGS,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": java_options(archive.options if archive else ""),
        **conf,
    }
    for key, value in settings.items():
        builder = builder.config(key, value)
    with _interrupt_kept():
        return builder.create()


@contextmanager
def _interrupt_kept() -> Iterator[None]:
    """PySpark takes SIGINT for itself when a session begins; what an interrupt does was decided before."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)
