"""Copies a Postgres table to a Delta table with dlt, through connectorx, its fastest way. Needs its own environment."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import dlt
from dlt.sources.sql_database import sql_table


def main() -> None:
    asked = json.loads(sys.argv[1])
    table = sql_table(asked["dsn"], table=asked["table"], backend="connectorx")
    pipeline = dlt.pipeline(
        "peer",
        pipelines_dir=f"{asked['folder']}/pipelines",
        destination=dlt.destinations.filesystem(bucket_url=f"file://{asked['folder']}/lake"),
        dataset_name="public",
    )
    started = time.monotonic()
    pipeline.run(table, table_format="delta", write_disposition="replace")
    seconds = time.monotonic() - started
    rows = pipeline.last_trace.last_normalize_info.row_counts[asked["table"]]
    assert rows == asked["count"], f"{rows} rows of {asked['count']}"
    Path("seconds").write_text(str(seconds))


main()
