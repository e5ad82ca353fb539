"""What a pipeline remembers between runs: table states, schema versions, progress, requests, dead letters.

`StateStore` holds all of it and is opened by a `StoreAddress`: `SqliteStore` for a file, `tailrace.state.postgres` for
a database, or one of your own, which writes `connect` and a `StateDatabase` with `transaction` and `close`. The runner
writes, any number of other processes read at the same time.
"""

from tailrace.state.database import Row, RunSql, StateDatabase, Values
from tailrace.state.layout import ColumnTypes
from tailrace.state.record import (
    BatchRecord,
    DeadLetter,
    OperatorRequest,
    Owner,
    PipelineRecord,
    Retry,
    SourceStatus,
    TableRecord,
    TableUpdate,
)
from tailrace.state.report import RunRecord
from tailrace.state.runner import RunnerLock
from tailrace.state.sqlite import SqliteStore
from tailrace.state.state_machine import TableState
from tailrace.state.store import StateStore, StoreAddress

__all__ = [
    "BatchRecord",
    "ColumnTypes",
    "DeadLetter",
    "OperatorRequest",
    "Owner",
    "PipelineRecord",
    "Retry",
    "Row",
    "RunRecord",
    "RunSql",
    "RunnerLock",
    "SourceStatus",
    "SqliteStore",
    "StateDatabase",
    "StateStore",
    "StoreAddress",
    "TableRecord",
    "TableState",
    "TableUpdate",
    "Values",
]
