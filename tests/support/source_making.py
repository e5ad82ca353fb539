"""Sources as tests want them: with files in the test's folder, and options smaller than a file may ask for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from tailrace.option.table import TableOptions
from tailrace.option.value import Options, Secret
from tailrace.source.poll.option import PollOptions
from tailrace.source.poll.source import PollSource
from tailrace.source.postgres.option import PostgresOptions
from tailrace.source.postgres.source import PostgresSource
from tailrace.source.rqlite.option import RqliteOptions
from tailrace.source.rqlite.source import RqliteSource
from tailrace.source.slatedb.option import SlateDbOptions
from tailrace.source.slatedb.source import SlateDbSource
from tailrace.source.source import Source, SourceContext
from tailrace.source.sqlite.option import SqliteSourceOptions, TursoOptions
from tailrace.source.sqlite.source import SqliteSource

Made = TypeVar("Made", bound=Source)
Model = TypeVar("Model", bound=Options)


def changed(options: Model, **given: Any) -> Model:
    """Options with other values, which are not checked. Sections within them are given as dicts of what differs."""

    def value(known: Any, new: Any) -> Any:
        if isinstance(known, Secret) and isinstance(new, str):
            return type(known)(new)
        return changed(known, **new) if isinstance(known, Options) and isinstance(new, dict) else new

    return options.model_copy(update={name: value(getattr(options, name), new) for name, new in given.items()})


def with_options(source: Made, **given: Any) -> Made:
    return replace(source, options=changed(source.options, **given))


def with_tables(source: Made, tables: TableOptions) -> Made:
    return replace(source, context=replace(source.context, tables=tables))


def make_postgres(dsn: str, folder: Path, name: str, tables: TableOptions, **given: Any) -> PostgresSource:
    """With its journal in the folder, and the publication and the slot called like the pipeline.

    Tables without a replica identity are published too: tests only insert into them.
    """
    options = PostgresOptions.model_validate(
        {
            "type": "postgres",
            "dsn": dsn,
            "publication": name,
            "slot": name,
            "publish_without_identity": True,
            "journal": {"path": folder / "journal"},
        }
    )
    return PostgresSource(changed(options, **given), SourceContext(name, tables, folder))


def make_sqlite(path: Path, folder: Path, tables: TableOptions, **given: Any) -> SqliteSource:
    kind = given.pop("type", "sqlite")
    model = TursoOptions if kind == "turso" else SqliteSourceOptions
    options = model.model_validate({"type": kind, "path": path})
    return SqliteSource(changed(options, **given), SourceContext("test", tables, folder))


def make_rqlite(folder: Path, listen: str, **given: Any) -> RqliteSource:
    """With its journal in the folder."""
    options = RqliteOptions.model_validate(
        {"type": "rqlite", "listen": listen, "journal": {"path": folder / "journal"}}
    )
    return RqliteSource(changed(options, **given), SourceContext("test", TableOptions(), folder))


def make_slatedb(
    store: dict[str, Any], folder: Path, tables: TableOptions | None = None, **given: Any
) -> SlateDbSource:
    """The database `db1` of a store."""
    options = SlateDbOptions.model_validate({"type": "slatedb", "path": "db1", "store": store, "poll": 0.0})
    return SlateDbSource(changed(options, **given), SourceContext("test", tables or TableOptions(), folder))


def make_polled(
    dsn: str, folder: Path, tables: TableOptions, *, kind: type[PollSource] = PollSource, **given: Any
) -> PollSource:
    options = PollOptions.model_validate({"type": "poll", "dsn": dsn, "interval": 1e-3, "idle_interval": 1e-3})
    return kind(changed(options, **given), SourceContext("t", tables, folder))
