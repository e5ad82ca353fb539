"""Are the clusters ready? Every finding comes with its fix. Nothing is changed here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tailrace.errors import Finding, PreflightError
from tailrace.model.schema import TableName
from tailrace.source.rqlite.api import Api
from tailrace.source.rqlite.catalog import Tables, ask_tables, is_always_copied, is_followable, read_tables
from tailrace.source.rqlite.option import SERVICE

if TYPE_CHECKING:
    from tailrace.source.rqlite.source import RqliteSource


def check(source: RqliteSource) -> list[Finding]:
    """What would stop the pipeline or surprise its user. Raises UnavailableError when an API does not answer."""
    findings = [Finding("ok", "endpoint", f"{source.options.listen}{source.options.path}")]
    for service, api in source.apis().items():
        try:
            findings += _cluster(source, service, api)
        except PreflightError as error:
            findings.append(Finding("error", f"cluster {service or api.url}", error.message, error.fix))
    if source.options.schema_file is not None:
        try:
            tables = read_tables(source.options.schema_file)
        except PreflightError as error:
            findings.append(Finding("error", "schema", error.message, error.fix))
        else:
            findings.append(Finding("ok", "schema", f"{len(tables)} tables in {source.options.schema_file}"))
    if not source.apis():
        findings.append(
            Finding(
                "warning",
                "api",
                "no API is given: tables begin with their first event, and existing rows are not copied",
                'source: {api: "http://127.0.0.1:4001"}',
            )
        )
    return findings


def _cluster(source: RqliteSource, service: str, api: Api) -> Iterator[Finding]:
    pending = api.pending()
    subject = f"cluster {service or (pending.service if pending else None) or SERVICE}"
    if pending is None:
        yield Finding(
            "warning",
            subject,
            f"the node at {api.url} does not report that it sends its changes",
            f"rqlited -cdc-config=http://{source.options.listen}{source.options.path}; allow the user `status`",
        )
    elif service and (pending.service or SERVICE) != service:
        yield Finding(
            "error",
            subject,
            f"the node at {api.url} sends its changes as service {pending.service or SERVICE}",
            "name that service under source.api, or set service_id in the node's CDC configuration",
        )
    for node in api.counters():
        if node.dropped:
            yield Finding(
                "warning",
                subject,
                f"the node at {node.url} has dropped {node.dropped} transactions or batches since it started;"
                " no other node may have sent them",
                "tailrace verify FILE shows which tables differ; tailrace resync FILE TABLE copies them again",
            )
    yield from _tables(source, service or (pending.service if pending else None) or SERVICE, ask_tables(api))


def _tables(source: RqliteSource, service: str, listed: Tables) -> Iterator[Finding]:
    names = source.context.tables.select([TableName(service, name) for name in listed])
    for table in names:
        if listed[table.name] is None:
            yield Finding(
                "error",
                f"table {table}",
                "its CREATE TABLE is not understood by this SQLite",
                "exclude it under `tables`",
                str(table),
            )
        elif is_always_copied(listed[table.name]):
            yield Finding(
                "warning",
                f"table {table}",
                "has a STORED generated column, or a VIRTUAL one and a key that is not the rowid: rqlite does not send"
                " its rows as they are, so every change copies the table again",
                "make the column VIRTUAL and the key an INTEGER PRIMARY KEY, or exclude the table under `tables`",
                str(table),
            )
        elif not is_followable(listed[table.name]):
            yield Finding(
                "error",
                f"table {table}",
                "has neither a key nor a rowid with a name",
                "exclude it under `tables`",
                str(table),
            )
    yield Finding("ok" if names else "warning", f"cluster {service}", f"{len(names)} tables selected")
