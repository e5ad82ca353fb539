"""Measures copies of tables of other shapes than the shop's: large, many, wide and narrow ones.

`python -m bench --only shape`. 10 GB of disk at full scale.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import psycopg

from bench.lake import require_equal
from bench.process import cpu_seconds
from bench.report import Report
from bench.runner import Runner
from bench.server import Server

# Ten columns of the kinds that the shop's orders have.
_ORDERS = (
    "id bigint PRIMARY KEY, customer_id bigint, status text, currency char(3), total numeric(12,2), items int,"
    " note text, created_at timestamptz, updated_at timestamptz, express boolean"
)
_ORDER = (
    "i, 1 + i * 7919 % 200000, 'placed', 'EUR', (i * 7331 % 10000000) / 100.0, 2,"
    " CASE WHEN i % 5 = 0 THEN 'leave it with the neighbours, number ' || i % 90 END,"
    " timestamptz '2024-01-01 00:00:00+00' + i * interval '1 second', now(), i % 10 = 0"
)
_KINDS = (
    ("bigint", "i * {n}"),
    ("text", "'value ' || i % 1000"),
    ("numeric(12,2)", "i * {n} % 1000000 / 100.0"),
    ("timestamptz", "timestamptz '2024-01-01 00:00:00+00' + i * interval '{n} seconds'"),
    ("double precision", "i / ({n} + 1.0)"),
)
_WIDE = [_KINDS[number % len(_KINDS)] for number in range(99)]


@dataclass(frozen=True)
class Shape:
    """Tables that are copied together. `rows` are those of all."""

    name: str
    rows: int
    columns: str
    values: str
    aim: float
    tables: int = 1


SHAPES = (
    Shape("10 M rows", 10_000_000, _ORDERS, _ORDER, 0.8),
    Shape("20 tables", 2_000_000, _ORDERS, _ORDER, 0.6, tables=20),
    Shape(
        "100 columns",
        200_000,
        ", ".join(["id bigint PRIMARY KEY", *(f"c{n} {kind}" for n, (kind, _) in enumerate(_WIDE))]),
        ", ".join(["i", *(value.format(n=n) for n, (_, value) in enumerate(_WIDE))]),
        0.6,
    ),
    Shape("2 columns", 5_000_000, "id bigint PRIMARY KEY, v bigint", "i, i * 7919", 0.6),
)


def measure(report: Report, folder: Path, scale: float) -> None:
    with Server(folder) as server, Runner(folder / "spark", {}) as runner:
        # The first of all runs starts the workers.
        _copy(report, server, runner, folder, Shape("warm-up", 10_000, _ORDERS, _ORDER, 0.0), 1.0)
        for shape in SHAPES:
            _copy(report, server, runner, folder, shape, scale)


def _copy(report: Report, server: Server, runner: Runner, folder: Path, shape: Shape, scale: float) -> None:
    name = "shape_" + shape.name.replace(" ", "_").replace("-", "_").lower()
    rows = int(shape.rows * scale)
    with server.create_database(name) as connection:
        tables = _fill(connection, shape, rows)
    dsn, lake = server.postgres.dsn(name), folder / name / "lake"
    pipeline = {
        "name": name,
        "source": {"type": "postgres", "dsn": dsn},
        "tables": {"include": ["public.*"]},
        "destination": {"type": "delta", "path": str(lake)},
        "state": str(folder / name / "state"),
    }

    def raw() -> float:
        return sum(server.copy_out(name, table) for table in tables)

    first = raw()
    postmaster = server.postgres.pid
    assert postmaster is not None
    before = cpu_seconds(postmaster)
    run = runner.once(pipeline)
    server_cpu = cpu_seconds(postmaster) - before
    seconds = mean([first, raw()])
    require_equal(dsn, lake, tables)
    if shape.aim:
        report.add("shape", f"{shape.name}: pipeline", rows / run.seconds, "rows/s")
        report.add("shape", f"{shape.name}: ratio to psql COPY binary", seconds / run.seconds, "", shape.aim)
        report.add("shape", "  the same without start-up", seconds / (run.seconds - run.startup_seconds))
        report.note(
            f"{shape.name}: CPU seconds: Python {run.cpu.python:.1f}, Java {run.cpu.other:.1f},"
            f" server {server_cpu.python + server_cpu.other:.1f}"
        )
    with server.postgres.connect(name) as connection:
        connection.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database()"
        )
    server.drop_database(name)
    shutil.rmtree(folder / name)


def _fill(connection: psycopg.Connection, shape: Shape, rows: int) -> list[str]:
    tables = [f"t{number:02}" for number in range(shape.tables)]
    for table in tables:
        connection.execute(f"CREATE TABLE {table} ({shape.columns})".encode())
        fill = f"INSERT INTO {table} SELECT {shape.values} FROM generate_series(1::bigint, {rows // shape.tables}) i"
        connection.execute(fill.encode())
        connection.execute(f"VACUUM (FREEZE, ANALYZE) {table}".encode())
    connection.execute("CHECKPOINT")
    return tables
