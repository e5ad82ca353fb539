# ruff: noqa: S608 - the table's name is a constant
"""A sync: pull, push, pull. Own changes that are not pushed yet are replayed on top of what is pulled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tailrace.capture.layout import read_table_shape
from tailrace.errors import PreflightError, UnavailableError
from tailrace.option.value import Secret
from tailrace.sync.change_watch import ChangeWatch
from tailrace.sync.conflict import Decide, choose
from tailrace.sync.hrana import SqlValue, Step
from tailrace.sync.local_file import LocalFile, bootstrap, checking_image, image_of, opened, syncing_alone
from tailrace.sync.preflight import MARK_TABLE
from tailrace.sync.pull import Pulled, apply_image, attached
from tailrace.sync.remote import FileRemote, PushMark, RefusedPushError, Remote, open_remote, part_of
from tailrace.sync.schema import push_schema
from tailrace.sync.statement import OwnChange, bind, insert
from tailrace.system import failpoint

_ATTEMPTS = 5
_PUSH_BYTES = 24 << 20
"""About the largest push, well below what a server accepts. Of more changes, each push is whole or nothing."""
_VALUE_BYTES = 40
_TEXT_FACTOR = 3
_STEP_VALUES = 500
_LONGEST_PAUSE_SECONDS = 20.0


@dataclass
class SyncResult:
    """What a sync did. `cdc_operations` counts own changes that are not pushed yet; normally none."""

    bootstrapped: bool = False
    pushed: int = 0
    pulled: int = 0
    conflicts: dict[str, int] = field(default_factory=dict)
    dead_letters: int = 0
    cdc_operations: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    revision: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def sync(
    local: str | Path,
    remote: str | Path,
    *,
    conflict: str | None = None,
    on_conflict: Decide | None = None,
    token: str | None = None,
    ca: str | Path | None = None,
) -> SyncResult:
    """Bring a local SQLite file and a remote up to date with each other: pull, push, pull.

    `remote` is the URL of a sync server or another file. A local file that does not exist is made from the remote.
    `conflict` is `local` (the last push wins, the default), `remote` or `stop`; `on_conflict` decides each one instead.
    A repeat without changes sends nothing. Interrupted at any point, the next sync completes it. Raises
    UnavailableError if the remote does not answer, PreflightError for what cannot be synced, SchemaChangedError for
    DDL that does not travel; the local file is then as it was.
    """
    return SyncSession(local, remote, conflict=conflict, on_conflict=on_conflict, token=token, ca=ca).run()


class SyncSession:
    """A local file and its remote. Each `run` is a sync; `watch` repeats it. Used by one thread."""

    def __init__(
        self,
        local: str | Path,
        remote: str | Path,
        *,
        conflict: str | None = None,
        on_conflict: Decide | None = None,
        token: str | None = None,
        ca: str | Path | None = None,
    ) -> None:
        self._path = Path(local).resolve()
        address = str(remote)
        self._decide = choose(conflict, on_conflict)
        if self._path.with_name(self._path.name + "-info").exists():
            raise PreflightError(f"{local} is synced by Turso's own client", fix="sync it there, or give a new path")
        self._remote: Remote = open_remote(address, Secret(token) if token else None, Path(ca) if ca else None)
        self._is_file = isinstance(self._remote, FileRemote)
        self._address = str(Path(address).resolve()) if self._is_file else address.rstrip("/")

    def run(self) -> SyncResult:
        result = SyncResult()
        sent, received = self._remote.sent, self._remote.received
        with syncing_alone(self._path):
            if not self._path.exists():
                result.pulled = bootstrap(self._path, self._address, self._remote)
                result.bootstrapped = True
            with opened(self._path, self._address) as local:
                pulled = Pulled()
                for attempt in range(_ATTEMPTS):
                    try:
                        self._fence(local)
                        self._pull(local, pulled)
                        has_pushed = self._push(local, result)
                    except RefusedPushError:
                        if attempt == _ATTEMPTS - 1:
                            raise
                    else:
                        break
                if has_pushed or result.pushed:
                    self._pull(local, pulled)
                result.pulled += pulled.rows
                result.conflicts, result.dead_letters = pulled.conflicts, pulled.dead_letters
                result.cdc_operations = len(local.own_changes())
                result.revision = local.get("revision")
        result.sent_bytes = self._remote.sent - sent
        result.received_bytes = self._remote.received - received
        return result

    def watch(
        self,
        stop: threading.Event,
        on_sync: Callable[[SyncResult], None],
        on_error: Callable[[UnavailableError], None] = lambda error: None,
    ) -> None:
        """Sync at each change of either side until `stop` is set; a remote that is out of reach is tried again."""
        changes = ChangeWatch(self._path, self._remote)
        pause = 0.0
        while not stop.wait(pause):
            try:
                # Before the sync: what is committed during it is news for the next.
                changes.begin()
                result = self.run()
                on_sync(result)
                pause = 0.0
                changes.wait(result.revision, stop)
            except UnavailableError as error:
                on_error(error)
                pause = min(max(2 * pause, 1.0), _LONGEST_PAUSE_SECONDS)

    def _pull(self, local: LocalFile, pulled: Pulled) -> None:
        image = image_of(self._path)
        revision = local.get("revision") if image.exists() or part_of(image).exists() else ""
        new = self._remote.pull(revision, image)
        failpoint.reach("sync.image")
        if new is not None:
            with checking_image(self._path):
                apply_image(local, new, self._decide, pulled)

    def _fence(self, local: LocalFile) -> None:
        """Make sure that no push of this replica is still on its way, before a pull gives its changes new ids.

        A push whose client died may arrive at any time. If it did after the pull, nothing would tell that the changes
        replayed by the pull are the same ones.
        """
        if local.get("sent") == local.get("mark"):
            return
        client = local.get("client")
        mark = self._remote.mark(client)
        local.check_mark(mark.change_id)
        fenced = PushMark(mark.generation + 1, mark.change_id)
        self._remote.push(_steps(client, [], mark, fenced))
        local.set(sent=str(mark.change_id))

    def _push(self, local: LocalFile, result: SyncResult) -> bool:
        own = local.own_changes()
        with attached(local):
            tables, indexes = push_schema(local.connection)
        if not (own or tables or indexes):
            return False
        client = local.get("client")
        mark = self._remote.mark(client)
        local.check_mark(mark.change_id)
        parts = list(_parts([change for change in own if change.change_id > mark.change_id]))
        for number, part in enumerate(parts):
            steps = _changes(local, part)
            if number == 0:
                steps = [*((sql, ()) for sql in tables), *steps]
            if number == len(parts) - 1:
                steps += ((sql, ()) for sql in indexes)
            if not steps:
                continue
            last = PushMark(mark.generation, part[-1].change_id) if part else mark
            # Before it is sent: a mark beyond this one can only come from a copy of this file.
            local.set(sent=str(last.change_id))
            failpoint.reach("sync.before-push")
            self._remote.push(_steps(client, steps, mark, last))
            failpoint.reach("sync.after-push")
            result.pushed += len(part)
            mark = last
        return True


def _parts(own: Sequence[OwnChange]) -> Iterator[Sequence[OwnChange]]:
    """The changes of each push; one without changes if there are none."""
    start = size = 0
    for at, change in enumerate(own):
        more = sum(map(_estimate, change.after or change.before or ()))
        if at > start and size + more > _PUSH_BYTES:
            yield own[start:at]
            start, size = at, 0
        size += more
    yield own[start:]


def _estimate(value: SqlValue) -> int:
    return _VALUE_BYTES + (_TEXT_FACTOR * len(value) if isinstance(value, str | bytes) else 0)


def _steps(client: str, changes: Sequence[Step], known: PushMark, last: PushMark) -> list[Step]:
    table = f"CREATE TABLE IF NOT EXISTS {MARK_TABLE} (client_id TEXT PRIMARY KEY, pull_gen INTEGER, change_id INTEGER)"
    # A push that was on its way when this client died may arrive now. Whichever is second has to fail.
    guard = (
        "SELECT abs(CASE WHEN coalesce((SELECT pull_gen || ' ' || change_id "
        f"FROM {MARK_TABLE} WHERE client_id = ?), '0 0') = ? THEN 0 ELSE -9223372036854775807 - 1 END)"
    )
    mark = (
        f"INSERT INTO {MARK_TABLE} (client_id, pull_gen, change_id) VALUES (?, ?, ?) "
        "ON CONFLICT (client_id) DO UPDATE SET pull_gen = excluded.pull_gen, change_id = excluded.change_id"
    )
    expected = f"{known.generation} {known.change_id}"
    return [(table, ()), (guard, (client, expected)), *changes, (mark, (client, last.generation, last.change_id))]


def _changes(local: LocalFile, own: Sequence[OwnChange]) -> list[Step]:
    """The statements of own changes in order; inserts next to each other into one table become one statement."""
    steps: list[Step] = []
    rows: list[OwnChange] = []

    def flush() -> None:
        if not rows:
            return
        shape = read_table_shape(local.connection, rows[0].table)
        bound = [bind(row.after or ()) for row in rows]
        text = ", ".join(f"({', '.join(holders)})" for holders, _ in bound)
        steps.append(
            (insert(shape, len(rows[0].after or ()), text), [value for _, values in bound for value in values])
        )
        rows.clear()

    for change in own:
        width = len(change.after or ())
        joins = rows and rows[0].table == change.table and len(rows[0].after or ()) == width
        if rows and not (change.kind == "insert" and joins and (len(rows) + 1) * width <= _STEP_VALUES):
            flush()
        if change.kind == "insert":
            rows.append(change)
        elif step := change.step(read_table_shape(local.connection, change.table)):
            steps.append(step)
    flush()
    return steps
