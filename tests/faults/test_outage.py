"""Servers that restart and networks that break: the pipeline waits, comes back by itself, and all is the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tailrace.demo.server import EmbeddedPostgres
from tailrace.demo.traffic import Traffic
from tailrace.demo.workload import create_shop, load_shop
from tailrace.testing.wait import wait_until
from tests.support.proxy import Proxy
from tests.support.scenario import Scenario

SILENCE = {"TAILRACE_SILENCE_SECONDS": "4"}
MANY_ROWS = "INSERT INTO wide SELECT i, repeat(md5(i::text), 30) FROM generate_series(1, 12000) i"


def test_a_server_that_restarts_in_a_copy_and_in_batches_is_waited_for(
    tmp_path: Path, make_scenario: Callable[..., Scenario]
) -> None:
    with EmbeddedPostgres(tmp_path / "server", fast=False) as server:
        scenario = make_scenario(
            server.dsn(), source={"copy": {"chunk_bytes": "1 MB"}}, batch={"max_bytes": "1 MB", "max_rows": 500}
        )
        with server.connect() as conn:
            create_shop(conn)
            load_shop(conn, 0.05)
        scenario.sql("CREATE TABLE wide (id int PRIMARY KEY, filler text)", MANY_ROWS)
        with scenario.run() as run:
            run.wait_until(lambda status: any(table.chunks_done for table in status.tables))
            server.restart("immediate")
            with Traffic(server.dsn(), seed=1, rate=50):
                scenario.catch_up(run)
                server.restart("fast")
                scenario.catch_up(run)
                server.restart("immediate")
                scenario.catch_up(run)
            scenario.catch_up(run)
            assert scenario.differences() == []
        assert scenario.doubled() == []


def test_a_network_that_cuts_flaps_slows_down_and_goes_silent_is_survived(
    tmp_path: Path, make_scenario: Callable[..., Scenario]
) -> None:
    with (
        EmbeddedPostgres(tmp_path / "server") as server,
        Proxy("127.0.0.1", server.port) as proxy,
    ):
        scenario = make_scenario(server.dsn())
        scenario.write(source={"dsn": f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres", "heartbeat": "1s"})
        with server.connect() as conn:
            create_shop(conn)
            load_shop(conn, 0.02)
        with scenario.run(environment=SILENCE) as run, Traffic(server.dsn(), seed=2, rate=30):
            scenario.catch_up(run)

            proxy.cut()
            scenario.catch_up(run)

            for _ in range(5):
                wait_until(lambda: proxy.connections > 0)
                proxy.cut()
            scenario.catch_up(run)

            proxy.delay(0.05)
            scenario.catch_up(run)
            proxy.restore()

            proxy.blackhole()
            run.wait_until(lambda status: status.source is not None and status.source.error is not None)
            proxy.restore()
            scenario.catch_up(run)

            proxy.refuse()
            proxy.cut()
            run.wait_until(lambda status: status.source is not None and status.source.gear == "waiting")
            proxy.restore()
            scenario.catch_up(run)

            # A copy whose network is silent waits for a bounded time, says so, and does not keep the run from ending.
            scenario.sql(
                "CREATE TABLE late (id int PRIMARY KEY, filler text)",
                "INSERT INTO late SELECT i, repeat(md5(i::text), 300) FROM generate_series(1, 20000) i",
            )
            run.wait_until(lambda status: any(table.name == "public.late" for table in status.tables))
            proxy.blackhole()
            run.wait_until(lambda status: status.source is not None and status.source.error is not None)
            run.terminate()
            assert run.wait() == 0
            assert "Traceback" not in run.log_file.read_text()
            proxy.restore()
        scenario.apply()
        assert scenario.differences() == []
        assert scenario.doubled() == []
