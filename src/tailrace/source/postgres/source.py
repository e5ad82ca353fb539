"""`PostgresSource`: the database, the tables to follow, and the two halves that read it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
from psycopg import sql

from tailrace import errors
from tailrace.errors import Finding, LostError, TailraceError, UnavailableError
from tailrace.journal import Cursor, Journal, JournalReader, ObjectPlace, cursors
from tailrace.model.change import START, Changes
from tailrace.model.schema import TableSchema
from tailrace.model.source_status import SourceStatus
from tailrace.model.table_rows import TableRows
from tailrace.option.table import TableOptions
from tailrace.source.capability import SurveyedTable
from tailrace.source.follower import Offset, SchemaVersions, TableProgress
from tailrace.source.postgres import event_trigger, preflight
from tailrace.source.postgres.catalog import Published
from tailrace.source.postgres.connection import as_of, session
from tailrace.source.postgres.copy import PostgresCopySplit, fetch, read_chunk
from tailrace.source.postgres.follower import FOLLOWER, PostgresFollower
from tailrace.source.postgres.log_split import PostgresLogSplit, read_log
from tailrace.source.postgres.numeric import with_decimals
from tailrace.source.postgres.offset import PostgresOffset, before
from tailrace.source.postgres.option import PostgresOptions
from tailrace.source.postgres.reader import read_rows
from tailrace.source.postgres.receiver import STATUS, PostgresReceiverOptions
from tailrace.source.postgres.server_identity import require_same_history, require_sent
from tailrace.source.postgres.slot import (
    PublicationMark,
    create_publication,
    create_slot,
    drop_slot,
    publication_exists,
    read_slot,
    require,
    waiting_for,
)
from tailrace.source.postgres.survey import survey
from tailrace.source.source import PIPELINE, RESYNC, Source
from tailrace.source.split import Split
from tailrace.system.atomic_file import remove
from tailrace.system.child_process import Child, read_status
from tailrace.system.failpoint import reach

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PostgresSource(Source):
    """A database and the tables to follow. Frozen and picklable; its repr never shows the DSN."""

    Options = PostgresOptions

    options: PostgresOptions

    tables_published: TableOptions | None = None
    """The tables of the pipeline, when this reader follows fewer."""

    @property
    def dsn(self) -> str:
        return self.options.dsn.reveal()

    @property
    def journal(self) -> Path | ObjectPlace:
        return self.options.journal.place

    @property
    def folder(self) -> Path:
        return self.options.journal.local_folder(self.context.state_dir)

    def shared_folders(self) -> dict[str, Path]:
        return {"source.journal.path": self.journal} if isinstance(self.journal, Path) else {}

    @property
    def schema_file(self) -> Path:
        return self.folder / f"{quote(self.context.reader, safe='')}.versions"

    @property
    def follower_status(self) -> str:
        """The name of the status that this reader's follower leaves."""
        own = self.context.reader != PIPELINE
        return f"{FOLLOWER}.{quote(self.context.reader, safe='')}" if own else FOLLOWER

    @property
    def copy_tasks(self) -> int | None:
        return self.options.copying.parallel

    @property
    def parallel(self) -> int:
        """Into how many parts a batch of the log is cut at least, if it is large enough."""
        return os.cpu_count() or 2

    @property
    def is_pipeline(self) -> bool:
        """Whether this is the pipeline itself, and not another reader of its journal."""
        return self.context.is_pipeline

    @property
    def extends_publication(self) -> bool:
        """Whether new tables may be added to tailrace's publication: the pipeline does this, other readers do not."""
        return self.options.create_publication and self.is_pipeline

    def check(self) -> list[Finding]:
        return preflight.check(self)

    def notices(self) -> list[Finding]:
        return preflight.notices(self)

    def tables(self) -> list[TableSchema]:
        return [published.schema for published in self.discover().values()]

    def with_decimals(self, table: TableSchema) -> TableSchema:
        """The table as the file types its columns of type numeric without a precision."""
        return with_decimals(table, self.options.numeric, self.context.tables)

    def survey(self) -> list[SurveyedTable]:
        return survey(self.dsn, via_root=self.options.publish_via_partition_root)

    def discover(self, snapshot: str | None = None) -> dict[int, Published]:
        """The tables to follow, by OID, as they are published (or would be, before the publication exists).

        With the name of an exported snapshot, as that snapshot shows them.
        """
        with session(self.dsn, "reading the tables") as connection, as_of(connection, snapshot):
            return {published.oid: published for published in preflight.select_followed(connection, self)}

    def prepare(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Create the publication and the slot if they are missing. A repeat changes nothing.

        Raises PreflightError with every finding that blocks this, before it creates anything. A new slot waits for open
        transactions; UnavailableError once `should_stop` returns true.
        """
        errors.require(self.check())
        with closing(JournalReader(self.journal)) as journal, session(self.dsn, "preparing the source") as connection:
            if not publication_exists(connection, self.options.publication):
                # One publication serves every reader, so the first reader creates it for all.
                whole = self
                if self.tables_published is not None:
                    whole = replace(self, context=replace(self.context, tables=self.tables_published))
                    errors.require(whole.check())
                tables = [published.schema.table for published in preflight.select_published(connection, whole)]
                mark = PublicationMark(preflight.selection_hash(whole))
                create_publication(
                    connection,
                    self.options.publication,
                    tables,
                    via_root=self.options.publish_via_partition_root,
                    mark=mark,
                )
            if read_slot(connection, self.options.slot) is None:
                if journal.mark() > START:
                    raise LostError(
                        f"the replication slot {self.options.slot!r} is gone, and with it the changes since the"
                        " last one read",
                        fix=RESYNC,
                    )
                reach("postgres.before_slot")
                create_slot(connection, self.options.slot, should_stop, self._log_wait)
            status = read_slot(connection, self.options.slot)
            if journal.mark() > START and status is not None and status.active_pid is None:
                # The receiver checks this, too, and waits if it has to. But a run with `--once` may end before it does.
                with suppress(UnavailableError):
                    require_sent(status, journal.mark().commit + 1)
                    require_same_history(self.dsn, self.options.slot, self.options.publication, self.journal, status)
            if journal.mark() == START:
                # A new journal begins at the slot's position; every table is copied at a later one.
                status = require(read_slot(connection, self.options.slot), self.options.slot, RESYNC)
                Journal.open_writer(self.journal, origin=before(status.confirmed)).close()

    def _log_wait(self) -> None:
        with suppress(TailraceError), session(self.dsn, "reading the open transactions") as connection:
            for finding in waiting_for(connection):
                _log.warning("%s %r: %s. Fix: %s", finding.subject, self.options.slot, finding.message, finding.fix)

    def setup_sql(self, *, remove: bool) -> str:
        return event_trigger.uninstall_sql() if remove else event_trigger.install_sql()

    def set_up(self, *, remove: bool) -> str:
        with session(self.dsn, "installing the event trigger") as connection:
            if remove:
                connection.execute(sql.SQL(event_trigger.uninstall_sql()))
                return "the event trigger is removed; schema changes are derived from the log"
            event_trigger.install(connection)
            return "the event trigger is installed; schema changes arrive in order with the rows"

    def reset(self) -> None:
        """Drop the slot and the journal.

        Raises OwnedError while another process reads the slot or writes the journal, UnavailableError when the journal
        cannot be removed.
        """
        with Journal.removing(self.journal), session(self.dsn, "dropping the slot") as connection:
            drop_slot(connection, self.options.slot)
        if isinstance(self.journal, ObjectPlace):
            remove(self.folder)

    def forget(self) -> None:
        Cursor(self.journal, self.context.reader).drop()
        remove(self.schema_file)

    def readers(self) -> Collection[str]:
        return cursors(self.journal)

    def slowest_reader(self) -> str | None:
        return min(cursors(self.journal).items(), key=lambda item: item[1], default=(None, START))[0]

    def receive(self) -> Child:
        return self.receiver()

    def follow(self, schemas: SchemaVersions, *, is_receiving: bool = False) -> PostgresFollower:
        return PostgresFollower(self, schemas, is_receiving=is_receiving)

    def read(self, split: Split) -> Iterator[Changes]:
        if isinstance(split, PostgresCopySplit):
            return read_chunk(self.dsn, split)
        if isinstance(split, PostgresLogSplit):
            return read_log(self.journal, split)
        raise TypeError(f"not a split of this source: {type(split).__name__}")

    def refetch(self, table: TableSchema, keys: pa.Table) -> pa.Table:
        return fetch(self.dsn, table, keys)

    def read_table(self, table: TableSchema) -> TableRows:
        return TableRows(read_rows(self, table))

    def release(self, upto: Offset) -> None:
        Cursor(self.journal, self.context.reader).advance(PostgresOffset.from_json(upto).low_water)

    def for_reader(self, reader: str, table: str | None = None) -> PostgresSource:
        return replace(super().for_reader(reader, table), tables_published=self.context.tables)

    def progress(self, offset: Offset) -> list[TableProgress]:
        return PostgresOffset.from_json(offset).progress()

    def status(self) -> SourceStatus:
        raw = read_status(self.folder, STATUS)
        error = raw.get("error") or {}

        def position(name: str) -> str | None:
            return str(before(raw[name])) if raw.get(name) else None

        return SourceStatus(
            gear=raw.get("gear"),
            received=position("durable"),
            journal_bytes=raw.get("journal_bytes"),
            server=position("server"),
            slot_restart=position("restart"),
            slot_confirmed=position("confirmed"),
            wal_status=raw.get("wal_status") or None,
            safe_wal_bytes=raw.get("safe_wal_bytes"),
            error=error.get("message"),
            fix=error.get("fix"),
        )

    def idle_until(self) -> tuple[str, str] | None:
        passed = read_status(self.folder, self.follower_status).get("passed")
        return (passed[0], passed[1]) if passed else None

    def receiver(self, *, patience_seconds: float = 0.0) -> Child:
        """The receiver process. One serves every reader of a journal."""
        return Child(
            "tailrace.source.postgres",
            self.receiver_options().to_json(),
            self.folder,
            STATUS,
            is_busy=partial(Journal.is_written, self.journal),
            patience_seconds=patience_seconds,
        )

    def receiver_options(self) -> PostgresReceiverOptions:
        return PostgresReceiverOptions(
            dsn=self.dsn,
            slot=self.options.slot,
            publication=self.options.publication,
            journal=str(self.journal),
            storage_options=dict(self.journal.options) if isinstance(self.journal, ObjectPlace) else None,
            folder=str(self.folder),
            segment_bytes=self.options.journal.segment_bytes,
            max_bytes=self.options.journal.max_bytes,
            acknowledge=self.options.acknowledge,
            heartbeat_seconds=self.options.heartbeat,
            messages=self.options.messages,
        )
