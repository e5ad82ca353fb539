"""tailrace: change data capture from a database into a lake, on Spark.

Most programs need only `Pipeline`, or `FanOut` for several destinations. The public names are imported on first use,
because those two import Spark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tailrace.errors import TailraceError

if TYPE_CHECKING:
    from tailrace.destination import Destination
    from tailrace.model.change import Changes, Op, Position
    from tailrace.model.schema import Column, TableName, TableSchema
    from tailrace.source.source import Source
    from tailrace.stream.fan_out import FanOut
    from tailrace.stream.pipeline import Pipeline
    from tailrace.sync.session import sync

__version__ = "0.1.0"

__all__ = [
    "Changes",
    "Column",
    "Destination",
    "FanOut",
    "Op",
    "Pipeline",
    "Position",
    "Source",
    "TableName",
    "TableSchema",
    "TailraceError",
    "sync",
]

_HOMES = {
    "Changes": "tailrace.model.change",
    "Column": "tailrace.model.schema",
    "Destination": "tailrace.destination",
    "FanOut": "tailrace.stream.fan_out",
    "Op": "tailrace.model.change",
    "Pipeline": "tailrace.stream.pipeline",
    "Position": "tailrace.model.change",
    "Source": "tailrace.source.source",
    "TableName": "tailrace.model.schema",
    "TableSchema": "tailrace.model.schema",
    "sync": "tailrace.sync.session",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tailrace' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
