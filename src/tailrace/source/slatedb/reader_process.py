"""A process that reads splits for another: `python -m tailrace.source.slatedb.reader_process`.

Requests come on standard input, each a length of eight bytes and a pickled source and split. An answer is a line of
JSON for every piece of changes, followed by the piece itself as an Arrow stream, and a final line. Only the owner holds
that input: when it closes it, or dies, the process ends. It also ends after a minute without a request.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import struct
import sys
from collections.abc import Mapping
from typing import IO, Any

import pyarrow as pa

from tailrace.errors import TailraceError, revive
from tailrace.model.schema import TableSchema

LENGTH = struct.Struct(">q")
_IDLE_SECONDS = 60.0


def send_split(requests: IO[bytes], source: Any, split: Any) -> None:
    """The owner's side: send a request."""
    request = pickle.dumps((source, split))
    requests.write(LENGTH.pack(len(request)))
    requests.write(request)
    requests.flush()


def receive_rows(answers: IO[bytes]) -> list[tuple[str, pa.RecordBatch]]:
    """The owner's side: a whole answer, as upstream ids of tables and their changes.

    Raises the error that reading raised there, and EOFError when the process ended before it had answered.
    """
    found: list[tuple[str, pa.RecordBatch]] = []
    while True:
        line = answers.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        head: Mapping[str, Any] = json.loads(line)
        if "error" in head:
            raise revive(head["error"])
        if not head:
            return found
        payload = answers.read(head["bytes"])
        if len(payload) < head["bytes"]:
            raise EOFError
        found += [(head["table"], batch) for batch in pa.ipc.open_stream(payload)]


def _answer(answers: IO[bytes], request: bytes) -> None:
    source, split = pickle.loads(request)  # noqa: S301 - written by `ask` in the process that started this one
    try:
        for changes in source.read(split):
            table: TableSchema = changes.table
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, changes.batch.schema) as stream:
                stream.write_batch(changes.batch)
            payload = sink.getvalue()
            _send(answers, {"table": table.upstream_id, "bytes": payload.size})
            answers.write(payload)
        _send(answers, {})
    except TailraceError as error:
        _send(answers, {"error": error.describe()})
    answers.flush()


def _send(answers: IO[bytes], head: Mapping[str, Any]) -> None:
    answers.write(json.dumps(head).encode() + b"\n")


def main() -> None:
    # Ctrl-C reaches the whole process group, as may SIGTERM; the owner decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Output that a library prints must not end up between answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Unbuffered: otherwise `select` would miss input that is already buffered.
    requests = os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0)
    while select.select([requests], [], [], _IDLE_SECONDS)[0]:
        length = _exactly(requests, LENGTH.size)
        if length is None:
            return
        request = _exactly(requests, LENGTH.unpack(length)[0])
        if request is None:
            return
        try:
            _answer(answers, request)
        except BrokenPipeError:
            return


def _exactly(requests: IO[bytes], count: int) -> bytes | None:
    """Exactly this many bytes; None when the owner is gone."""
    found = b""
    while len(found) < count:
        piece = requests.read(count - len(found))
        if not piece:
            return None
        found += piece
    return found


if __name__ == "__main__":
    main()
