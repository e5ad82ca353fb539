# ruff: noqa: S608 - every name in the SQL here is quoted
"""The capture tables, in Turso's layout, and the tables of a file that can be captured.

turso_cdc           one row per change; a custom name is possible
turso_cdc_version   the layout of each capture table: v1, v2, or that of triggers (see `CdcVersion`)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tailrace.errors import ConfigError, PreflightError

VERSION_TABLE = "turso_cdc_version"
SCHEMA_TABLE = "sqlite_schema"
TURSO_PREFIX = "__turso_internal"
CAPTURE_TABLE = "tailrace_capture"
PROGRESS_TABLE = "tailrace_tape"
EXCLUDED_TABLE = "tailrace_excluded"
SYNC_TABLES = ("tailrace_sync", "tailrace_sync_conflict")
"""The state of a sync, and the conflicts that it met."""

INSERT, UPDATE, DELETE, COMMIT = 1, 0, -1, 2
"""The values of change_type."""


class CdcVersion(StrEnum):
    """The layout of a capture table, as its version row has it.

    V1 and V2 are Turso's. A tape of TRIGGERS has the columns of V2, but keeps its images in a table next to it, and
    neither transaction ids nor COMMIT records: its own name keeps Turso, which refuses unknown versions, from reading
    empty images or writing to it.
    """

    V1 = "v1"
    V2 = "v2"
    TRIGGERS = "triggers-v1"

    @property
    def has_commit_record(self) -> bool:
        """Whether each transaction ends with a COMMIT record, and its rows have its id."""
        return self is CdcVersion.V2


COLUMNS_V1 = ("change_id", "change_time", "change_type", "table_name", "id", "before", "after", "updates")
COLUMNS_V2 = (*COLUMNS_V1[:2], "change_txn_id", *COLUMNS_V1[2:])
COLUMNS = {CdcVersion.V1: COLUMNS_V1, CdcVersion.V2: COLUMNS_V2, CdcVersion.TRIGGERS: COLUMNS_V2}
_DECLARED = {
    "change_id": "INTEGER PRIMARY KEY AUTOINCREMENT",
    "change_time": "INTEGER",
    "change_txn_id": "INTEGER",
    "change_type": "INTEGER",
    "table_name": "TEXT",
    "id": "",
    "before": "BLOB",
    "after": "BLOB",
    "updates": "BLOB",
}
_ROWID_NAMES = ("rowid", "_rowid_", "oid")
_PLAIN, GENERATED_VIRTUAL, GENERATED_STORED = 0, 2, 3


class CaptureConnection(Protocol):
    """The methods that capture needs and that stdlib sqlite3, apsw and pyturso have in common."""

    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> Any: ...


def served_tape(path: Path) -> Path:
    """The file that holds the tape of a file which a sync server serves."""
    path = path.resolve()
    return path.with_name(path.name + "-tape")


def quoted(name: str) -> str:
    """A name, quoted for SQL. Any characters are allowed."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """A text as an SQL literal. Raises ConfigError for a NUL, which SQL text cannot contain."""
    if "\0" in text:
        raise ConfigError("a table name contains a NUL character", fix="rename the table")
    return "'" + text.replace("'", "''") + "'"


@contextmanager
def transaction(connection: CaptureConnection, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
    """Run the block in a transaction. Raises PreflightError if one is open already, since only its owner may end it."""
    if getattr(connection, "in_transaction", False):
        raise PreflightError("the connection has an open transaction", fix="commit or roll back first")
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if getattr(connection, "in_transaction", True):
            connection.execute("ROLLBACK")
        raise


def has_table(connection: CaptureConnection, table: str) -> bool:
    sql = "SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = ?"
    return connection.execute(sql, (table,)).fetchone() is not None


def ensure(connection: CaptureConnection, table: str, version: CdcVersion = CdcVersion.V2) -> CdcVersion:
    """Create the capture table and its version row if they are missing, and return the version. Safe to repeat.

    Called inside the caller's transaction. An existing table keeps its version (see `read_version`). Raises
    PreflightError for a version that this release does not know, and for a table of that name that is not a capture
    table.
    """
    connection.execute(
        f"CREATE TABLE IF NOT EXISTS {VERSION_TABLE} (table_name TEXT PRIMARY KEY, version TEXT NOT NULL)"
    )
    if has_table(connection, table):
        version = read_version(connection, table)
        connection.execute(f"INSERT OR IGNORE INTO {VERSION_TABLE} VALUES (?, ?)", (table, str(version)))
        return version
    columns = ", ".join(f"{_spelled(name)} {_DECLARED[name]}".rstrip() for name in COLUMNS[version])
    connection.execute(f"CREATE TABLE {quoted(table)} ({columns})")
    write_version(connection, table, version)
    return version


def write_version(connection: CaptureConnection, table: str, version: CdcVersion) -> None:
    connection.execute(f"INSERT OR REPLACE INTO {VERSION_TABLE} VALUES (?, ?)", (table, str(version)))


def forget_dropped(connection: CaptureConnection) -> None:
    """Delete the notes about capture tables that were dropped, inside the caller's transaction."""
    for tape in _tapes(connection):
        if not has_table(connection, tape):
            connection.execute(f"DELETE FROM {VERSION_TABLE} WHERE table_name = ?", (tape,))
            if has_table(connection, EXCLUDED_TABLE):
                connection.execute(f"DELETE FROM {EXCLUDED_TABLE} WHERE tape = ?", (tape,))


def _spelled(name: str) -> str:
    return quoted(name) if name in ("before", "after") else name


def read_version(connection: CaptureConnection, table: str) -> CdcVersion:
    """The version of a capture table. Without a version row its columns tell: v1 has no transaction ids. Raises
    PreflightError if it does not exist, has an unknown version or is not a capture table."""
    if not has_table(connection, table):
        raise PreflightError(f"there is no capture table {table}", fix="tailrace sqlite enable FILE", table=table)
    stored = stored_version(connection, table)
    found = {str(row[1]) for row in connection.execute(f"PRAGMA table_info({quoted(table)})").fetchall()}
    try:
        version = CdcVersion(stored or ("v2" if "change_txn_id" in found else "v1"))
    except ValueError:
        raise PreflightError(
            f"capture table {table} has version {stored!r}, which this release does not know",
            fix="use a newer tailrace, or a capture table with another name",
            table=table,
        ) from None
    if missing := [name for name in COLUMNS[version] if name not in found]:
        raise PreflightError(
            f"{table} is not a capture table of version {version}: it lacks {', '.join(missing)}",
            fix="use another table name: full,TABLE",
            table=table,
        )
    # Until 0.1.0 was finished, triggers wrote the version v2.
    return CdcVersion.TRIGGERS if has_table(connection, side_tables(table)[0]) else version


def stored_version(connection: CaptureConnection, table: str) -> str | None:
    """What the version row of a capture table says; None if there is no row."""
    row = None
    if has_table(connection, VERSION_TABLE):
        row = connection.execute(f"SELECT version FROM {VERSION_TABLE} WHERE table_name = ?", (table,)).fetchone()
    return None if row is None else str(row[0])


@dataclass(frozen=True)
class Field:
    """A stored column of a table. `default` is the SQL of its default value, None without one."""

    name: str
    declared: str
    default: str | None
    key: int


@dataclass(frozen=True)
class TableShape:
    """The layout of a table's records: the stored columns in order, and the name of its rowid in SQL."""

    table: str
    fields: tuple[Field, ...]
    rowid: str
    generated: bool
    without_rowid: bool


def read_table_shape(connection: CaptureConnection, table: str) -> TableShape:
    """The current layout of a table. Raises PreflightError if it does not exist."""
    rows = connection.execute(f"PRAGMA table_xinfo({quoted(table)})").fetchall()
    if not rows:
        raise PreflightError(f"there is no table {table}", fix="check the table's name", table=table)
    fields = tuple(
        Field(str(name), str(declared or ""), default, int(key))
        for _, name, declared, _, default, key, hidden in rows
        if hidden == _PLAIN
    )
    names = [str(row[1]) for row in rows]
    generated = any(row[6] in (GENERATED_VIRTUAL, GENERATED_STORED) for row in rows)
    rowid = rowid_name(names)
    return TableShape(table, fields, rowid, generated, _lacks_rowid(connection, table, rowid))


def rowid_name(columns: Iterable[str]) -> str:
    """The name of the rowid in a table with these columns; empty if columns use all of its names."""
    taken = {name.lower() for name in columns}
    return next((name for name in _ROWID_NAMES if name not in taken), "")


def _lacks_rowid(connection: CaptureConnection, table: str, rowid: str) -> bool:
    sql = "SELECT wr FROM pragma_table_list WHERE schema = 'main' AND name = ?"
    row = connection.execute(sql, (table,)).fetchone()
    return bool(row[0]) if row else not rowid


def list_tables(connection: CaptureConnection) -> list[str]:
    """The application's ordinary tables: no views, no virtual or shadow tables, no tables of captures."""
    sql = "SELECT name FROM pragma_table_list WHERE schema = 'main' AND type = 'table' ORDER BY name"
    own = own_tables(connection)
    return [name for (name,) in connection.execute(sql).fetchall() if not is_internal(name) and name not in own]


def own_tables(connection: CaptureConnection) -> set[str]:
    """The tables that belong to captures of this file."""
    tapes = _tapes(connection)
    sides = (side for tape in tapes for side in side_tables(tape))
    notes = (VERSION_TABLE, CAPTURE_TABLE, PROGRESS_TABLE, EXCLUDED_TABLE, *SYNC_TABLES)
    return {*notes, *tapes, *sides}


def trigger_tapes(connection: CaptureConnection) -> list[str]:
    """The capture tables that triggers write, or wrote until they were disabled."""
    return [tape for tape in _tapes(connection) if has_table(connection, side_tables(tape)[0])]


def _tapes(connection: CaptureConnection) -> list[str]:
    if not has_table(connection, VERSION_TABLE):
        return []
    return [str(name) for (name,) in connection.execute(f"SELECT table_name FROM {VERSION_TABLE}").fetchall()]


def side_tables(table: str) -> tuple[str, str, str]:
    """The other tables of capture by triggers: row images, rows being replaced, and the last known schema."""
    return f"{table}_image", f"{table}_replaced", f"{table}_schema"


def is_internal(name: str) -> bool:
    return name.lower().startswith("sqlite_") or name.startswith(TURSO_PREFIX)


def require_capturable(shape: TableShape) -> None:
    """Raise PreflightError for a table without a rowid, which changes need to identify their row."""
    if shape.without_rowid or not shape.rowid:
        raise PreflightError(
            f"{shape.table} has no rowid, and changes are recorded by rowid",
            fix="create the table again without WITHOUT ROWID, and with at most two of the columns rowid, _rowid_, oid",
            table=shape.table,
        )


def trigger_capture(connection: CaptureConnection) -> Mode | None:
    """The mode of this file's capture by triggers; None if there is none."""
    if not has_table(connection, CAPTURE_TABLE):
        return None
    row = connection.execute(f"SELECT mode, table_name FROM {CAPTURE_TABLE}").fetchone()
    return None if row is None else Mode(str(row[0]), str(row[1]))


# Capture modes, in the form of the argument of Turso's pragma: `<mode>[,<table>]`.

DEFAULT_TABLE = "turso_cdc"
MODES = ("id", "before", "after", "full")


@dataclass(frozen=True)
class Mode:
    """What is recorded of a change. id: the rowid; before, after: that image too; full: both images, and which columns
    an update changed."""

    name: str
    table: str

    @property
    def has_before(self) -> bool:
        return self.name in ("before", "full")

    @property
    def has_after(self) -> bool:
        return self.name in ("after", "full")

    @property
    def has_updates(self) -> bool:
        return self.name == "full"

    def __str__(self) -> str:
        return f"{self.name},{self.table}"


class CaptureState(NamedTuple):
    """What Turso's pragma returns: ('full', 'turso_cdc', 'v2'), or ('off', None, None)."""

    mode: str
    table: str | None
    version: str | None

    def to_dict(self) -> dict[str, str | None]:
        return {"mode": self.mode, "table": self.table, "version": self.version}


OFF = CaptureState("off", None, None)


def parse_mode(argument: str) -> Mode | None:
    """Parse `<mode>[,<table>]`; None for `off`. Raises ConfigError for anything else."""
    name, _, table = (part.strip() for part in argument.partition(","))
    if name == "off":
        return None
    if name not in MODES:
        raise ConfigError(
            f"unknown capture mode {name!r}", fix=f"use one of {', '.join(MODES)}, off, and optionally ,TABLE after it"
        )
    if table.lower().startswith("sqlite_"):
        raise ConfigError(
            f"{table} cannot be a capture table", fix="use another name: SQLite reserves names that begin with sqlite_"
        )
    return Mode(name, table or DEFAULT_TABLE)
