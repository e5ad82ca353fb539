"""Everything that the author of a source, destination, store or connector imports, in one place.

docs/extending.md walks through it. What neither this module nor `tailrace` exports is private, and may change with any
release.
"""

from __future__ import annotations

from tailrace.destination import (
    Batch,
    BeginEvent,
    CommitEvent,
    Committer,
    CopyBeginEvent,
    CopyEndEvent,
    CopyMode,
    Destination,
    Event,
    EventDestination,
    Lookup,
    Refetch,
    RelationEvent,
    RowPart,
    Stage,
    Staged,
    TableBatch,
    Written,
    plan_columns,
)
from tailrace.destination.capability import Maintainable, Queued, QueueStatus, QueueView
from tailrace.errors import (
    ConfigError,
    DamagedError,
    Finding,
    LostError,
    MismatchError,
    OwnedError,
    PreflightError,
    SchemaChangedError,
    TableError,
    TailraceError,
    UnavailableError,
    UnfitError,
)
from tailrace.model.change import START, Changes, Op, Position, end_of
from tailrace.model.last_batch import LastBatch
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.model.source_status import SourceStatus
from tailrace.model.table_rows import Readable, TableRows
from tailrace.option.table import TableOptions
from tailrace.option.value import FilePath, Options, Secret, Size, TypedOptions
from tailrace.source.capability import Preparable, Receivable, Surveyable, SurveyedTable
from tailrace.source.follower import (
    Follower,
    Limit,
    Offset,
    SchemaHistory,
    SchemaVersions,
    TableDirectives,
    TableProgress,
)
from tailrace.source.log_follower import LogFollower, LogSource
from tailrace.source.option import SourceOptions
from tailrace.source.poll.connector import Clock, Connector, ConnectorOptions, ConnectorSession, Page, Polled, Query
from tailrace.source.poll.keyset import Keyset, Stretch
from tailrace.source.poll.sql_session import SqlSession
from tailrace.source.source import Source, SourceContext
from tailrace.source.split import ScanSplit, Split
from tailrace.source.table_range import TableRange
from tailrace.state import Row, RunSql, StateDatabase, StateStore, StoreAddress, Values

__all__ = [
    "START",
    "Batch",
    "BeginEvent",
    "Changes",
    "Clock",
    "Column",
    "CommitEvent",
    "Committer",
    "ConfigError",
    "Connector",
    "ConnectorOptions",
    "ConnectorSession",
    "CopyBeginEvent",
    "CopyEndEvent",
    "CopyMode",
    "DamagedError",
    "Destination",
    "Event",
    "EventDestination",
    "FilePath",
    "Finding",
    "Follower",
    "Keyset",
    "LastBatch",
    "Limit",
    "LogFollower",
    "LogSource",
    "Lookup",
    "LostError",
    "Maintainable",
    "MismatchError",
    "Offset",
    "Op",
    "Options",
    "OwnedError",
    "Page",
    "Polled",
    "Position",
    "PreflightError",
    "Preparable",
    "Query",
    "QueueStatus",
    "QueueView",
    "Queued",
    "Readable",
    "Receivable",
    "Refetch",
    "RelationEvent",
    "Row",
    "RowPart",
    "RunSql",
    "ScanSplit",
    "SchemaChangedError",
    "SchemaHistory",
    "SchemaVersions",
    "Secret",
    "Size",
    "Source",
    "SourceContext",
    "SourceOptions",
    "SourceStatus",
    "Split",
    "SqlSession",
    "Stage",
    "Staged",
    "StateDatabase",
    "StateStore",
    "StoreAddress",
    "Stretch",
    "Surveyable",
    "SurveyedTable",
    "TableBatch",
    "TableDirectives",
    "TableError",
    "TableName",
    "TableOptions",
    "TableProgress",
    "TableRange",
    "TableRows",
    "TableSchema",
    "TailraceError",
    "TypedOptions",
    "UnavailableError",
    "UnfitError",
    "Values",
    "Written",
    "end_of",
    "plan_columns",
]
