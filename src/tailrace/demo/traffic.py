"""Random transactions on the demo shop, of every kind that change data capture has to get right."""

from __future__ import annotations

import datetime
import json
import random
import threading
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any, LiteralString, Self

import psycopg
from psycopg import sql

_BEGINNING = datetime.datetime(2025, 1, 1, tzinfo=datetime.UTC)
_RECONNECT_SECONDS = 0.1
_LANE_KEYS = 1_000_000_000  # lower keys belong to the loader; each lane has a range of this size for its own keys
_ITEM_KEY = ("order_items", "order_id")
_STATUSES = ("placed", "paid", "sent", "returned", "cancelled", "naïve ✓")

_INSERT_ORDER: LiteralString = "INSERT INTO orders VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"
_INSERT_ITEM: LiteralString = "INSERT INTO order_items VALUES (%s, %s, %s, %s, %s)"
_MOVE_ORDER: LiteralString = "UPDATE orders SET id = %s WHERE id = %s"


class _Undone(Exception):  # noqa: N818 - not an error: how a transaction asks to be rolled back
    pass


class Traffic:
    """Random transactions on a shop made by `create_shop`; the same ones for the same seed and rows.

    `run` executes a number of them and returns. `start` and `stop` execute them in a thread, `rate` per second or as
    fast as possible. A lost connection is opened again; any other error ends the thread, and `stop` raises it. With
    `truncates`, tables are truncated now and then. Several instances may share one shop if their `lane`s differ.
    """

    def __init__(
        self, dsn: str, seed: int = 0, rate: float | None = None, *, truncates: bool = False, lane: int = 0
    ) -> None:
        self._dsn = dsn
        self._rate = rate
        self._random = random.Random(seed)
        self._counts: Counter[str] = Counter()
        self._first_id = self._next_id = (lane + 1) * _LANE_KEYS
        self._known: dict[str, int] = {}
        self._conn: psycopg.Connection | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        weights: dict[Callable[[], None], float] = {
            self._place_order: 10,
            self._update_order: 10,
            self._update_orders: 2,
            self._delete_order: 4,
            self._move_order: 2,
            self._swap_orders: 2,
            self._replace_order: 2,
            self._update_order_twice: 2,
            self._change_item: 4,
            self._change_product: 4,
            self._change_customer: 4,
            self._record_events: 4,
            self._add_document: 2,
            self._retitle_document: 6,
            self._rewrite_document: 2,
            self._delete_document: 1,
            self._undo: 1,
            self._undo_half: 1,
            self._truncate: 0.3 if truncates else 0,
        }
        self._actions, self._weights = list(weights), list(weights.values())

    @property
    def counts(self) -> dict[str, int]:
        """Counts so far: transactions, rows inserted, updated and deleted, rollbacks and reconnects."""
        return dict(self._counts)

    def run(self, transactions: int) -> None:
        """Execute this number of transactions in this thread."""
        try:
            for _ in range(transactions):
                self._transact()
        finally:
            self._close()

    def start(self) -> Self:
        """Start a thread that executes transactions. Called once."""
        self._thread = threading.Thread(target=self._run_until_stopped, name="traffic", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop after the current transaction; raise the error that ended the thread earlier, if there was one."""
        self._stopping.set()
        if self._thread:
            self._thread.join()
        if self._error:
            error, self._error = self._error, None
            raise error

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run_until_stopped(self) -> None:
        pause = 1 / self._rate if self._rate else 0.0
        try:
            while not self._stopping.wait(pause * 2 * self._random.random() if pause else 0):
                try:
                    self._transact()
                except (psycopg.OperationalError, psycopg.InterfaceError):
                    self._close()
                    self._counts["reconnects"] += 1
                    self._stopping.wait(_RECONNECT_SECONDS)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that calls stop()
            self._error = error
        finally:
            self._close()

    def _transact(self) -> None:
        conn = self._open()
        before = self._counts.copy()
        (action,) = self._random.choices(self._actions, self._weights)
        try:
            with conn.transaction():
                action()
        except BaseException as error:
            self._counts = before
            # Two lanes may give a row the same key at the same time; one of them rolls back.
            if not isinstance(error, _Undone | psycopg.errors.UniqueViolation):
                raise
            self._counts["undone"] += 1
        self._counts["transactions"] += 1

    def _open(self) -> psycopg.Connection:
        if self._conn is None:
            self._conn = psycopg.connect(self._dsn, autocommit=True, connect_timeout=10)
            if not self._known:
                self._load_keys(self._conn)
        return self._conn

    def _load_keys(self, conn: psycopg.Connection) -> None:
        """Find out which keys were loaded, and which ones this lane used in earlier traffic."""
        for table, key in (("customers", "id"), ("products", "id"), ("documents", "id"), ("orders", "id"), _ITEM_KEY):
            row = conn.execute(
                sql.SQL(
                    "SELECT coalesce(max({key}) FILTER (WHERE {key} < %(loaded)s), 0), "
                    "coalesce(max({key}) FILTER (WHERE {key} BETWEEN %(low)s AND %(high)s), 0) FROM {table}"
                ).format(key=sql.Identifier(key), table=sql.Identifier(table)),
                {"loaded": _LANE_KEYS, "low": self._first_id, "high": self._first_id + _LANE_KEYS - 1},
            ).fetchone()
            self._known[table], given_out = row or (0, 0)
            self._next_id = max(self._next_id, given_out)

    def _close(self) -> None:
        if self._conn:
            self._conn.close()
        self._conn = None

    def _do(self, query: LiteralString, *values: Any) -> int:
        conn = self._open()
        rows = conn.execute(query, values).rowcount
        self._counts[query.split(maxsplit=1)[0].lower()] += max(0, rows)
        return rows

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _some_id(self, table: str) -> int:
        """A key that probably exists: one that was loaded, or one of the last that this lane used."""
        loaded = self._known[table]
        if loaded and self._random.random() < 0.5:
            return self._random.randint(1, loaded)
        return self._random.randint(max(self._first_id, self._next_id - 200), self._next_id)

    def _amount(self) -> str:
        return f"{self._random.randint(0, 9_999_999)}.{self._random.randint(0, 99):02}"

    def _now(self) -> datetime.datetime:
        return _BEGINNING + datetime.timedelta(milliseconds=self._random.randint(0, 86_400_000))

    def _long_text(self) -> str:
        return self._random.randbytes(self._random.choice((2_000, 8_000, 60_000))).hex()

    def _note(self) -> str | None:
        return self._random.choice(
            (None, "", "ring twice", "“quoted”, with\ttab\nand line", "日本語 🚚", "null", "\\N")
        )

    def _insert_order(self, key: int, items: int) -> None:
        placed = self._now()
        self._do(
            _INSERT_ORDER,
            *(key, self._some_id("customers"), "placed", self._random.choice(("EUR", "USD")), self._amount(), items),
            *(self._note(), placed, placed, self._random.random() < 0.1),
        )

    def _place_order(self) -> None:
        key, items = self._new_id(), self._random.randint(1, 4)
        self._insert_order(key, items)
        for line in range(1, items + 1):
            self._do(_INSERT_ITEM, key, line, self._some_id("products"), self._random.randint(1, 9), self._amount())

    def _update_order(self) -> None:
        values = (self._random.choice(_STATUSES), self._amount(), self._note(), self._now(), self._some_id("orders"))
        self._do("UPDATE orders SET status = %s, total = %s, note = %s, updated_at = %s WHERE id = %s", *values)

    def _update_orders(self) -> None:
        first = self._some_id("orders")
        self._do(
            "UPDATE orders SET items = items + 1, express = NOT express WHERE id BETWEEN %s AND %s", first, first + 20
        )

    def _update_order_twice(self) -> None:
        key = self._some_id("orders")
        self._do("UPDATE orders SET note = %s WHERE id = %s", self._note(), key)
        self._do("UPDATE orders SET total = total + 1 WHERE id = %s AND total < 1000000", key)

    def _delete_order(self) -> None:
        key = self._some_id("orders")
        self._do("DELETE FROM order_items WHERE order_id = %s", key)
        self._do("DELETE FROM orders WHERE id = %s", key)

    def _move_order(self) -> None:
        old, new = self._some_id("orders"), self._new_id()
        self._do(_MOVE_ORDER, new, old)
        self._do("UPDATE order_items SET order_id = %s WHERE order_id = %s", new, old)

    def _swap_orders(self) -> None:
        one, other, spare = self._some_id("orders"), self._some_id("orders"), self._new_id()
        self._do(_MOVE_ORDER, spare, one)
        self._do(_MOVE_ORDER, one, other)
        self._do(_MOVE_ORDER, other, spare)

    def _replace_order(self) -> None:
        key = self._some_id("orders")
        self._do("DELETE FROM orders WHERE id = %s", key)
        self._insert_order(key, 0)

    def _change_item(self) -> None:
        self._do(
            "UPDATE order_items SET quantity = quantity + 1, line = line + %s WHERE (order_id, line) = (%s, %s)",
            self._random.choice((0, 0, 100)),
            self._some_id("orders"),
            self._random.randint(1, 2),
        )

    def _change_product(self) -> None:
        first = self._some_id("products")
        self._do(
            "UPDATE products SET price = %s, stock = stock - 1, weight = %s WHERE id BETWEEN %s AND %s",
            *(self._amount(), self._random.choice((None, 0.1, -0.0, 1e300)), first, first + self._random.randint(0, 5)),
        )

    def _change_customer(self) -> None:
        profile = self._random.choice((None, {}, {"visits": self._random.randint(0, 99), "names": ["Zoë", None]}))
        tags = self._random.choice(([], ["loyal"], ['a "b"', None, "{c}"]))
        text = None if profile is None else json.dumps(profile)
        key = self._some_id("customers")
        if not self._do("UPDATE customers SET profile = %s, tags = %s WHERE id = %s", text, tags, key):
            values = (
                self._new_id(),
                "New",
                "new@example.com",
                "DE",
                tags,
                text,
                self._amount()[:8],
                self._now().date(),
            )
            self._do("INSERT INTO customers VALUES (%s, %s, %s, %s, %s, %s, %s, %s)", *values)

    def _record_events(self) -> None:
        for _ in range(self._random.randint(1, 8)):
            payload = json.dumps({"page": self._random.randint(1, 40)})
            self._do("INSERT INTO events VALUES (%s, %s, %s, %s)", self._now(), "visit", None, payload)

    def _add_document(self) -> None:
        meta = json.dumps({"scan": self._long_text()})
        values = (self._new_id(), "Draft", self._random.choice((None, "short", self._long_text())), meta)
        self._do("INSERT INTO documents VALUES (%s, %s, %s, %s, 1)", *values)

    def _retitle_document(self) -> None:
        """Update a document without its long values, so that Postgres leaves them out of the log."""
        title, key = f"Title {self._random.randint(1, 999)}", self._some_id("documents")
        self._do("UPDATE documents SET title = %s, version = version + 1 WHERE id = %s", title, key)

    def _rewrite_document(self) -> None:
        key = self._some_id("documents")
        self._do("UPDATE documents SET body = %s WHERE id = %s", self._long_text(), key)
        self._do("UPDATE documents SET version = version + 1 WHERE id = %s", key)
        if self._random.random() < 0.3:
            self._do("UPDATE documents SET id = %s WHERE id = %s", self._new_id(), key)

    def _delete_document(self) -> None:
        self._do("DELETE FROM documents WHERE id = %s", self._some_id("documents"))

    def _undo(self) -> None:
        self._place_order()
        self._update_orders()
        raise _Undone

    def _undo_half(self) -> None:
        self._update_order()
        before = self._counts.copy()
        try:
            with self._open().transaction():
                self._delete_order()
                self._record_events()
                raise _Undone
        except _Undone:
            self._counts = before
        self._place_order()

    def _truncate(self) -> None:
        if self._random.random() < 0.5:
            self._do("TRUNCATE events")
        else:
            self._do("TRUNCATE orders, order_items")
            self._place_order()
        self._counts["truncate"] += 1
