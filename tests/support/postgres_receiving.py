"""A receiver in a thread of this process, and what stands in the server and in its journal."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg

from tailrace.errors import TailraceError
from tailrace.journal import JournalReader
from tailrace.model.change import Position
from tailrace.option.table import TableOptions
from tailrace.source.postgres.frame_builder import FrameMeta, messages_of
from tailrace.source.postgres.offset import before, parse_lsn
from tailrace.source.postgres.pgoutput.decode import decode, only
from tailrace.source.postgres.receiver import PostgresReceiver, PostgresReceiverOptions
from tailrace.source.postgres.source import PostgresSource
from tailrace.testing.wait import wait_until
from tests.support.database import PostgresDatabase
from tests.support.source_making import make_postgres

Session = psycopg.Connection[Any]


def make_source(database: PostgresDatabase, folder: Path, *tables: str, **options: Any) -> PostgresSource:
    """A source of these tables with its journal in the folder, not yet prepared."""
    return make_postgres(
        database.dsn,
        folder,
        "receive",
        TableOptions(include=list(tables)),
        slot=f"receive_{database.name}",
        **{"journal": {"segment_bytes": 1_000_000}, **options},
    )


def make_received(database: PostgresDatabase, folder: Path) -> PostgresSource:
    """A prepared source of the table `t`. Nothing but the test writes to the server: it has no heartbeat."""
    made = make_source(database, folder, "public.t", heartbeat=None)
    made.prepare()
    origin(made)
    return made


@contextmanager
def receiving(options: PostgresReceiverOptions, *, fails: bool = False) -> Iterator[PostgresReceiver]:
    """A receiver in a thread of this process. What ended it is raised at the end of the block; `fails` waits for it."""
    stop = threading.Event()
    failure: list[TailraceError] = []
    made = PostgresReceiver(options, stop.is_set)

    def run() -> None:
        try:
            made.run()
        except TailraceError as error:
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield made
        if fails:
            thread.join()
    finally:
        stop.set()
        thread.join()
        made.writer.close()
        made._close_session()
    if failure:
        raise failure[0]


def server_lsn(session: Session) -> int:
    row = session.execute("SELECT pg_current_wal_flush_lsn()").fetchone()
    assert row is not None
    return parse_lsn(row[0])


def confirmed(session: Session, source: PostgresSource) -> int:
    query = "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = %s"
    row = session.execute(query, [source.options.slot]).fetchone()
    assert row is not None
    return parse_lsn(row[0])


def arrived(session: Session, source: PostgresSource) -> None:
    """Wait until everything committed now is in the journal."""
    goal = before(server_lsn(session))
    wait_until(lambda: mark(source) >= goal)


def mark(source: PostgresSource) -> Position:
    """How far the journal goes now."""
    with closing(JournalReader(source.journal)) as reader:
        return reader.mark()


def ids(source: PostgresSource, after: Position | None = None) -> list[int]:
    """The key of every change in the journal, in order; of those past `after`, if it is given."""
    tables = {oid: only(published.schema) for oid, published in source.discover().items()}
    found: list[int] = []
    with closing(JournalReader(source.journal)) as reader:
        for ref in reader.frames(after or origin(source), reader.head()):
            meta = FrameMeta.from_bytes(ref.meta)
            for changes in decode(
                messages_of(reader.read(ref).payload),
                relations=meta.parsed_relations(),
                transaction=meta.transaction,
                tables=tables,
            ):
                found += changes.row.field("id").to_pylist()
    return found


def origin(source: PostgresSource) -> Position:
    """Where the journal stood when it was first asked for."""
    return _ORIGINS.setdefault(source.folder, mark(source))


_ORIGINS: dict[Path, Position] = {}
