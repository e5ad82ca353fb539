"""What the commands that only look have to say."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from typing import TYPE_CHECKING

import typer

from tailrace.cli.report import colored, print_json, print_result
from tailrace.errors import ConfigError, Finding

if TYPE_CHECKING:
    from rich.console import Console

    from tailrace.config import PipelineConfig
    from tailrace.schema import TableSchema
    from tailrace.state import TableRecord
    from tailrace.status import PipelineStatus

_PIPE_WIDTH = 200
_PARTS = ("pyspark", "deltalake", "pyarrow", "psycopg", "pydantic")


def check_pipeline(config: PipelineConfig) -> list[Finding]:
    from tailrace.option import nearest
    from tailrace.preflight import check
    from tailrace.registry import open_destination, open_source

    findings = check(open_source(config), open_destination(config))
    if not os.access(folder := nearest(config.state), os.W_OK | os.X_OK):
        fix = "let this user write there, or set `state` to another folder"
        findings.append(Finding("error", "state", f"{folder} is not writable", fix))
    return findings


def print_findings(findings: list[Finding], *, as_json: bool) -> None:
    if as_json:
        ok = not any(finding.level == "error" for finding in findings)
        print_json({"ok": ok, "findings": [finding.to_dict() for finding in findings]})
        return
    for finding in findings:
        color = {"ok": typer.colors.GREEN, "warning": typer.colors.YELLOW, "error": typer.colors.RED}[finding.level]
        typer.echo(f"{colored(f'{finding.level:<7}', color)} {finding.subject}: {finding.message}")
        if finding.fix:
            typer.echo("".join(f"        {line}\n" for line in f"fix: {finding.fix}".splitlines()), nl=False)


def print_status(status: PipelineStatus, *, as_json: bool) -> None:
    from tailrace.view import draw

    if as_json:
        print_json(status.to_dict())
    else:
        make_console().print(draw(status))


def read_states(config: PipelineConfig) -> dict[str, TableRecord]:
    """What the state store knows of each table, by name; nothing before the first run."""
    try:
        with config.store_address.open_reading() as store:
            return {record.name: record for record in store.tables()}
    except ConfigError:
        return {}


def print_tables(tables: list[TableSchema], states: Mapping[str, TableRecord], *, as_json: bool) -> None:
    if as_json:
        values = [
            {
                "table": str(table.table),
                "key": list(table.key),
                **_standing(states.get(str(table.table))),
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
        known = states.get(str(table.table))
        state = f"  {known.state}{', paused' if known.paused_at else ''}" if known else ""
        typer.echo(f"{table.table}  key {key}  {len(table.columns)} columns{state}")
        if known and known.reason:
            typer.echo(f"    {known.reason}")


def _standing(known: TableRecord | None) -> dict[str, str | None]:
    since = known.since[known.state].isoformat() if known else None
    paused = known.paused_at.isoformat() if known and known.paused_at else None
    state, reason = (str(known.state), known.reason) if known else (None, None)
    return {"state": state, "since": since, "reason": reason, "paused_at": paused}


def print_versions(*, as_json: bool) -> None:
    versions = {name: _version(name) for name in ("tailrace", *_PARTS)} | {"python": platform.python_version()}
    print_result(f"tailrace {versions['tailrace'] or 'from a source tree'}", versions, as_json=as_json)


def _version(package: str) -> str | None:
    try:
        return version_of(package)
    except PackageNotFoundError:
        return None


def make_console() -> Console:
    """Rich on stdout. A pipe gets wide lines: nobody's terminal folds them there."""
    from rich.console import Console

    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
