"""The benchmark's data: orders of a shop, in one table of ten columns or spread over several tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import psycopg

from tailrace.demo.workload import TABLES, create_shop

KEY = "id"
_TEMPLATE = "orders"
_ROWS = """
INSERT INTO {table} (id, customer_id, status, currency, total, items, note, created_at, updated_at, express)
SELECT i, 1 + i * 7919 % 200000, (ARRAY['placed', 'paid', 'sent', 'returned'])[1 + i % 4],
    (ARRAY['EUR', 'GBP', 'JPY', 'USD'])[1 + i % 4], (i * 7331 % 10000000) / 100.0, 2,
    CASE WHEN i % 5 = 0 THEN 'leave it with the neighbours, number ' || i % 90 END,
    timestamptz '2024-01-01 00:00:00+00' + i * interval '1 second', now(), i % 10 = 0
FROM generate_series({first}::bigint, {last}) i
"""
_KEYS = "WHERE id = ANY (ARRAY(SELECT {first} + k::bigint * {stride} FROM generate_series(0, {size} - 1) k))"
_UPDATE = "UPDATE {table} SET status = 'lost', total = total + 1, updated_at = clock_timestamp() " + _KEYS
_DELETE = "DELETE FROM {table} " + _KEYS
# One row per transaction, in a loop on the server, because a client would be the bottleneck.
_SINGLES = """
DO $$ BEGIN FOR n IN 0..{count} - 1 LOOP
    UPDATE {table} SET items = n, updated_at = clock_timestamp() WHERE id = 3 + n::bigint * {stride};
    COMMIT;
END LOOP; END $$
"""


@dataclass(frozen=True)
class Size:
    """The amount of data of each kind. `scaled` multiplies the defaults."""

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
        self.tables = [_TEMPLATE] if tables == 1 else [f"{_TEMPLATE}_{number:02}" for number in range(tables)]
        self.rows = size.rows // tables
        self._next = self.rows + 1

    def fill(self) -> None:
        """Create the tables with their first rows, and finish checkpoint and vacuum, so that neither disturbs a run."""
        create_shop(self.connection)
        for table in self.tables:
            if table != _TEMPLATE:
                self.connection.execute(f"CREATE TABLE {table} (LIKE {_TEMPLATE} INCLUDING ALL)")
            self.connection.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
            self.connection.execute(_ROWS.format(table=table, first=1, last=self.rows))
            self.connection.execute(f"VACUUM (FREEZE, ANALYZE) {table}")
        self.connection.execute("DROP TABLE " + ", ".join(table for table in TABLES if table not in self.tables))
        self.connection.execute("CHECKPOINT")

    def change(self) -> int:
        """Run inserts, updates and deletes in turn, one statement per transaction. Returns the number of changes."""
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
        """Run transactions of one update each."""
        count = self.size.singles
        stride = max(1, self.rows // count)
        self.connection.execute("SET synchronous_commit = off")
        self.connection.execute(_SINGLES.format(table=self.tables[0], count=count, stride=stride))
        self.connection.execute("RESET synchronous_commit")
        return count

    def insert_at_once(self) -> int:
        """Insert very many rows in one transaction."""
        count = self.size.large
        last = self._next + count - 1
        self.connection.execute(_ROWS.format(table=self.tables[0], first=self._next, last=last))
        self._next += count
        return count
