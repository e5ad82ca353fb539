# ruff: noqa: S608 - every name in the SQL here is quoted
"""Bring the local file to the state of the image, and replay own changes that the remote lacks on top of it.

It is one transaction of the local file, with the state of the sync in it: before it, the file is as it was; after it,
it holds the remote's revision and every own change.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from tailrace.capture import trigger
from tailrace.capture.change import RecordRow
from tailrace.capture.layout import TableShape, quoted, read_table_shape, transaction
from tailrace.capture.record import encode
from tailrace.capture.schema_change import is_own_trigger
from tailrace.errors import ConfigError, TableError, UnavailableError
from tailrace.sync.conflict import Decide, SyncConflict, SyncRow
from tailrace.sync.hrana import Step
from tailrace.sync.local_file import CONFLICTS, LocalFile, image_of
from tailrace.sync.preflight import MARK_TABLE
from tailrace.sync.row_difference import bring_rows
from tailrace.sync.schema import bring_schema, contradicted, describe, new_indexes, read_objects
from tailrace.sync.statement import OwnChange, bind, insert, match_key
from tailrace.system import failpoint


@dataclass
class Pulled:
    """What pulls did: rows of others written here, conflicts by kind, and own changes that were given up."""

    rows: int = 0
    conflicts: dict[str, int] = field(default_factory=dict)
    dead_letters: int = 0


@contextmanager
def attached(local: LocalFile) -> Iterator[None]:
    """The image as the database `now`, for the context."""
    uri = f"{image_of(local.path).resolve().as_uri()}?immutable=1"
    local.connection.execute("ATTACH ? AS now", (uri,))
    try:
        yield
    finally:
        local.connection.execute("DETACH now")


def apply_image(local: LocalFile, revision: str, decide: Decide, pulled: Pulled) -> None:
    """Bring the file to the image, which has this revision. Raises SchemaChangedError for DDL that cannot travel."""
    connection = local.connection
    with attached(local):
        with transaction(connection):
            is_changed, indexes = bring_schema(connection, local.get("schema"))
        if is_changed:
            trigger.enable(connection)
        with transaction(connection):
            if trigger.read_status(connection).pending:
                raise UnavailableError("the schema of the local file was changed meanwhile", fix="sync again")
            mark = _mark(local)
            local.check_mark(mark)
            own = local.own_changes(mark)
            with _set_aside(connection):
                theirs = read_objects(connection, "now")
                for kind, table in read_objects(connection, "main"):
                    if kind == "table" and (kind, table) in theirs:
                        pulled.rows += bring_rows(connection, table)
                    elif kind == "table":
                        # A table of our own that is not pushed yet: its rows are among the changes to replay.
                        connection.execute(f"DELETE FROM main.{quoted(table)}")
                for sql in indexes:
                    connection.execute(sql)
                local.set_base()
                _Replay(connection, decide, pulled).run(own)
            local.set(revision=revision, mark=str(mark), schema=describe(connection, "now"))
            failpoint.reach("sync.before-local-commit")
        if indexes:
            trigger.enable(connection)
    failpoint.reach("sync.after-local-commit")


def _mark(local: LocalFile) -> int:
    connection = local.connection
    if not connection.execute("SELECT 1 FROM now.sqlite_schema WHERE name = ?", (MARK_TABLE,)).fetchone():
        return 0
    sql = f"SELECT change_id FROM now.{MARK_TABLE} WHERE client_id = ?"
    row = connection.execute(sql, (local.get("client"),)).fetchone()
    return int(row[0]) if row else 0


@contextmanager
def _set_aside(connection: sqlite3.Connection) -> Iterator[None]:
    """Without the application's triggers, whose effects are among the rows, and without own new indexes, which may
    contradict rows of the remote until own changes are replayed. The triggers of capture stay."""
    indexes = new_indexes(connection)
    rows = connection.execute("SELECT type, name, sql FROM sqlite_schema").fetchall()
    dropped = {
        name: (kind, sql)
        for kind, name, sql in rows
        if (kind == "trigger" and not is_own_trigger(kind, name)) or (kind == "index" and name in indexes)
    }
    for name, (kind, _) in dropped.items():
        connection.execute(f"DROP {kind.upper()} {quoted(name)}")
    yield
    for name, (_, sql) in dropped.items():
        try:
            connection.execute(sql)
        except sqlite3.IntegrityError as error:
            raise contradicted(name, str(error)) from None
    trigger.remember(connection, dropped.keys())


class _Replay:
    """Writes own changes on top of the remote's rows, by key, in order."""

    def __init__(self, connection: sqlite3.Connection, decide: Decide, pulled: Pulled) -> None:
        self._connection, self._decide, self._pulled = connection, decide, pulled
        self._shapes: dict[str, TableShape] = {}
        self._lost: set[tuple[object, ...]] = set()
        self._seen: set[tuple[object, ...]] = set()

    def run(self, own: list[OwnChange]) -> None:
        for change in own:
            shape = self._shapes.setdefault(change.table, read_table_shape(self._connection, change.table))
            key = change.key(shape)
            identity = (change.table, *((type(value), value) for value in key))
            if identity in self._lost:
                self._give_up(change, "its row's earlier change was given up")
                if change.kind == "delete":  # a row that is inserted after that is another one
                    self._lost.discard(identity)
                    self._seen.discard(identity)
            elif not self._allows(change, shape, key, identity):
                continue
            elif (step := change.step(shape)) and not self._write(step):
                self._lost.add(identity)
                self._give_up(change, "it breaks a constraint together with rows of the remote")

    def _allows(
        self, change: OwnChange, shape: TableShape, key: tuple[object, ...], identity: tuple[object, ...]
    ) -> bool:
        if identity in self._seen or change.has_null_key(shape):
            return True
        self._seen.add(identity)
        conflict = self._find(change, shape, key)
        if conflict is None:
            return True
        self._pulled.conflicts[conflict.kind] = self._pulled.conflicts.get(conflict.kind, 0) + 1
        decision = self._decide(conflict)
        self._note(change, conflict.kind, decision if isinstance(decision, str) else "merged", None)
        if decision == "stop":
            raise TableError(
                f"an own change conflicts with one of the remote ({conflict.kind})",
                fix="sync with --conflict local or --conflict remote",
                table=change.table,
            )
        if decision == "local" and conflict.kind != "update-delete":
            return True
        self._lost.add(identity)
        if isinstance(decision, Mapping):
            self._merge(change, shape, conflict, decision)
        else:
            self._give_up(change, conflict.kind)
        return False

    def _find(self, change: OwnChange, shape: TableShape, key: tuple[object, ...]) -> SyncConflict | None:
        where, values = match_key(shape, key)  # type: ignore[arg-type]
        names = ", ".join(quoted(each.name) for each in shape.fields)
        row = self._connection.execute(f"SELECT {names} FROM {quoted(shape.table)} WHERE {where}", values).fetchone()
        theirs = self._named(shape, row)
        own = self._named(shape, change.after)

        def conflict(kind: str) -> SyncConflict:
            return SyncConflict(change.table, kind, key, own, theirs)  # type: ignore[arg-type]

        if change.kind == "insert":
            return conflict("insert-insert") if row is not None else None
        if row is None:
            return conflict("update-delete") if change.kind == "update" else None
        before = change.before or ()
        changed = {
            place for place, value in enumerate(before) if (type(value), value) != (type(row[place]), row[place])
        }
        if change.kind == "delete":
            return conflict("delete-update") if changed else None
        return conflict("update-update") if changed & set(change.changed()) else None

    @staticmethod
    def _named(shape: TableShape, row: RecordRow | None) -> SyncRow | None:
        if row is None:
            return None
        return {each.name: value for each, value in zip(shape.fields, row, strict=False)}

    def _write(self, step: Step) -> bool:
        """Run a statement, and return whether the constraints allow it."""
        self._connection.execute("SAVEPOINT one")
        try:
            self._connection.execute(*step)
        except sqlite3.IntegrityError:
            self._connection.execute("ROLLBACK TO one")
            return False
        finally:
            self._connection.execute("RELEASE one")
        return True

    def _merge(self, change: OwnChange, shape: TableShape, conflict: SyncConflict, decision: SyncRow) -> None:
        if unknown := decision.keys() - {each.name for each in shape.fields}:
            raise ConfigError(f"{shape.table} has no column {min(unknown)}", fix="correct what on_conflict returns")
        row = {**(conflict.theirs or conflict.own or {}), **decision}
        values = [row.get(each.name) for each in shape.fields]
        holders, bound = bind(values)
        if not self._write((insert(shape, len(values), f"({', '.join(holders)})"), bound)):
            self._give_up(change, "the merged row breaks a constraint together with rows of the remote")

    def _give_up(self, change: OwnChange, reason: str) -> None:
        self._pulled.dead_letters += 1
        self._note(change, "dead-letter", "remote", reason)

    def _note(self, change: OwnChange, kind: str, kept: str, reason: str | None) -> None:
        before = encode(change.before) if change.before is not None else None
        after = encode(change.after) if change.after is not None else None
        self._connection.execute(
            f"INSERT INTO {CONFLICTS} VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?)",
            (int(time.time()), kind, change.table, change.change_id, kept, reason, before, after),
        )
