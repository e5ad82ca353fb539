# ruff: noqa: N802, N803 - the names are those of Spark
"""Runs a pipeline's stream in this process, in Spark's place: the same calls in the same order, the same checkpoint.

A pipeline then starts in milliseconds, so that a test can afford hundreds of starts. `tests/live` runs with Spark.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.datasource import ReadAllAvailable

from tailrace import Pipeline
from tailrace.stream import pipeline as stream_pipeline
from tailrace.stream.commit_listener import CommitListener
from tailrace.stream.data_source import BlockReader, BlockSource


@contextmanager
def without_spark(folder: Path) -> Iterator[None]:
    """Within the block pipelines run on this engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_pipeline, "build_session", lambda *_: SmallSession())
        patch.chdir(folder)
        yield


def run(file: Path) -> None:
    """Run the pipeline to the source's end, as `tailrace run FILE --once` does."""
    Pipeline.from_file(file).run(once=True)


class SmallSession:
    """What a pipeline uses of a Spark session."""

    def __init__(self) -> None:
        self.sources: dict[str, type[BlockSource]] = {}
        self.listeners: list[CommitListener] = []
        self.streams = SimpleNamespace(addListener=self.listeners.append, removeListener=self.listeners.remove)
        self.dataSource = SimpleNamespace(register=self._register)
        self.sparkContext = SimpleNamespace(defaultParallelism=2)

    def _register(self, source: type[BlockSource]) -> None:
        self.sources[source.name()] = source

    @property
    def readStream(self) -> SmallQuery:
        return SmallQuery(self)


class SmallQuery:
    """Builder and query in one; `start` runs the stream to its end."""

    def __init__(self, session: SmallSession) -> None:
        self._session = session
        self._apply: Callable[[Any, int], None] = lambda blocks, batch_id: None
        self._name = self._format = ""
        self._checkpoint = Path()
        self._failure: Exception | None = None
        self.isActive = False
        self.status = {"message": "", "isTriggerActive": False, "isDataAvailable": False}

    def format(self, name: str) -> SmallQuery:
        self._format = name
        return self

    def load(self) -> SmallQuery:
        return self

    @property
    def writeStream(self) -> SmallQuery:
        return self

    def foreachBatch(self, apply: Callable[[Any, int], None]) -> SmallQuery:
        self._apply = apply
        return self

    def queryName(self, name: str) -> SmallQuery:
        self._name = name
        return self

    def option(self, name: str, value: str) -> SmallQuery:
        assert name == "checkpointLocation"
        self._checkpoint = Path(value)
        return self

    def trigger(self, *, availableNow: bool) -> SmallQuery:
        assert availableNow
        return self

    def start(self) -> SmallQuery:
        reader = BlockReader(self._session.sources[self._format].feed)
        try:
            self._follow(reader)
        except Exception as error:  # noqa: BLE001 - Spark keeps it for the caller, too
            self._failure = error
        finally:
            if reader._follower is not None:
                reader._follower.stop()
            if reader._store is not None:
                reader._store.close()
        return self

    def exception(self) -> Exception | None:
        return self._failure

    def stop(self) -> None:
        pass

    def _follow(self, reader: BlockReader) -> None:
        own = self._checkpoint / "metadata"
        if not own.exists():
            self._checkpoint.mkdir(parents=True, exist_ok=True)
            own.write_text('{"id":"1"}')
        planned, done = self._newest("offsets"), self._newest("commits")
        reader.prepareForTriggerAvailableNow()
        start = self._offset(done) if done >= 0 else reader.initialOffset()
        if planned > done:
            start = self._offset(planned - 1) if planned else start
            self._run(reader, planned, start, self._offset(planned))
            start = self._offset(planned)
        number = planned + 1
        while (end := reader.latestOffset(start, ReadAllAvailable())) != start:
            header = ["v1", json.dumps({"batchTimestampMs": 1})]
            self._write("offsets", number, "\n".join([*header, json.dumps(end)]))
            self._run(reader, number, start, end)
            start, number = end, number + 1

    def _run(self, reader: BlockReader, number: int, start: dict[str, Any], end: dict[str, Any]) -> None:
        partitions = reader.partitions(start, end)
        blocks = SmallFrame([batch for partition in partitions for batch in reader.read(partition)])
        self._apply(blocks, number)
        self._write("commits", number, 'v1\n{"nextBatchWatermarkMs":0}')
        for listener in list(self._session.listeners):
            source = {"startOffset": start, "endOffset": end}
            listener.record({"name": self._name, "batchId": number, "batchDuration": 1, "sources": [source]})

    def _newest(self, log: str) -> int:
        return max((int(entry.name) for entry in (self._checkpoint / log).glob("[0-9]*")), default=-1)

    def _offset(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self._checkpoint / "offsets" / str(number)).read_text().split("\n")[-1])
        return found

    def _write(self, log: str, number: int, text: str) -> None:
        (self._checkpoint / log).mkdir(exist_ok=True)
        content = text.encode()
        (self._checkpoint / log / str(number)).write_bytes(content)
        sums = b"".join(zlib.crc32(content[at : at + 512]).to_bytes(4) for at in range(0, len(content), 512))
        (self._checkpoint / log / f".{number}.crc").write_bytes(b"crc\0" + (512).to_bytes(4) + sums)


class SmallFrame:
    """The blocks of a batch; every lane is run when they are collected."""

    def __init__(self, batches: list[pa.RecordBatch]) -> None:
        self._batches = batches
        self._run: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]] = iter

    def repartitionById(self, lanes: int, column: str) -> SmallFrame:
        return self

    def mapInArrow(
        self, run: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]], schema: str
    ) -> SmallFrame:
        self._run = run
        return self

    def collect(self) -> list[Row]:
        found = list(self._run(iter(self._batches)))
        return [Row(**row) for batch in found for row in batch.to_pylist()]
