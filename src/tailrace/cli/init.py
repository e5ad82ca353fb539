"""`tailrace init`: look at a database and write the file of a pipeline that follows it."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.error import Debug, Json, print_json
from tailrace.cli.text import colored, say, say_lines
from tailrace.errors import ConfigError, Finding, UnavailableError, name_file
from tailrace.model.quantity_text import format_count

if TYPE_CHECKING:
    from tailrace.config.draft import Draft
    from tailrace.source.capability import SurveyedTable

SCHEMA = Path(".tailrace", "schema.json")
"""Next to the pipeline's file, where its state is by default as well."""


def init(
    address: Annotated[
        str | None,
        typer.Argument(
            metavar="[DSN]",
            help="postgresql://…, the path of an SQLite file, or a URL of rqlite. Without it, a template is written.",
            show_default=False,
        ),
    ] = None,
    variable: Annotated[
        str | None,
        typer.Option("--env", metavar="NAME", help="Take the DSN from this environment variable.", show_default=False),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="The type of the source; default: what fits the DSN.", show_default=False),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The pipeline's name; default: that of the database.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file to write; default: NAME.yaml.", show_default=False)
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask first.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Look at a database and write the file of a pipeline that follows it, then check that everything is ready.

    Lists the tables with their keys and rows. Those that lack a key, or have another problem, are left out in the file
    with the reason. The file holds no password: it refers to an environment variable. An existing file is never
    overwritten, and the database is not changed. Exits with 3 if something is missing, as `tailrace check` does.
    """
    from tailrace.config.draft import choose_section, make_draft, render

    address = _read_address(address, variable, asks=not (yes or source or as_json))
    type_, section = choose_section(address, source)
    folder = (output.parent if output else Path()).absolute()
    draft = make_draft(type_, section, name, folder, variable)
    file = output or Path(f"{draft.name}.yaml")
    if file.exists():
        raise ConfigError(f"{file} exists and is not overwritten", fix="name another file with --output")
    tables = _survey(draft, folder) if address is not None else None
    if not as_json:
        _print_tables(type_, tables)
    if not (yes or as_json) and sys.stdin.isatty():
        typer.confirm(f"Write {file}?", default=True, abort=True, err=True)
    _write(file, render(draft, tables, file, SCHEMA.as_posix()))
    findings = _check(file, draft) if tables is not None else []
    _report(file, draft, tables, findings, as_json=as_json)
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(3)


def _read_address(address: str | None, variable: str | None, *, asks: bool) -> str | None:
    if variable is not None:
        if address is not None:
            raise ConfigError("both a DSN and --env are given", fix="leave one of them out")
        if not os.environ.get(variable):
            raise ConfigError(f"the environment variable {variable} is not set", fix=f"export {variable}=…")
        return os.environ[variable]
    if address is None and asks and sys.stdin.isatty():
        # Not shown, as it may hold a password, which then is in no history of commands either.
        asked = "DSN or path of the database, not shown (nothing: write a template)"
        address = typer.prompt(asked, default="", hide_input=True, show_default=False, err=True) or None
    return address


def _survey(draft: Draft, folder: Path) -> list[SurveyedTable]:
    """The tables of the upstream, each with the reason if it cannot be followed to the destination."""
    from tailrace.config.pipeline import from_dict
    from tailrace.config.registry import check, open_destination, open_source
    from tailrace.errors import problems
    from tailrace.model.schema import TableName
    from tailrace.source.capability import Surveyable, SurveyedTable

    config = from_dict(draft.to_dict(), folder=folder, environment=draft.environment)
    source = open_source(config)
    if isinstance(source, Surveyable):
        found = source.survey()
    else:
        found = [SurveyedTable(one.table, one.key) for one in source.tables()]
    known = {str(one.table): one for one in found}
    for table, finding in problems(check(source, open_destination(config))).items():
        one = known.get(table) or SurveyedTable(TableName.parse(table), ())
        if one.reason is None:
            known[table] = replace(one, reason=finding.message, fix=finding.fix)
    return sorted(known.values(), key=lambda one: one.table)


def _write(file: Path, text: str) -> None:
    from tailrace.config.pipeline import json_schema

    schema = file.parent / SCHEMA
    try:
        schema.parent.mkdir(parents=True, exist_ok=True)
        schema.write_text(json.dumps(json_schema(), indent=1), encoding="utf-8")
        with file.open("x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        raise ConfigError(f"{file} exists and is not overwritten", fix="name another file with --output") from None
    except OSError as error:
        raise UnavailableError(
            f"cannot write {error.filename or file}: {error.strerror}", fix="name another file with --output"
        ) from error


def _check(file: Path, draft: Draft) -> list[Finding]:
    from tailrace.cli.inspect import check_pipeline
    from tailrace.config.pipeline import load

    found = check_pipeline(load(file, environment={**os.environ, **draft.environment}))
    return [replace(finding, fix=name_file(finding.fix, file)) for finding in found]


def _print_tables(type_: str, tables: Sequence[SurveyedTable] | None) -> None:
    if tables is None:
        return
    width = max((len(str(one.table)) for one in tables), default=0)
    say(f"{type_}: {format_count(len(tables), 'table')}, {sum(one.reason is None for one in tables)} of them to follow")
    for one in tables:
        rows = "" if one.rows is None else f"  about {one.rows:,} rows"
        about = f"key {', '.join(one.key) or 'none'}{rows}"
        if one.reason is None:
            say(f"  {one.table!s:<{width}}  {about}")
        else:
            say(f"  {one.table!s:<{width}}  {about}  ", colored("left out", typer.colors.YELLOW), f": {one.reason}")
            if one.fix:
                say_lines(f"fix: {one.fix}", "      ")


def _report(
    file: Path,
    draft: Draft,
    tables: Sequence[SurveyedTable] | None,
    findings: list[Finding],
    *,
    as_json: bool,
) -> None:
    from tailrace.cli.inspect import print_findings

    named = shlex.quote(str(file))
    ok = not any(finding.level == "error" for finding in findings)
    following = f"tailrace run {named}" if ok and tables is not None else f"tailrace check {named}"
    missing = [one for one in draft.variables if not one.is_set]
    if as_json:
        values: list[dict[str, Any]] = [
            {"table": str(one.table), "key": list(one.key), "rows": one.rows, "reason": one.reason, "fix": one.fix}
            for one in tables or ()
        ]
        print_json(
            {
                "file": str(file),
                "name": draft.name,
                "source": draft.source["type"],
                "variables": [{"name": one.name, "is_set": one.is_set} for one in draft.variables],
                "tables": values,
                "ok": ok,
                "findings": [finding.to_dict() for finding in findings],
                "next": following,
            }
        )
        return
    say(f"wrote {file}, and {file.parent / SCHEMA} for editors")
    print_findings(findings, file, as_json=False)
    if not ok:
        say("fix the errors above first")
    if tables is None:
        say(f"edit {file}: it is a template")
    for one in missing:
        say(f"set   export {one.name}={shlex.quote(str(one.secret))}  # whole, with the password")
    say(f"next: {following}")
