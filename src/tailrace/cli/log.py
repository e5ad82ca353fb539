"""What a run logs, as lines of JSON among its other lines."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

_LEVELS = {logging.DEBUG: "debug", logging.INFO: "info", logging.WARNING: "warning"}


def stamp(pipeline: str, level: str, event: str, at: datetime | None = None) -> dict[str, object]:
    """How every line of a run begins."""
    moment = (at or datetime.now(UTC)).isoformat(timespec="milliseconds")
    return {"at": moment, "pipeline": pipeline, "event": event, "level": level}


class _LogLines(logging.Handler):
    def __init__(self, pipeline: str, write: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._pipeline = pipeline
        self._write = write
        self.addFilter(lambda record: record.levelno >= logging.WARNING or record.name.startswith("tailrace."))

    def emit(self, record: logging.LogRecord) -> None:
        level = _LEVELS.get(record.levelno, "error")
        values = {
            **stamp(self._pipeline, level, "log", datetime.fromtimestamp(record.created, UTC)),
            "logger": record.name,
            "message": record.getMessage(),
            "table": getattr(record, "table", None),
            "code": getattr(record, "code", None),
        }
        self._write(json.dumps(values, ensure_ascii=False))


@contextmanager
def logged_as_json(pipeline: str, write: Callable[[str], None]) -> Iterator[None]:
    """Within the block, what is logged is written as lines of JSON instead of as text to stderr."""
    root, ours = logging.getLogger(), logging.getLogger("tailrace")
    handler, before = _LogLines(pipeline, write), ours.level
    root.addHandler(handler)
    ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        ours.setLevel(before)
