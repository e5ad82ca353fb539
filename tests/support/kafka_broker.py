"""A real Kafka broker on this machine, from the jars that Maven has, without Docker.

    with KafkaBroker(folder) as broker:
        destination = KafkaDestination(servers=broker.servers, …)

The jars (44 MB) are fetched once into the user's cache, by the Ivy that PySpark brings, and checked against
`kafka_jars.txt`. Java is that of Spark.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import pyspark
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient

from tailrace.destination.kafka.destination import KafkaDestination
from tailrace.stream.java import find_java
from tailrace.system.cache_folder import made_once
from tailrace.testing.wait import PATIENCE_SECONDS, wait_until

_JARS = Path(__file__).with_name("kafka_jars.txt")
_BROKER = ("org.apache.kafka", "kafka_2.13", "4.3.1")
_SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "auto.create.topics.enable": "false",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "1",
    "log.cleaner.backoff.ms": "200",
}


class SeenRecord(NamedTuple):
    """A committed record, as a consumer sees it."""

    key: str | None
    value: str | None
    headers: dict[str, str]
    partition: int


_numbers = itertools.count()


def kafka_destination(broker: KafkaBroker, **more: Any) -> KafkaDestination:
    """A destination with topics and a transactional id that no other test has: `shop-7.{schema}.{table}`."""
    name = f"shop-{next(_numbers)}"
    own = {
        "topic": f"{name}.{{schema}}.{{table}}",
        "progress_topic": f"_tailrace.{name}",
        "transactional_id": f"tailrace-{name}",
    }
    return KafkaDestination(servers=broker.servers, **{**own, **more})


class KafkaBroker:
    """One broker with its own controller, on loopback. Leaving the `with` block ends it.

    With a `password`, which is that of the user `tailrace`, others are refused.
    """

    def __init__(self, folder: Path, *, password: str | None = None) -> None:
        self._folder = folder
        self._ports = _free_port(), _free_port()
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def servers(self) -> str:
        return f"127.0.0.1:{self._ports[0]}"

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        address, control = [f"127.0.0.1:{port}" for port in self._ports]
        settings = {
            **_SETTINGS,
            "controller.quorum.voters": f"1@{control}",
            "listeners": f"PLAINTEXT://{address},CONTROLLER://{control}",
            "advertised.listeners": f"PLAINTEXT://{address}",
            "log.dirs": str(self._folder / "data"),
            **(_with_login(address, control, self._password) if self._password else {}),
        }
        self._file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        self._java("kafka.tools.StorageTool", "format", "-t", "MkU3OEVBNTcwNTJENDM2Qg", "-c", str(self._file)).wait()
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, and return when it answers."""
        self._process = self._java("kafka.Kafka", str(self._file))
        wait_until(self._answers)

    def kill(self) -> None:
        """End it as a crash does."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def topics(self) -> list[str]:
        """The topics there, but for Kafka's own."""
        found = AdminClient({"bootstrap.servers": self.servers}).list_topics(timeout=PATIENCE_SECONDS).topics
        return sorted(name for name in found if not name.startswith("__"))

    def records(self, topic: str, *, committed: bool = True) -> list[SeenRecord]:
        """The records of a topic, partition by partition, as a consumer with `read_committed` sees them."""
        settings: dict[str, Any] = {
            "bootstrap.servers": self.servers,
            "group.id": "test",
            "isolation.level": "read_committed" if committed else "read_uncommitted",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
        consumer = Consumer(settings)
        try:
            there = consumer.list_topics(topic, timeout=PATIENCE_SECONDS).topics[topic]
            if there.error is not None:
                return []
            found: list[SeenRecord] = []
            for partition in sorted(there.partitions):
                consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING)])
                while (message := consumer.poll(PATIENCE_SECONDS)) is not None:
                    if (error := message.error()) is not None:
                        assert error.code() == KafkaError._PARTITION_EOF, error
                        break
                    headers = {str(name): _text(value) or "" for name, value in list(message.headers() or [])}
                    found.append(SeenRecord(_text(message.key()), _text(message.value()), headers, partition))
            return found
        finally:
            consumer.close()

    @property
    def _file(self) -> Path:
        return self._folder / "server.properties"

    def _answers(self) -> bool:
        assert self._process is not None
        log = (self._folder / "broker.log").read_text(errors="replace")[-2000:]
        assert self._process.poll() is None, log
        try:
            socket.create_connection(("127.0.0.1", self._ports[0]), 1.0).close()
        except OSError:
            return False
        return True

    def _java(self, *command: str) -> subprocess.Popen[bytes]:
        small = ["-Xmx384m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
        with (self._folder / "broker.log").open("ab") as log:
            return subprocess.Popen(
                [str(_java()), *small, "-cp", f"{jars()}/*", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def _with_login(address: str, control: str, password: str) -> dict[str, str]:
    module = "org.apache.kafka.common.security.plain.PlainLoginModule"
    users = f'username="broker" password="{password}" user_broker="{password}" user_tailrace="{password}"'
    return {
        "listeners": f"SASL_PLAINTEXT://{address},CONTROLLER://{control}",
        "advertised.listeners": f"SASL_PLAINTEXT://{address}",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT",
        "inter.broker.listener.name": "SASL_PLAINTEXT",
        "sasl.enabled.mechanisms": "PLAIN",
        "sasl.mechanism.inter.broker.protocol": "PLAIN",
        "listener.name.sasl_plaintext.plain.sasl.jaas.config": f"{module} required {users};",
    }


def jars() -> Path:
    """The folder of the broker's jars. Fetches them when it is not there."""
    listed = _JARS.read_text(encoding="utf-8")

    def fill(folder: Path) -> None:
        [ivy] = (Path(pyspark.__file__).parent / "jars").glob("ivy-*.jar")
        with tempfile.TemporaryDirectory() as cache:
            place = f"{folder}/[artifact]-[revision].[ext]"
            options = ["-cache", cache, "-types", "jar", "bundle", "-dependency", *_BROKER, "-retrieve", place]
            done = subprocess.run([_java(), "-jar", ivy, *options], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:]
        found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
        assert found == dict(map(_file_of, listed.splitlines())), "the jars are not those of kafka_jars.txt"

    return made_once(f"kafka-{hashlib.sha256(listed.encode()).hexdigest()[:16]}", fill)


def _file_of(line: str) -> tuple[str, str]:
    """The name of a jar's file, and its digest."""
    name, digest = line.split()
    _, artifact, version = name.split(":")
    return f"{artifact}-{version}.jar", digest


def _java() -> Path:
    found = find_java()
    assert found is not None, "Spark's Java is missing: pip install 'tailrace[embedded]'"
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value
