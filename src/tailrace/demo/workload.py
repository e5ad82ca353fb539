"""The tables and initial rows of a shop, for the demo, the tests and the benchmark. `traffic` changes them."""

from __future__ import annotations

from typing import LiteralString

import psycopg
from psycopg import sql

TABLES = ("customers", "products", "orders", "order_items", "events", "documents")

ORDERS_PER_SCALE = 10_000

_SCHEMA = """
CREATE TABLE customers (
    id bigint PRIMARY KEY,
    name text NOT NULL,
    email text NOT NULL,
    country char(2) NOT NULL,
    tags text[] NOT NULL,
    profile jsonb,
    credit numeric(10, 2) NOT NULL,
    joined_on date NOT NULL
);
CREATE TABLE products (
    id bigint PRIMARY KEY,
    sku uuid NOT NULL,
    name text NOT NULL,
    price numeric(12, 2) NOT NULL,
    stock int NOT NULL,
    weight double precision,
    active bool NOT NULL
);
CREATE TABLE orders (
    id bigint PRIMARY KEY,
    customer_id bigint NOT NULL,
    status text NOT NULL,
    currency char(3) NOT NULL,
    total numeric(12, 2) NOT NULL,
    items int NOT NULL,
    note text,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    express bool NOT NULL
);
CREATE TABLE order_items (
    order_id bigint,
    line int,
    product_id bigint NOT NULL,
    quantity int NOT NULL,
    price numeric(12, 2) NOT NULL,
    PRIMARY KEY (order_id, line)
);
CREATE TABLE events (
    at timestamptz NOT NULL,
    kind text NOT NULL,
    customer_id bigint,
    payload jsonb NOT NULL
);
CREATE TABLE documents (
    id bigint PRIMARY KEY,
    title text NOT NULL,
    body text,
    meta jsonb,
    version int NOT NULL
);
-- It has no key, and nothing else would let Postgres accept an UPDATE of it once it is published.
ALTER TABLE events REPLICA IDENTITY FULL;
-- Stored out of line without compression, so that every long value really is a TOAST value.
ALTER TABLE documents ALTER body SET STORAGE EXTERNAL, ALTER meta SET STORAGE EXTERNAL;
"""

_LOAD: dict[str, LiteralString] = {
    "customers": """
        INSERT INTO customers
        SELECT i, 'Customer ' || i, 'customer' || i || '@example.com', (ARRAY['DE', 'FR', 'GB', 'JP', 'US'])[1 + i % 5],
            CASE WHEN i % 3 = 0 THEN ARRAY['loyal', 'mail'] WHEN i % 3 = 1 THEN ARRAY['new'] ELSE ARRAY[]::text[] END,
            CASE WHEN i % 4 > 0 THEN jsonb_build_object('visits', i % 50, 'theme', 'dark') END,
            (i % 100000) / 100.0, date '2020-01-01' + (i % 1500)::int
        FROM generate_series(1, {rows}::bigint) i""",
    "products": """
        INSERT INTO products
        SELECT i, md5(i::text)::uuid, 'Product ' || i, 1 + (i * 37 % 99900) / 100.0, i % 1000,
            CASE WHEN i % 7 > 0 THEN i % 500 / 16.0 END, i % 20 > 0
        FROM generate_series(1, {rows}::bigint) i""",
    "orders": """
        INSERT INTO orders
        SELECT i, 1 + i * 7919 % greatest(1, {orders} / 10), (ARRAY['placed', 'paid', 'sent', 'returned'])[1 + i % 4],
            (ARRAY['EUR', 'GBP', 'JPY', 'USD'])[1 + i % 4], (i * 7331 % 10000000) / 100.0, 2,
            CASE WHEN i % 5 = 0 THEN 'leave it with the neighbours, number ' || i % 90 END,
            timestamptz '2024-01-01 00:00:00+00' + i * interval '1 second',
            timestamptz '2024-01-01 00:00:00+00' + i * interval '1.5 seconds', i % 10 = 0
        FROM generate_series(1, {rows}::bigint) i""",
    "order_items": """
        INSERT INTO order_items
        SELECT i, line, 1 + (i + line) * 31 % greatest(1, {orders} / 100), 1 + i % 3, 1 + (i * 37 % 99900) / 100.0
        FROM generate_series(1, {rows}::bigint) i, generate_series(1, 2) line""",
    "events": """
        INSERT INTO events
        SELECT timestamptz '2024-01-01 00:00:00+00' + i * interval '1 second',
            (ARRAY['visit', 'search', 'basket'])[1 + i % 3], CASE WHEN i % 6 > 0 THEN i % 1000 END,
            jsonb_build_object('page', i % 40)
        FROM generate_series(1, {rows}::bigint) i""",
    "documents": """
        INSERT INTO documents
        SELECT i, 'Invoice ' || i, repeat(md5(i::text), 100 + (i % 400)::int),
            jsonb_build_object('scan', repeat(md5('scan' || i), 100 + (i % 50)::int), 'pages', i % 9), 1
        FROM generate_series(1, {rows}::bigint) i""",
}


def create_shop(conn: psycopg.Connection) -> None:
    """Create the shop's tables in `public`, empty. Raises DuplicateTable if they exist."""
    conn.execute(_SCHEMA)


def load_shop(conn: psycopg.Connection, scale: float = 1.0) -> dict[str, int]:
    """Fill the empty tables, with the same rows for the same scale (1.0: 10,000 orders). Returns rows per table."""
    orders = max(1, round(ORDERS_PER_SCALE * scale))
    counts = {
        "customers": max(1, orders // 10),
        "products": max(1, orders // 100),
        "orders": orders,
        "order_items": 2 * orders,
        "events": orders,
        "documents": max(1, orders // 100),
    }
    for table, query in _LOAD.items():
        rows = orders if table == "order_items" else counts[table]
        conn.execute(sql.SQL(query).format(orders=orders, rows=rows))
    return counts
