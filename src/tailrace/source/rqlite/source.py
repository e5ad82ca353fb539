"""`RqliteSource`: the endpoint that clusters post to, their APIs where they are known, and the two halves."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa

from tailrace import errors
from tailrace.errors import Finding, LostError, TableError
from tailrace.journal import Cursor, JournalReader, cursors
from tailrace.model.change import START, Changes, Position
from tailrace.model.schema import TableName, TableSchema
from tailrace.model.source_status import SourceStatus
from tailrace.model.table_rows import TableRows
from tailrace.option.table import TableSettings
from tailrace.source.follower import Offset, SchemaVersions, TableProgress
from tailrace.source.rqlite import catalog, preflight
from tailrace.source.rqlite.api import Api, ApiTls, Pending
from tailrace.source.rqlite.copy import RqliteCopySplit, read_chunk
from tailrace.source.rqlite.discovery import RqliteDiscovery
from tailrace.source.rqlite.follower import RqliteFollower
from tailrace.source.rqlite.log_split import RqliteLogSplit, read_log
from tailrace.source.rqlite.option import SERVICE, ApiTlsOptions, RqliteOptions
from tailrace.source.rqlite.query import fetch_by_key
from tailrace.source.rqlite.reader import read_rows
from tailrace.source.rqlite.receiver import STATUS, RqliteReceiver, RqliteReceiverOptions, is_receiving, remove_journal
from tailrace.source.rqlite.request import folder_of
from tailrace.source.source import RESYNC, Source
from tailrace.source.split import Split
from tailrace.source.sqlite.offset import SqliteOffset
from tailrace.system.atomic_file import make_private_folder, remove
from tailrace.system.child_process import Child, read_status

MODULE = "tailrace.source.rqlite"
PENDING_SECONDS = 60.0
"""How long a node's service name is cached: it changes only with a restart of the node."""


@dataclass(frozen=True)
class RqliteSource(Source):
    """rqlite clusters and the tables wanted of them. Frozen and picklable; no password shows in its repr."""

    Options = RqliteOptions

    options: RqliteOptions

    @cached_property
    def receiver(self) -> RqliteReceiverOptions:
        return RqliteReceiverOptions.of(self.options)

    @property
    def journal(self) -> Path:
        """The journals of all clusters, a folder for each."""
        assert isinstance(self.options.journal.path, Path)
        return self.options.journal.path

    @property
    def folder(self) -> Path:
        return self.journal

    def shared_folders(self) -> dict[str, Path]:
        return {"source.journal.path": self.journal} if isinstance(self.journal, Path) else {}

    @property
    def schema_file(self) -> Path:
        return self.journal / f"{quote(self.context.reader, safe='')}.versions"

    def folder_of(self, service: str) -> Path:
        """The journal of one cluster."""
        return self.journal / folder_of(service)

    def settings_of(self, service: str, table: str) -> TableSettings:
        return self.context.tables.settings_of(str(TableName(service, table)))

    def apis(self) -> dict[str, Api]:
        """The APIs as configured: by service, or under `""` a single URL whose service only the node itself knows."""
        auth, tls = self.options.api_auth, self.options.api_tls or ApiTlsOptions()
        username, password = (auth.username, auth.password.reveal()) if auth else (None, None)
        trust = ApiTls(*(str(file) if file else None for file in (tls.ca, tls.cert, tls.key)))
        return {
            service: Api(urls[0], username, password, trust, tuple(urls[1:]))
            for service, urls in sorted(self.options.nodes().items())
        }

    def services(self) -> list[str]:
        """The clusters that have posted or have an API. Raises UnavailableError if the API must answer and does not."""
        folder = self.journal
        names = [each.name for each in folder.iterdir() if each.is_dir()] if folder.is_dir() else []
        posted = {unquote(name) for name in names if folder_of(unquote(name)) == name}
        reported = {name for service, api in self.apis().items() if (name := service or _service_of(api))}
        # A node that does not report its service may be one that has already posted.
        return sorted(posted | reported or ({SERVICE} if self.options.api else set()))

    def api_of(self, service: str) -> Api | None:
        """The API of a cluster, if any. A single URL serves its own cluster, or all if the node reports no service."""
        apis = self.apis()
        single = apis.get("")
        if single is None:
            return apis.get(service)
        return single if _service_of(single) in (service, None) else None

    def check(self) -> list[Finding]:
        return preflight.check(self)

    def tables(self) -> list[TableSchema]:
        """The tables whose columns are known before any event: those of clusters with an API."""
        found: list[TableSchema] = []
        for service in self.services():
            api = self.api_of(service)
            if api is not None:
                discovery = RqliteDiscovery(service, self.context.tables, api, None)
                found += [
                    catalog.begin(None, table, service, START, rowids=self.options.rowids)
                    for table in discovery.tables.values()
                ]
        return found

    def prepare(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Make the journal's folder. A second call changes nothing. Raises PreflightError with the obstacle."""
        errors.require(self.check())
        make_private_folder(self.journal)

    def reset(self) -> None:
        """Drop the journals of all clusters. Raises OwnedError while a receiver writes them."""
        remove_journal(self.journal)

    def forget(self) -> None:
        for folder in self.journal.glob("*/"):
            Cursor(folder, self.context.reader).drop()
        remove(self.schema_file)

    def readers(self) -> Collection[str]:
        return {reader for folder in self.journal.glob("*/") for reader in cursors(folder)}

    def start_receiver(self, patience_seconds: float = 0.0) -> Child:
        """The receiver as a child process, unless another one already serves the journal."""
        return Child(
            MODULE,
            self.receiver.to_json(),
            self.journal,
            STATUS,
            is_busy=lambda: is_receiving(self.journal),
            patience_seconds=patience_seconds,
        )

    def receive_until(self, should_stop: Callable[[], bool], on_status: Callable[[dict[str, Any]], None]) -> None:
        RqliteReceiver(self.receiver, should_stop).run(on_status)

    def receive(self) -> Child:
        return self.start_receiver()

    def follow(self, schemas: SchemaVersions, *, is_receiving: bool = False) -> RqliteFollower:
        return RqliteFollower(self, schemas, is_receiving=is_receiving)

    def read(self, split: Split) -> Iterator[Changes]:
        if isinstance(split, RqliteCopySplit):
            assert split.copies is not None
            api = None if split.empty else self._asked(split.copies.table.schema)
            return read_chunk(api, split)
        if isinstance(split, RqliteLogSplit):
            api = self._asked(split.service) if split.asks else None
            return read_log(
                str(self.folder_of(split.service)), split, api, passes=self.options.missing_images == "pass"
            )
        raise TypeError(f"not a split of this source: {type(split).__name__}")

    def _asked(self, service: str) -> Api | None:
        """The API of a cluster that the driver has found to have one."""
        apis = self.apis()
        return apis.get(service) or apis.get("")

    def refetch(self, table: TableSchema, keys: pa.Table) -> pa.Table:
        api = self._asked(table.table.schema)
        if api is None:
            raise TableError(
                "its rows cannot be read again: no API is configured", fix="give source.api", table=str(table.table)
            )
        return fetch_by_key(api, table, keys)

    def read_table(self, table: TableSchema) -> TableRows:
        return TableRows(read_rows(self, table))

    def require_received(self, position: str) -> None:
        """rqlite sends nothing again that was acknowledged, and its indexes have gaps: only the state can tell."""
        marks: list[Position] = []
        for folder in self.journal.glob("*/"):
            with closing(JournalReader(folder)) as reader:
                marks.append(reader.mark())
        last = max(marks, default=START)
        if last < Position.parse(position):
            raise LostError(
                f"the journal {self.journal} ends at {last}, but events up to {position} were received and"
                " acknowledged to rqlite: the journal was lost, or put back to an earlier copy",
                position=str(last),
                fix=RESYNC,
            )

    def release(self, upto: Offset) -> None:
        for service, raw in upto["services"].items():
            Cursor(self.folder_of(service), self.context.reader).advance(SqliteOffset.from_json(raw).low_water)

    def progress(self, offset: Offset) -> list[TableProgress]:
        found: list[TableProgress] = []
        for service, raw in offset["services"].items():
            found += SqliteOffset.from_json(raw).progress(partial(catalog.upstream_id, service))
        return found

    def status(self) -> SourceStatus:
        raw = read_status(self.journal, STATUS)
        services = list((raw.get("services") or {}).values())
        error = raw.get("error") or next((one["error"] for one in services if one.get("error")), None) or {}
        marks = [one["mark"] for one in services if one.get("mark")]
        if not error and (retrying := raw.get("retrying")) and is_receiving(self.journal):
            worst = max(retrying, key=lambda one: one["attempts"])
            error = {
                "message": f"rqlite keeps retrying a request of cluster {worst['service'] or 'unknown'}:"
                f" {worst['attempts']} attempts in {worst['seconds']:.0f} seconds; {worst['reason']}",
                "fix": "see `transmit_timeout` and `max_body` in docs/rqlite.md; nothing is lost meanwhile",
            }
        return SourceStatus(
            # A receiver that was killed leaves its last status in the file.
            gear="receiving" if raw.get("receiving") and is_receiving(self.journal) else "waiting",
            received=max(marks, default=None),
            journal_bytes=sum(one.get("journal_bytes") or 0 for one in services),
            error=error.get("message"),
            fix=error.get("fix"),
        )


@lru_cache(maxsize=64)
def _read_pending(api: Api, period: int) -> Pending | None:
    return api.pending()


def _service_of(api: Api) -> str | None:
    """The service that a single URL belongs to; None if the node does not report it."""
    pending = _read_pending(api, int(time.monotonic() / PENDING_SECONDS))
    return None if pending is None else pending.service or SERVICE
