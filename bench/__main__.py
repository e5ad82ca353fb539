"""`python -m bench`: measure the pipeline on this machine. Needs the extra `embedded`."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from bench import growth
from bench.part import Stage
from bench.report import Report
from bench.runner import Runner
from bench.server import Server
from bench.workload import Size

PARTS = ("copy", "stream", "small", "trickle", "tables", "large", "backlog", "growth")
"""The parts that measure the pipeline from Postgres to Delta."""
LONG = ("backlog", "growth")
"""Those of them that run only when they are named: they need minutes, and gigabytes of disk."""
ALONE = ("capture", "journal", "queue", "slatedb", "sync")
"""Parts that need neither Postgres nor Spark; each is a module with a function `measure`."""
ON_REQUEST = ("poll", "webhook", "peers", "upkeep", "many", "fair", "shape", "start")
"""Modules of the same form that run only when they are named: they need extras, minutes, or the package index."""


def main() -> None:
    options = _options()
    report = Report()
    folder = Path(tempfile.mkdtemp(prefix="tailrace-bench-", dir=options.folder))
    try:
        for name in options.only:
            if name in (*ALONE, *ON_REQUEST):
                import_module(f"bench.{name}").measure(report, folder, options.scale)
        if set(options.only) & set(PARTS):
            with Server(folder) as server, Runner(folder / "spark", dict(options.conf)) as runner:
                _measure(set(options.only), options.scale, server, runner, folder, report)
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    report.show()
    if options.json:
        report.save(options.json)


def _measure(only: set[str], scale: float, server: Server, runner: Runner, folder: Path, report: Report) -> None:
    size = Size.scaled(scale)

    def stage(database: str, size: Size, tables: int = 1) -> Stage:
        return Stage(server, runner, folder, report, size, database, tables)

    # Start Python workers and load their imports and Spark's classes before anything is timed.
    stage("warmup", Size.scaled(0.005)).copy(aim=None)
    if "backlog" in only:
        warehouse = stage("warehouse", Size.scaled(4 * scale))
        warehouse.copy(aim=None)
        warehouse.backlog()
        warehouse.close()
    if "growth" in only:
        growth.measure(lambda name, rows: stage(name, replace(size, rows=rows)), report, scale)
    if not only & set(PARTS) - set(LONG):
        return
    shop = stage("shop", size)
    shop.copy(0.6 if "copy" in only else None)
    one = shop.stream() if only & {"stream", "tables"} else None
    if "small" in only:
        shop.small()
    if "trickle" in only:
        shop.trickle()
    if "large" in only:
        shop.large()
    if one is not None and "tables" in only:
        many = stage("mall", size, size.tables)
        many.copy(aim=None)
        many.spread(one)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--scale", type=float, default=1.0, help="0.1 for a quick run; a small run measures mostly start-up"
    )
    parser.add_argument(
        "--only",
        type=_parts,
        default=tuple(part for part in (*PARTS, *ALONE) if part not in LONG),
        help=f"some of {','.join((*PARTS, *ALONE, *ON_REQUEST))}",
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--folder", type=Path, help="where to put the server and the lake during the run")
    parser.add_argument("--keep", action="store_true", help="do not delete that folder at the end")
    parser.add_argument("--conf", type=_setting, action="append", default=[], help="a Spark setting, key=value")
    return parser.parse_args()


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if unknown := set(parts) - {*PARTS, *ALONE, *ON_REQUEST}:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    return parts


def _setting(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    return key, value


if __name__ == "__main__":
    main()
