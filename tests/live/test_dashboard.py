"""The dashboard next to a pipeline that runs: what it shows is what happens, and what it asks for is done."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tailrace.testing.wait import wait_until
from tests.support.dashboard import Client
from tests.support.runner import RunningPipeline, all_ready
from tests.support.sqlite_application import Application

FILE = """\
name: shop
source: {type: sqlite, path: app.db}
destination: {type: sqlite, path: lake.db}
state: state
spark: {master: "local[2]"}
"""


def test_a_run_serves_its_dashboard_and_does_what_is_asked_there(tmp_path: Path) -> None:
    application = Application(tmp_path / "app.db", "trigger")
    application.run("CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT)")
    application.run("INSERT INTO items VALUES (1, 'c4nary'), (2, 'c4nary')")
    application.capture()
    file = tmp_path / "shop.yaml"
    file.write_text(FILE)
    with RunningPipeline(file, "--dashboard", "--listen", "127.0.0.1:0") as run:
        run.wait_until(all_ready)
        said = re.search(r"the dashboard is at http://127\.0\.0\.1:(\d+)/", run.log_file.read_text())
        assert said is not None
        client = Client(int(said[1]))
        [row] = client.pipeline("shop", "/tables")["tables"]
        assert (row["name"], row["group"], row["rows_copied"]) == ("main.items", "following", 2)
        shown = client.pipeline()
        assert (shown["health"]["level"], shown["runner"]["pid"]) == ("healthy", run.pid)

        application.run("INSERT INTO items VALUES (3, 'c4nary')")
        application.run("UPDATE items SET name = 'c4nary' WHERE id = 1")
        application.run("DELETE FROM items WHERE id = 2")

        def counts() -> tuple[int, ...]:
            [table] = client.pipeline("shop", "/tables")["tables"]
            return table["inserts"], table["updates"], table["deletes"]

        wait_until(lambda: counts() == (1, 1, 1))
        assert {"decode", "write"} <= client.pipeline()["phases"].keys()

        number = client.act("pause", "main.items").json["request"]

        def request() -> Any:
            return client.pipeline("shop", f"/requests/{number}")

        wait_until(lambda: request()["outcome"] == "paused")
        wait_until(lambda: client.table("main.items")["group"] == "paused")
        assert client.act("resync", "main.items").status == 202
        for path in ("/api/v1/pipelines/shop", "/api/v1/pipelines/shop/tables/main.items", "/metrics"):
            assert b"c4nary" not in client.get(path).body
        run.terminate()
        assert run.wait() == 0
    application.close()
