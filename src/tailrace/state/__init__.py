"""What a pipeline remembers between runs: table states, schema versions, progress, requests, dead letters.

Each concern is a small protocol in `tailrace.state.protocol`; `StateStore` keeps them all, in a SQLite file or in
Postgres (`StoreAddress` says where). The runner writes, any number of other processes read at the same time.
"""

from tailrace.state.address import StoreAddress
from tailrace.state.lock import Owner, RunnerLock
from tailrace.state.machine import TableState
from tailrace.state.protocol import (
    DeadLetters,
    Lease,
    Progress,
    Requests,
    SchemaVersionStates,
    TableLifecycle,
    TableStates,
)
from tailrace.state.record import (
    BatchRecord,
    DeadLetter,
    OperatorRequest,
    PipelineRecord,
    Retry,
    SourceStatus,
    TableRecord,
    TableUpdate,
)
from tailrace.state.store import StateStore

__all__ = [
    "BatchRecord",
    "DeadLetter",
    "DeadLetters",
    "Lease",
    "OperatorRequest",
    "Owner",
    "PipelineRecord",
    "Progress",
    "Requests",
    "Retry",
    "RunnerLock",
    "SchemaVersionStates",
    "SourceStatus",
    "StateStore",
    "StoreAddress",
    "TableLifecycle",
    "TableRecord",
    "TableState",
    "TableStates",
    "TableUpdate",
]
