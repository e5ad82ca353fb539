"""The shop whose orders are copied and followed: one table of ten columns, or the same rows spread over several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import psycopg

KEY = "id"
COLUMNS = {
    KEY: "bigint PRIMARY KEY",
    "customer_id": "bigint NOT NULL",
    "status": "text NOT NULL",
    "currency": "text NOT NULL",
    "quantity": "integer NOT NULL",
    "total": "numeric(12, 2) NOT NULL",
    "paid": "boolean NOT NULL",
    "note": "text",
    "placed_at": "timestamptz NOT NULL",
    "updated_at": "timestamptz NOT NULL",
}
_ROWS = """
INSERT INTO {table} SELECT i, i * 7919 % 100000, (ARRAY['placed', 'paid', 'sent', 'done'])[1 + i % 4],
    (ARRAY['EUR', 'USD', 'CHF'])[1 + i % 3], 1 + i % 9, (i * 37 % 1000000) / 100.0, i % 3 > 0,
    CASE WHEN i % 5 > 0 THEN 'leave order ' || i || ' at the door' END,
    timestamptz '2024-01-01' + i * interval '1 second', now()
FROM generate_series({first}::bigint, {last}) i
"""
_UPDATE = (
    "UPDATE {table} SET status = 'returned', total = total + 1, updated_at = clock_timestamp()"
    " WHERE id = ANY (ARRAY(SELECT {first} + k * {stride} FROM generate_series(0, {size} - 1) k))"
)
_DELETE = (
    "DELETE FROM {table} WHERE id = ANY (ARRAY(SELECT {first} + k * {stride} FROM generate_series(0, {size} - 1) k))"
)
# One row per transaction, as fast as the server can: a client would be the bottleneck.
_SINGLES = """
DO $$ BEGIN FOR n IN 0..{count} - 1 LOOP
    UPDATE {table} SET quantity = n, updated_at = clock_timestamp() WHERE id = 3 + n::bigint * {stride};
    COMMIT;
END LOOP; END $$
"""


@dataclass(frozen=True)
class Size:
    """How much of everything: the issue's numbers times `scale`."""

    rows: int = 2_000_000
    inserts: int = 500_000
    updates: int = 500_000
    deletes: int = 100_000
    transaction: int = 5_000
    singles: int = 50_000
    large: int = 3_000_000
    trickle_seconds: int = 30
    tables: int = 20

    @classmethod
    def scaled(cls, scale: float) -> Size:
        whole = cls()
        return cls(
            rows=int(whole.rows * scale),
            inserts=int(whole.inserts * scale),
            updates=int(whole.updates * scale),
            deletes=int(whole.deletes * scale),
            singles=int(whole.singles * scale),
            large=int(whole.large * scale),
            trickle_seconds=max(10, int(whole.trickle_seconds * min(scale, 1.0))),
        )

    @property
    def changes(self) -> int:
        return self.inserts + self.updates + self.deletes


class Shop:
    """Orders in one or more tables of a database. Updates and deletes are spread over the whole of a table."""

    def __init__(self, connection: psycopg.Connection, size: Size, *, tables: int = 1) -> None:
        self.connection = connection
        self.size = size
        self.tables = ["orders"] if tables == 1 else [f"orders_{number:02}" for number in range(tables)]
        self.rows = size.rows // tables
        self._next = self.rows + 1

    def fill(self) -> None:
        """The tables with their first rows, at rest: no checkpoint or vacuum of theirs is still to come."""
        for table in self.tables:
            columns = ", ".join(f"{name} {declared}" for name, declared in COLUMNS.items())
            self.connection.execute(f"CREATE TABLE {table} ({columns})")
            self.connection.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
            self.connection.execute(_ROWS.format(table=table, first=1, last=self.rows))
            self.connection.execute(f"VACUUM (FREEZE, ANALYZE) {table}")
        self.connection.execute("CHECKPOINT")

    def change(self) -> int:
        """Inserts, updates and deletes in transactions of one statement each, by turns. Returns how many changes."""
        done = 0
        for statement in self._statements():
            done += self.connection.execute(statement).rowcount
        return done

    def _statements(self) -> Iterator[str]:
        size = self.size.transaction
        stride = max(1, self.rows // size)
        updates, deletes = self.size.updates // size, self.size.deletes // size
        updates_of_table = -(-updates // len(self.tables))
        for turn in range(max(self.size.inserts // size, updates, deletes)):
            table = self.tables[turn % len(self.tables)]
            first = 1 + turn // len(self.tables)
            if turn < self.size.inserts // size:
                yield _ROWS.format(table=table, first=self._next, last=self._next + size - 1)
                self._next += size
            if turn < updates:
                yield _UPDATE.format(table=table, first=first, stride=stride, size=size)
            if turn < deletes:
                yield _DELETE.format(table=table, first=first + updates_of_table, stride=stride, size=size)

    def change_singly(self) -> int:
        """Transactions of one update each."""
        count = self.size.singles
        stride = max(1, self.rows // count)
        self.connection.execute("SET synchronous_commit = off")
        self.connection.execute(_SINGLES.format(table=self.tables[0], count=count, stride=stride))
        self.connection.execute("RESET synchronous_commit")
        return count

    def insert_at_once(self) -> int:
        """One transaction of very many rows."""
        count = self.size.large
        last = self._next + count - 1
        self.connection.execute(_ROWS.format(table=self.tables[0], first=self._next, last=last))
        self._next += count
        return count
