"""An object store that is down for long while changes arrive: Postgres keeps all that is not stored."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tailrace.option.value import Secret
from tailrace.source.postgres.receiver import BACKOFF
from tailrace.testing.wait import wait_until
from tests.support.database import PostgresDatabase
from tests.support.postgres_receiving import (
    Session,
    arrived,
    confirmed,
    ids,
    make_source,
    origin,
    receiving,
    server_lsn,
)
from tests.support.slatedb_bucket import serving

FAILURES = 6
"""So many attempts in a row fail before the store is back."""


@pytest.mark.parametrize("is_streaming", [True, False], ids=["while it streams", "before it begins"])
def test_while_the_store_is_down_nothing_is_acknowledged_and_everything_arrives_after(
    database: PostgresDatabase, session: Session, tmp_path: Path, is_streaming: bool
) -> None:
    with serving() as store:
        options = {name: Secret(value) for name, value in store.options.items()}
        journal: dict[str, Any] = {"path": "s3://shop/journal", "storage_options": options}
        source = make_source(database, tmp_path, "public.t", heartbeat=None, journal=journal)
        source.prepare()
        origin(source)
        with receiving(source.receiver_options()) as receiver:
            session.execute("INSERT INTO t VALUES (0, 'x')")
            arrived(session, source)
            wait_until(lambda: receiver.mode == "streaming")
            store.stop()
            if not is_streaming:
                # Without changes it finds out by retention, and then by every new attempt.
                wait_until(lambda: receiver.mode == "waiting")
            stopped_at = time.monotonic()
            stored, last_stored = store.objects("shop/journal"), server_lsn(session)
            failed, count = receiver._failures, 0
            while receiver._failures < failed + FAILURES:
                count += 1
                session.execute("INSERT INTO t VALUES (%s, 'x')", [count])
                assert server_lsn(session) > last_stored
                assert confirmed(session, source) <= last_stored
                assert store.objects("shop/journal") == stored
                time.sleep(0.1)
            # No attempt came before its time: the pauses between them grow.
            assert time.monotonic() - stopped_at >= sum(BACKOFF.delay(failed + n) for n in range(1, FAILURES))
            store.start()
            arrived(session, source)
            wait_until(lambda: confirmed(session, source) > last_stored)
        assert ids(source) == list(range(count + 1))
    assert count > FAILURES
