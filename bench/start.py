"""Measures a pipeline from the command line: how long it takes to start, and what it costs while nothing happens.

`python -m bench --only start`. Each run is a process of its own, so its time goes from the command to its end, with the
interpreter, the checks, Java and Spark in it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.part import wait_for
from bench.process import cpu_by_process, cpu_seconds, memory_bytes
from bench.report import Report
from bench.server import PUBLICATION, Server

RUNS = 3
TABLES = 3
ROWS = 1_000
SETTLE_SECONDS = 15.0
IDLE_SECONDS = 30.0
LEAST_CPU_SECONDS = 0.02
READ_COMMANDS = (["--help"], ["status"], ["check"])

FILE = """
name: start
source: {{type: postgres, dsn: "{dsn}", publication: {publication}}}
tables: {{include: ["public.*"]}}
destination: {{type: delta, path: {folder}/lake}}
state: {folder}/state
"""


def measure(report: Report, folder: Path, scale: float) -> None:
    with Server(folder) as server, server.create_database("start") as connection:
        for number in range(TABLES):
            connection.execute(f"CREATE TABLE t{number} (id bigint PRIMARY KEY, v text)".encode())
            connection.execute(
                f"INSERT INTO t{number} SELECT i, 'row ' || i FROM generate_series(1, {ROWS}) i".encode()
            )
        file = folder / "start.yaml"
        file.write_text(FILE.format(dsn=server.postgres.dsn("start"), publication=PUBLICATION, folder=folder))
        _first_rows(report, file, folder / "lake/public")
        # The fastest of several, as another program on the machine can only make them slower.
        report.add("start", "run --once with nothing to do", min(_run(file) for _ in range(RUNS)), "s", 4.5, "most")
        _commands(report, file)
        _idle(report, file, IDLE_SECONDS * max(scale, 0.3))


def _command(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("tailrace")), *arguments]


def _run(file: Path) -> float:
    began = time.perf_counter()
    subprocess.run(_command("run", str(file), "--once"), check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def _first_rows(report: Report, file: Path, lake: Path) -> None:
    """The copy of a small database: until one table, and until all, can be read."""
    began = time.time()
    whole = _run(file)
    # The first commit of a table may be empty; one with rows names a file.
    seen = sorted(
        min(entry.stat().st_mtime for entry in (lake / f"t{number}/_delta_log").glob("*.json") if _has_rows(entry))
        for number in range(TABLES)
    )
    report.add("start", "first row of a small database, from the command", seen[0] - began, "s", 6.0, "most")
    report.add("start", "all its rows", seen[-1] - began, "s")
    report.add("start", "run --once that copies them", whole, "s")


def _has_rows(entry: Path) -> bool:
    return any("add" in json.loads(line) for line in entry.read_text("utf-8").splitlines())


def _commands(report: Report, file: Path) -> None:
    """The processor's time, which a busy machine changes less."""
    for words in READ_COMMANDS:
        arguments = words if words == ["--help"] else [*words, str(file)]
        report.add("start", f"tailrace {words[0]}, CPU", min(_cpu_of(arguments) for _ in range(RUNS)), "s")


def _cpu_of(arguments: list[str]) -> float:
    code = (
        "import resource, subprocess, sys;"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL);"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN); print(used.ru_utime + used.ru_stime)"
    )
    done = subprocess.run([sys.executable, "-c", code, *_command(*arguments)], check=True, capture_output=True)
    return float(done.stdout.splitlines()[-1])


def _idle(report: Report, file: Path, seconds: float) -> None:
    """A pipeline that follows a database in which nothing happens."""
    process = subprocess.Popen(
        _command("run", str(file), "--json"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(lambda: _status(file).get("runner") is not None, "the pipeline does not run")
        time.sleep(SETTLE_SECONDS)
        before, each = cpu_seconds(process.pid), cpu_by_process(process.pid)
        time.sleep(seconds)
        used = cpu_seconds(process.pid) - before
        memory = memory_bytes(process.pid)
        for name, total in sorted(cpu_by_process(process.pid).items(), key=lambda item: -item[1]):
            if (spent := total - each.get(name, 0.0)) >= LEAST_CPU_SECONDS:
                report.note(f"  {spent / seconds * 100:5.2f} % of a core {name}")
        report.add("start", "CPU while idle", (used.python + used.other) / seconds * 100, "% of a core", 2.0, "most")
        report.add("start", "memory while idle", sum(memory.values()) / 1e6, "MB", 900.0, "most")
        report.add("start", "processes while idle", len(memory))
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def _status(file: Path) -> dict[str, Any]:
    done = subprocess.run(_command("status", str(file), "--json"), capture_output=True, check=False)
    if done.returncode:
        return {}
    found: dict[str, Any] = json.loads(done.stdout)
    return found
