"""Bulk reading of the upstream by ADBC."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tailrace.source.postgres.connection import connection_string, row_settings, translated
from tailrace.system.bulk_connection import BulkConnection


@contextmanager
def bulk(dsn: str, doing: str) -> Iterator[BulkConnection]:
    """A session in autocommit: SELECTs come back as Arrow, several statements may share a transaction."""
    with translated(doing), BulkConnection(connection_string(dsn, row_settings(dsn))) as connection:
        yield connection
