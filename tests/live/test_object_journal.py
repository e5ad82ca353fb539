"""A pipeline whose journal is in an object store, killed and cut off from the store: all is the same afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tailrace.demo.server import EmbeddedPostgres
from tailrace.demo.traffic import Traffic
from tailrace.demo.workload import create_shop, load_shop
from tailrace.journal.writer import KEPT_PIECES
from tailrace.testing.wait import wait_until
from tests.support.scenario import Scenario
from tests.support.slatedb_bucket import BucketProcess, serving

OUTAGE_SECONDS = 20.0
"""Longer than all that repeats a request by itself."""


def test_a_pipeline_with_its_journal_in_an_object_store_survives_kills_and_an_outage_and_keeps_it_small(
    tmp_path: Path, make_scenario: Callable[..., Scenario]
) -> None:
    with EmbeddedPostgres(tmp_path / "server", fast=False) as server, serving() as store:
        journal: dict[str, Any] = {"path": "s3://shop/some/journal", "storage_options": store.options}
        scenario = make_scenario(
            server.dsn(), source={"journal": journal, "heartbeat": "1s"}, spark={"master": "local[2]"}
        )
        with server.connect() as conn:
            create_shop(conn)
            load_shop(conn, 0.02)
        with Traffic(server.dsn(), seed=3, rate=50):
            with scenario.run() as run:
                scenario.catch_up(run)
                run.kill()
            with scenario.run() as run:
                scenario.catch_up(run)
                store.stop()
                # Whatever is stored was sent before now; the traffic goes on.
                last_stored = scenario.value("SELECT pg_current_wal_insert_lsn()")
                stored = store.objects("shop/some/journal/")
                run.wait_until(lambda status: status.source is not None and status.source.error is not None)
                until = time.monotonic() + OUTAGE_SECONDS
                while time.monotonic() < until:
                    time.sleep(0.5)
                    assert scenario.value(f"SELECT pg_current_wal_insert_lsn() > '{last_stored}'")
                    assert scenario.value(f"SELECT confirmed_flush_lsn <= '{last_stored}' FROM pg_replication_slots")
                assert store.objects("shop/some/journal/") == stored
                store.start()
                scenario.catch_up(run)
        with scenario.run() as run:
            scenario.catch_up(run)
            assert scenario.differences() == []
            # Retention removes what was applied: a few pieces stay for readers that are a little late.
            wait_until(lambda: len(_pieces(store)) <= 2 * KEPT_PIECES + 2)
            run.terminate()
            assert run.wait() == 0
        assert "CANARY" not in run.log_file.read_text()
        assert not list(scenario.state.rglob("*.seg"))
        assert scenario.doubled() == []
        scenario.execute("reset", "--yes")
        assert store.objects("shop/some/journal") == {}


def _pieces(store: BucketProcess) -> list[str]:
    return [name for name in store.objects("shop/some/journal/") if name.endswith(".seg")]
