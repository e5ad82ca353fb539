"""Whether the server is the one whose log the journal holds: after a restore, positions mean another log.

A server that is restored to a point in time, and a standby that takes over, begin a new timeline. What was received of
the old one past the place where the new one begins never happened on it. A data folder that is just put back, as with
a snapshot of a disk, stays on its timeline; but then its slot went back as well, and the commits that it would send
again are not those that the journal holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass

from psycopg import sql

from tailrace.errors import RESYNC, DamagedError, LostError, UnavailableError
from tailrace.journal import Frame, JournalPlace, JournalReader, open_storage
from tailrace.source.postgres.connection import PgConnection, Replication, session
from tailrace.source.postgres.offset import before, format_lsn, parse_lsn
from tailrace.source.postgres.slot import SlotStatus

COMPARED_BYTES = 16 << 20
"""How much log is compared: decoding more would delay the start."""
_FILE = "server.json"


@dataclass(frozen=True)
class ServerIdentity:
    """A server's data folder, by the number that `initdb` gave it, and the timeline of its log."""

    system: str
    timeline: int

    @classmethod
    def read(cls, replication: Replication) -> ServerIdentity:
        system, timeline, *_ = replication.execute("IDENTIFY_SYSTEM")
        return cls(system or "", int(timeline or 0))


def require_same_history(dsn: str, slot: str, publication: str, journal: JournalPlace, status: SlotStatus) -> None:
    """Raise LostError when the server, whose slot no one reads now, does not have the log that the journal holds."""
    with closing(JournalReader(journal)) as reader:
        durable = reader.mark().commit + 1
    with Replication(dsn) as replication:
        require_same_server(replication, journal, durable=durable, confirmed=status.confirmed)
    # A damaged journal is repaired by the receiver, or reported by it.
    with suppress(DamagedError), session(dsn, "comparing the log with the journal") as connection:
        require_same_log(connection, slot, publication, journal, status)


def require_sent(status: SlotStatus, durable: int) -> None:
    """Raise LostError when the server ends before what it had sent; UnavailableError for a standby: it catches up."""
    if status.server >= durable:
        return
    if status.is_standby:
        raise UnavailableError(f"the standby has not replayed its log up to {format_lsn(durable)} again yet")
    raise LostError(
        f"the server is at {format_lsn(status.server)} and had sent its log up to {format_lsn(durable)}:"
        " it was restored to an earlier state, or a standby that lagged took over",
        fix=RESYNC,
    )


def require_same_server(replication: Replication, journal: JournalPlace, *, durable: int, confirmed: int) -> None:
    """Raise LostError when the journal, which ends before `durable`, holds log that this server does not have.

    Keeps the server's identity next to the journal. A slot that was moved to another data folder, as `pg_upgrade` does,
    is `confirmed` up to all that was received.
    """
    now, known = ServerIdentity.read(replication), _load(journal)
    if now == known:
        return
    if known is not None and known.system != now.system and confirmed < durable:
        raise LostError(
            f"this is another server than the one whose log was received up to {format_lsn(durable)}", fix=RESYNC
        )
    if known is not None and known.system == now.system:
        branched = _branched(replication, known.timeline, now.timeline)
        if branched < durable:
            raise LostError(
                f"the server's timeline {now.timeline} begins at {format_lsn(branched)}, but its log was received up to"
                f" {format_lsn(durable)} on timeline {known.timeline}: it was restored to an earlier state, or a"
                " standby that lagged took over",
                fix=RESYNC,
            )
    open_storage(journal).replace(_FILE, json.dumps(asdict(now)).encode())


def require_same_log(
    connection: PgConnection, slot: str, publication: str, journal: JournalPlace, status: SlotStatus
) -> None:
    """Raise LostError when the commits that the slot would send again are not those that the journal has of them.

    A slot goes back a little when its server crashes: it is stored with the server's checkpoints.
    """
    after, upto = status.confirmed, status.confirmed + COMPARED_BYTES
    with closing(JournalReader(journal)) as reader:
        begin, end = max(before(after), reader.origin()), min(reader.mark(), before(upto))
        frames = reader.frames(begin, end) if begin < end else []
        held = {commit: when for ref in frames for commit, when in _commits(reader.read(ref))}
    wanted = {commit: when for commit, when in held.items() if after < commit < upto}
    if not wanted:
        return
    query = (
        "SELECT substr(data, 3, 8), substr(data, 19, 8) FROM pg_logical_slot_peek_binary_changes(%s, %s::pg_lsn, NULL,"
        " 'proto_version', '1', 'publication_names', %s, 'messages', 'true') WHERE get_byte(data, 0) = ascii('C')"
    )
    quoted = sql.Identifier(publication).as_string()
    # Up to a place within the last commit's record: the server decodes the record that reaches it, and no further one.
    rows = connection.execute(query, [slot, format_lsn(max(wanted) + 1), quoted]).fetchall()
    sent = {int.from_bytes(commit): bytes(when) for commit, when in rows}
    if other := [commit for commit, when in wanted.items() if sent.get(commit) != when]:
        raise LostError(
            f"the server has no commit at {format_lsn(min(other))}, or another one than the one that was received: it"
            " was put back to an earlier state, and has gone on from there",
            fix=RESYNC,
        )


def _commits(frame: Frame) -> Iterator[tuple[int, bytes]]:
    """The first and the last commit of a frame, each with its time, as far as their Begin messages are in it."""
    content = bytes(frame.payload)
    for commit in {frame.first.commit, frame.last.commit}:
        begin = b"B" + commit.to_bytes(8)
        # A begin without a transaction id is that of a message, which the server does not send as a transaction.
        if (at := content.find(begin)) >= 0 and any(content[at + len(begin) + 8 :][:4]):
            yield commit, content[at + len(begin) :][:8]


def _load(journal: JournalPlace) -> ServerIdentity | None:
    try:
        stored = open_storage(journal).load(_FILE)
        return ServerIdentity(**json.loads(stored)) if stored is not None else None
    except (ValueError, TypeError):
        return None


def _branched(replication: Replication, known: int, now: int) -> int:
    """Where the log of the timeline `now` left that of `known`; 0 when it does not descend from it."""
    _, history, *_ = replication.execute(f"TIMELINE_HISTORY {now}")
    found = re.search(rf"^{known}\s+([0-9A-F]+/[0-9A-F]+)", history or "", re.MULTILINE)
    return parse_lsn(found[1]) if found else 0
