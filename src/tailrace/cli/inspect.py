"""What the commands that only look have to say."""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from typing import TYPE_CHECKING

import typer

from tailrace.cli.report import print_json
from tailrace.errors import Finding

if TYPE_CHECKING:
    from rich.console import Console

    from tailrace.config import PipelineConfig
    from tailrace.schema import TableSchema
    from tailrace.status import Status

_PIPE_WIDTH = 200
_PARTS = ("pyspark", "deltalake", "pyarrow", "psycopg", "pydantic")


def check_pipeline(config: PipelineConfig) -> list[Finding]:
    from tailrace.preflight import check
    from tailrace.registry import open_destination, open_source

    return check(open_source(config), open_destination(config))


def print_findings(findings: list[Finding], *, as_json: bool) -> None:
    if as_json:
        ok = not any(finding.level == "error" for finding in findings)
        print_json({"ok": ok, "findings": [asdict(finding) for finding in findings]})
        return
    for finding in findings:
        color = {"ok": typer.colors.GREEN, "warning": typer.colors.YELLOW, "error": typer.colors.RED}[finding.level]
        typer.echo(f"{typer.style(f'{finding.level:<7}', fg=color)} {finding.subject}: {finding.message}")
        if finding.fix:
            typer.echo("".join(f"        {line}\n" for line in f"fix: {finding.fix}".splitlines()), nl=False)


def print_status(status: Status, *, as_json: bool) -> None:
    from tailrace.view import draw

    if as_json:
        print_json(status.to_dict())
    else:
        make_console().print(draw(status))


def print_tables(tables: list[TableSchema], *, as_json: bool) -> None:
    if as_json:
        values = [
            {
                "table": str(table.table),
                "key": list(table.key),
                "columns": [
                    {"name": c.name, "type": str(c.type), "upstream_type": c.upstream_type, "nullable": c.nullable}
                    for c in table.columns
                ],
            }
            for table in tables
        ]
        print_json({"tables": values})
        return
    for table in tables:
        key = ", ".join(table.key) or "none: append-only"
        typer.echo(f"{table.table}  key {key}  {len(table.columns)} columns")


def print_versions(*, as_json: bool) -> None:
    versions = {name: _version(name) for name in ("tailrace", *_PARTS)} | {"python": platform.python_version()}
    if as_json:
        print_json(versions)
    else:
        typer.echo(f"tailrace {versions['tailrace'] or 'from a source tree'}")


def _version(package: str) -> str | None:
    try:
        return version_of(package)
    except PackageNotFoundError:
        return None


def make_console() -> Console:
    """Rich on stdout. A pipe gets wide lines: nobody's terminal folds them there."""
    from rich.console import Console

    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
