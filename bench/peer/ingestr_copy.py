"""Copies a Postgres table to a Parquet file with ingestr, a program of its own. Needs its own environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq


def main() -> None:
    asked = json.loads(sys.argv[1])
    out = Path(asked["folder"]) / "out.parquet"
    command = [str(Path(sys.executable).with_name("ingestr")), "ingest", "--yes", "--progress", "log"]
    source = ["--source-uri", asked["dsn"], "--source-table", f"public.{asked['table']}"]
    started = time.monotonic()
    subprocess.run(
        [*command, *source, "--dest-uri", f"parquet://{out}", "--dest-table", asked["table"]],
        check=True,
        env={**os.environ, "INGESTR_DISABLE_TELEMETRY": "true"},
        stdout=subprocess.DEVNULL,
    )
    seconds = time.monotonic() - started
    rows = pq.ParquetFile(out).metadata.num_rows
    assert rows == asked["count"], f"{rows} rows of {asked['count']}"
    Path("seconds").write_text(str(seconds))


main()
