"""What a pipeline remembers between runs: table states, schema versions, progress, requests, dead letters.

Each concern is a small protocol in `tailrace.state.protocol`; `StateStore` keeps them all, in a SQLite file or in
Postgres (`StoreAddress` says where). The runner writes, any number of other processes read at the same time.
"""

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
    Owner,
    PipelineRecord,
    Retry,
    SourceStatus,
    TableRecord,
    TableUpdate,
)
from tailrace.state.runner import RunnerLock
from tailrace.state.state_machine import TableState
from tailrace.state.store import StateStore, StoreAddress

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
