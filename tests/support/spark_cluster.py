"""A Spark standalone cluster of one master and two workers, which do not see the disk of the driver.

Each worker runs in a mount namespace of its own, where an empty file system lies over the hidden folder.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pyspark

from tailrace.stream.java import java_home
from tailrace.testing.wait import wait_until
from tests.support.process import command_line, descendants
from tests.support.rqlite_following import free_port

_NAMESPACE = ["unshare", "-m", "--propagation", "private"]
_MASTER, _WORKER = "org.apache.spark.deploy.master.Master", "org.apache.spark.deploy.worker.Worker"
CONF = {
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    "spark.cores.max": "2",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "300s",
    # Tasks are spread over both workers although one of them could do it all.
    "spark.locality.wait": "0",
}


@cache
def namespace() -> Sequence[str] | None:
    """The command that runs another in a mount namespace of its own, as root or within a user namespace; None where
    this machine allows neither."""
    for command in (_NAMESPACE, [*_NAMESPACE, "--map-root-user"]):
        mount = [*command, "sh", "-c", "mount -t tmpfs none /mnt"]
        with suppress(FileNotFoundError):
            if subprocess.run(mount, capture_output=True, check=False).returncode == 0:
                return command
    return None


@dataclass
class Worker:
    """A worker and all that it started: its executors, and their Python workers."""

    process: subprocess.Popen[bytes]
    folder: Path

    def executors(self) -> list[int]:
        return [pid for pid in descendants(self.process.pid) if b"CoarseGrainedExecutorBackend" in command_line(pid)]

    def kill_executors(self) -> None:
        """SIGKILL to its executors, as when a machine runs out of memory. The worker starts new ones."""
        for pid in self.executors():
            below = descendants(pid)
            for each in (pid, *below):
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)

    def said(self) -> str:
        return "".join(path.read_text(errors="replace") for path in self.folder.rglob("stderr"))


@dataclass
class SparkCluster:
    """`url` is the master's. Workers see `hidden` empty, if the machine `hides` it, and `shared` as it is.

    `start_worker` adds one, which is hidden from the driver's disk or not.
    """

    url: str
    hidden: Path
    shared: Path
    hides: bool
    start_worker: Callable[[bool], Worker]
    workers: list[Worker] = field(default_factory=list)

    def ran_everywhere(self) -> bool:
        return all("Running task" in worker.said() or "Finished task" in worker.said() for worker in self.workers)


@contextmanager
def standalone_cluster(folder: Path, *, hiding: Sequence[bool] = (True, True)) -> Iterator[SparkCluster]:
    """A running cluster with a worker for each of `hiding`: is `folder/driver`, the driver's disk, hidden from it?"""
    home, port = Path(pyspark.__file__).parent, free_port()
    hidden, shared, logs = (folder / name for name in ("driver", "shared", "cluster"))
    for made in (hidden, shared, logs):
        made.mkdir(parents=True)
    environment = {
        **{key: value for key, value in os.environ.items() if key != "SPARK_MASTER_HOST"},
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
    }
    if found := java_home():
        environment["JAVA_HOME"] = found
    said = logs / "cluster.log"
    with ExitStack() as running, said.open("wb") as log:

        def start(command: Sequence[str]) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            running.callback(process.wait)
            running.callback(_kill_all, process)
            return process

        spark_class = str(home / "bin" / "spark-class")
        start([spark_class, _MASTER, "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"])
        wait_until(lambda: _is_listening(port))

        def start_worker(is_hiding: bool) -> Worker:
            number = len(cluster.workers) + 1
            work = logs / f"worker-{number}"
            arguments = ["--host", "127.0.0.1", "--cores", "1", "--memory", "600m", "--webui-port", "0"]
            command = [spark_class, _WORKER, *arguments, "--work-dir", str(work), cluster.url]
            process = start(_hiding(cluster, command) if cluster.hides and is_hiding else command)
            cluster.workers.append(Worker(process, work))
            wait_until(lambda: said.read_text().count("Successfully registered with master") >= number)
            return cluster.workers[-1]

        cluster = SparkCluster(
            f"spark://127.0.0.1:{port}", hidden, shared, namespace() is not None, start_worker=start_worker
        )
        for each in hiding:
            start_worker(each)
        yield cluster


def _hiding(cluster: SparkCluster, command: Sequence[str]) -> list[str]:
    within = namespace()
    assert within is not None
    script = f"mount -t tmpfs none {shlex.quote(str(cluster.hidden))} && exec {shlex.join(command)}"
    return [*within, "sh", "-c", script]


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    below = descendants(process.pid)
    process.kill()
    for pid in below:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _is_listening(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
