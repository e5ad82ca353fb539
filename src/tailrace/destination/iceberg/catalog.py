"""The catalog of a warehouse, and what its errors mean."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitStateUnknownException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
    NotInstalledError,
    RESTError,
    TableAlreadyExistsError,
)
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from requests import RequestException
from sqlalchemy.exc import SQLAlchemyError

from tailrace.destination.iceberg.option import IcebergOptions
from tailrace.destination.lake.folder_name import encode
from tailrace.errors import PreflightError, TableError, UnavailableError
from tailrace.model.schema import TableName
from tailrace.system import atomic_file

CATALOG_FILE = "catalog.db"
LOCK_SECONDS = 60
"""How long a commit waits while another process writes to the catalog's file."""

_opened: dict[tuple[int, tuple[tuple[str, str], ...]], Catalog] = {}
_lock = threading.Lock()


def catalog_file(options: IcebergOptions) -> Path | None:
    """The file of the embedded catalog; None for any other."""
    if options.catalog.type != "sql" or options.catalog.uri is not None:
        return None
    return _folder(options) / CATALOG_FILE


def open_catalog(options: IcebergOptions) -> Catalog:
    """The catalog, opened once in each process. Makes the folder and the file of an embedded one."""
    properties = _properties(options)
    key = os.getpid(), tuple(sorted(properties.items()))
    with _lock:
        if key not in _opened:
            _opened[key] = _open(options, properties)
        return _opened[key]


def _properties(options: IcebergOptions) -> dict[str, str]:
    catalog = options.catalog
    properties = {name: value.reveal() for name, value in catalog.properties.items()}
    properties["name"] = catalog.name
    properties["type"] = catalog.type
    properties["warehouse"] = str(_folder(options)) if options.is_local else options.warehouse
    if catalog.uri is not None:
        properties["uri"] = catalog.uri.reveal()
    elif (file := catalog_file(options)) is not None:
        properties["uri"] = f"sqlite:///{file}?timeout={LOCK_SECONDS}"
    if options.is_local:
        properties.setdefault("py-io-impl", "tailrace.destination.iceberg.local_file.LocalFileIO")
    return properties


def _open(options: IcebergOptions, properties: dict[str, str]) -> Catalog:
    given = {name: value for name, value in properties.items() if name not in ("name", "type")}
    if options.catalog.type != "sql":
        try:
            return load_catalog(options.catalog.name, type=options.catalog.type, **given)
        except NotInstalledError as error:
            kind = options.catalog.type
            raise PreflightError(
                f"PyIceberg lacks a package for catalogs of type {kind}", fix=f"pip install 'pyiceberg[{kind}]'"
            ) from error
    if (file := catalog_file(options)) is None:
        return SqlCatalog(options.catalog.name, **given)
    atomic_file.make_folder(file.parent)
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Two processes that make the file at once would stumble over each other.
        fcntl.flock(folder, fcntl.LOCK_EX)
        return SqlCatalog(options.catalog.name, **given)
    finally:
        os.close(folder)


def _folder(options: IcebergOptions) -> Path:
    return Path(options.warehouse.removeprefix("file://")).absolute()


def load_table(options: IcebergOptions, table: TableName) -> Table | None:
    """The table as it is now; None when the catalog has none of this name."""
    file = catalog_file(options)
    if file is not None and not file.exists():
        return None
    try:
        return open_catalog(options).load_table(_identifier(table))
    except (NoSuchTableError, NoSuchNamespaceError):
        return None


def create_table(options: IcebergOptions, table: TableName, schema: Schema, properties: dict[str, str]) -> Table:
    """Create a table without rows. One that another writer created meanwhile is returned as it is."""
    catalog = open_catalog(options)
    location = None
    if options.catalog.type == "sql":
        warehouse = str(_folder(options)) if options.is_local else options.warehouse.rstrip("/")
        location = f"{warehouse}/{encode(table.schema)}/{encode(table.name)}"
    with suppress(NamespaceAlreadyExistsError):
        catalog.create_namespace((table.schema,))
    try:
        return catalog.create_table(_identifier(table), schema, location=location, properties=properties)
    except TableAlreadyExistsError:
        return catalog.load_table(_identifier(table))


def _identifier(table: TableName) -> tuple[str, str]:
    return table.schema, table.name


@contextmanager
def reaching(options: IcebergOptions, table: str) -> Iterator[None]:
    """Turn the errors of a catalog, disk or object store that does not answer into UnavailableError."""
    try:
        yield
    except CommitStateUnknownException as error:
        raise UnavailableError(
            "the catalog did not say whether it took the commit; the batch is looked for and done again", table=table
        ) from error
    except (SQLAlchemyError, RESTError, RequestException) as error:
        # Their texts may quote addresses with passwords in them.
        raise _unavailable(options, table, f"the catalog failed ({type(error).__name__})") from error
    except FileNotFoundError as error:
        if options.is_local and not _folder(options).is_dir():
            raise _unavailable(options, table, "it is missing") from error
        raise TableError(
            f"a file of the Iceberg table is no longer in {options.warehouse}",
            table=table,
            fix=f"restore it, then tailrace retry FILE {table}; or tailrace resync FILE {table}",
        ) from error
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise _unavailable(options, table, reason) from error


def _unavailable(options: IcebergOptions, table: str, reason: str) -> UnavailableError:
    return UnavailableError(
        f"cannot use the Iceberg warehouse {options.warehouse}: {reason}",
        table=table,
        fix="check that the catalog answers and the warehouse is there, has space and may be written; "
        "tailrace retries by itself",
    )
