"""Tables that are hard to keep: every built-in type, no key, odd keys, partitions, hostile names, very long values."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

import psycopg
from psycopg import sql

# Declared type: texts of values, to which null is always added.
VALUES: dict[str, list[str]] = {
    "boolean": ["true", "false"],
    "smallint": ["0", "-32768", "32767"],
    "integer": ["0", "-2147483648", "2147483647"],
    "bigint": ["0", "-9223372036854775808", "9223372036854775807"],
    "real": ["0", "-0", "NaN", "Infinity", "1.1", "1e-45"],
    "double precision": ["-0", "NaN", "-Infinity", "0.1", "5e-324", "1.7976931348623157e308"],
    "numeric(12,2)": ["0", "-0.01", "9999999999.99", "NaN"],
    "numeric(38,38)": ["0." + "9" * 38, "0"],
    "numeric": ["1.10", "NaN", "Infinity", "9" * 60 + ".5", "1e-30"],
    "numeric(3,-2)": ["12345"],
    "money": ["12.34", "-92233720368547758.08"],
    "text": ["", " ", "NULL", "naïve ☃ 🦫", 'quo"te\\', "line\nand\ttab", "{}"],
    "varchar(7)": ["", "abcdefg", "ü🦫"],
    "char(5)": ["", "a", "abcde"],
    '"char"': ["a", ""],
    "name": ["pg_catalog"],
    "bytea": ["\\x", "\\x00ff", "\\xdeadbeef"],
    "date": ["2026-11-15", "infinity", "-infinity", "0044-03-15 BC", "10000-01-01", "1969-12-31"],
    "timestamp": ["2026-11-15 19:34:01.123456", "infinity", "4713-11-24 00:00:00 BC", "294276-12-31 23:59:59.999999"],
    "timestamptz": ["2026-11-15 19:34:01.5+05:30", "-infinity", "0001-12-31 23:59:59.9 BC", "12026-01-01 00:00:00"],
    "time": ["00:00:00", "24:00:00", "23:59:59.999999"],
    "timetz": ["12:34:56.5-07:30", "24:00:00+00"],
    "interval": ["0", "1 year -2 mons 3 days -04:05:06.789", "-178000000 years"],
    "uuid": ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"],
    "json": ['{"b" : 1, "a":[1, 2.50], "b": null}', '"☃"'],
    "jsonb": ['{"b" : 1, "a":[1, 2.50]}', "1e2", "null"],
    "xml": ["<a>1 &lt; 2</a>"],
    "inet": ["10.0.0.1", "10.0.0.1/8", "::1"],
    "cidr": ["10.0.0.0/8"],
    "macaddr": ["08:00:2b:01:02:03"],
    "macaddr8": ["08:00:2b:01:02:03:04:05"],
    "bit(3)": ["101"],
    "varbit": ["", "10101"],
    "point": ["(1.5,-2)", "(NaN,Infinity)"],
    "line": ["{1,2,3}"],
    "lseg": ["[(0,0),(1,1)]"],
    "box": ["(1,1),(0,0)"],
    "path": ["((0,0),(1,1))", "[(0,0),(1,1)]"],
    "polygon": ["((0,0),(1,1),(1,0))"],
    "circle": ["<(0,0),1.1>"],
    "tsvector": ["'fat':2 'cat':3A"],
    "tsquery": ["'fat' & !'rat'"],
    "pg_lsn": ["16/B374D848"],
    "oid": ["0", "4294967295"],
    "regclass": ["pg_catalog.pg_class"],
    "int4range": ["empty", "[1,5)", "(,)"],
    "numrange": ["[1.10,2]"],
    "tstzrange": ['["2026-01-01 00:00:00+00",infinity)'],
    "int4multirange": ["{}", "{[1,2),[5,7)}"],
    "zoo.mood": ["sad", 'mit "Quote"', "glücklich"],
    "zoo.pair": ['(1,"a,b")', "(,)"],
    "zoo.price": ["12.34", "NaN"],
    "zoo.numbers": ["{1,2}", "[0:1]={7,8}"],
    "zoo.float_range": ["[1.5,2)"],
    "integer[]": ["{}", "{1,NULL,3}", "{{1,2},{3,4}}", "[0:1]={1,2}"],
    "text[]": ['{a,"",NULL,"NULL","q\\"uo,te\\\\"}'],
    "boolean[]": ["{t,f,NULL}"],
    "numeric(8,2)[]": ["{1.10,-2}", "{NaN}"],
    "timestamptz[]": ['{"2026-11-15 19:34:01+00",NULL}', "{infinity}"],
    "date[]": ["{2026-11-15,1969-12-31}"],
    "bytea[]": ['{"\\\\x00ff",NULL}'],
    "double precision[]": ["{0.1,NaN,-Infinity}"],
    "uuid[]": ["{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}"],
    "zoo.mood[]": ["{sad,NULL}"],
    "box[]": ["{(1,1),(0,0);(2,2),(1,1)}"],
}

HOSTILE = ('Zoo "of" names.🦫', 'ta"ble.with ../dots, Capitals & SELECT')
_HOSTILE_KEY, _HOSTILE_VALUE = 'Ke"y.🗝', "select"

_TYPES = """
CREATE SCHEMA zoo;
CREATE TYPE zoo.mood AS ENUM ('sad', 'mit "Quote"', 'glücklich');
CREATE TYPE zoo.pair AS (a int, b text);
CREATE DOMAIN zoo.price AS numeric(8, 2);
CREATE DOMAIN zoo.numbers AS int[];
CREATE TYPE zoo.float_range AS RANGE (subtype = float8);
"""
_TABLES = """
CREATE TABLE zoo.log (at timestamptz NOT NULL DEFAULT clock_timestamp(), kind text, amount numeric(10, 2), "when" date);
CREATE TABLE zoo.full_log (id int, note text, amount numeric);
ALTER TABLE zoo.full_log REPLICA IDENTITY FULL;
CREATE TABLE zoo.parted (region text, id bigint, note text, PRIMARY KEY (region, id)) PARTITION BY LIST (region);
CREATE TABLE zoo.parted_north PARTITION OF zoo.parted FOR VALUES IN ('north');
CREATE TABLE zoo.parted_rest PARTITION OF zoo.parted DEFAULT;
CREATE TABLE zoo.by_text (code text COLLATE "C", day date, counter bigint, PRIMARY KEY (code, day));
CREATE TABLE zoo.by_index (id int, tag uuid NOT NULL, note text);
CREATE UNIQUE INDEX by_index_tag ON zoo.by_index (tag);
ALTER TABLE zoo.by_index REPLICA IDENTITY USING INDEX by_index_tag;
CREATE TABLE zoo.long (id int PRIMARY KEY, title text, body text, raw bytea);
ALTER TABLE zoo.long ALTER body SET STORAGE EXTERNAL, ALTER raw SET STORAGE EXTERNAL;
"""


def create_zoo(conn: psycopg.Connection) -> None:
    """Make the types and tables, empty. `conn` is in autocommit or commits later."""
    # A server may be built without XML.
    try:
        with conn.transaction():
            conn.execute("SELECT '<a/>'::xml")
        absent = set()
    except psycopg.errors.FeatureNotSupported:
        absent = {"xml"}
    if conn.info.server_version < 150000:
        absent.add("numeric(3,-2)")  # no negative scale yet
    conn.execute(_TYPES)
    columns = [f"c{index} {declared}" for index, declared in enumerate(VALUES) if declared not in absent]
    conn.execute(f"CREATE TABLE zoo.every_type (id int PRIMARY KEY, {', '.join(columns)})".encode())
    conn.execute(_TABLES)
    schema, key, value = sql.Identifier(HOSTILE[0]), sql.Identifier(_HOSTILE_KEY), sql.Identifier(_HOSTILE_VALUE)
    conn.execute(sql.SQL("CREATE SCHEMA {}").format(schema))
    conn.execute(
        sql.SQL('CREATE TABLE {} ({} text PRIMARY KEY, {} int, "_Ünï" text)').format(
            sql.Identifier(*HOSTILE), key, value
        )
    )


class ZooTraffic:
    """Random transactions on the zoo, the same ones for the same seed; `run` some, or `start` and `stop` a thread.

    Several may work on one zoo if their lanes differ: each keeps to keys of its own.
    """

    def __init__(self, dsn: str, seed: int = 0, *, lane: int = 0, rate: float = 100.0) -> None:
        self._dsn = dsn
        self._random = random.Random(seed)
        self._first_id = lane * 1_000
        self._rate = rate
        self._conn: psycopg.Connection | None = None
        self._columns: dict[str, list[str]] = {}
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._actions: list[Callable[[psycopg.Connection], None]] = [
            self._insert_every,
            self._update_every,
            self._update_every,
            self._remove_every,
            self._append,
            self._append_full,
            self._change_full,
            self._change_parted,
            self._change_by_text,
            self._change_by_index,
            self._write_long,
            self._retitle_long,
            self._retitle_long,
            self._change_hostile,
        ]

    def run(self, transactions: int) -> None:
        """Do so many transactions in this thread, several actions in each."""
        with psycopg.connect(self._dsn) as conn:
            for _ in range(transactions):
                self._transact(conn)

    def start(self) -> Self:
        """Begin, in a thread. Called once."""
        self._thread = threading.Thread(target=self._keep_on, name="keeper", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """End after the transaction at hand, and raise the error that ended it before, if one did."""
        self._stopping.set()
        if self._thread:
            self._thread.join()
        if self._error:
            raise self._error

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _keep_on(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    with psycopg.connect(self._dsn) as conn:
                        while not self._stopping.wait(self._random.random() * 2 / self._rate):
                            self._transact(conn)
                except psycopg.OperationalError:
                    self._stopping.wait(0.1)  # the server is being restarted
        except BaseException as error:  # noqa: BLE001 - handed to the thread that calls stop()
            self._error = error

    def _transact(self, conn: psycopg.Connection) -> None:
        if not self._columns:
            rows = conn.execute(
                "SELECT attname::text, format_type(atttypid, atttypmod) FROM pg_attribute"
                " WHERE attrelid = 'zoo.every_type'::regclass AND attnum > 1 ORDER BY attnum"
            ).fetchall()
            declared = list(VALUES)
            self._columns = {name: VALUES[declared[int(name[1:])]] for name, _ in rows}
        for action in self._random.choices(self._actions, k=self._random.randint(1, 6)):
            action(conn)
        if self._random.random() < 0.1:
            conn.rollback()
        else:
            conn.commit()

    def _id(self) -> int:
        return self._first_id + self._random.randint(1, 60)

    def _value(self, column: str) -> sql.Literal:
        return sql.Literal(self._random.choice([None, *self._columns[column]]))

    def _insert_every(self, conn: psycopg.Connection) -> None:
        values = sql.SQL(", ").join(self._value(column) for column in self._columns)
        conn.execute(
            sql.SQL("INSERT INTO zoo.every_type VALUES ({}, {}) ON CONFLICT DO NOTHING").format(self._id(), values)
        )

    def _update_every(self, conn: psycopg.Connection) -> None:
        some = self._random.sample(list(self._columns), 5)
        changes = sql.SQL(", ").join(sql.SQL("{} = {}").format(sql.Identifier(c), self._value(c)) for c in some)
        conn.execute(sql.SQL("UPDATE zoo.every_type SET {} WHERE id = {}").format(changes, self._id()))

    def _remove_every(self, conn: psycopg.Connection) -> None:
        if self._random.random() < 0.5:
            conn.execute("DELETE FROM zoo.every_type WHERE id = %s", [self._id()])
        else:  # to another key, unless another row has it
            old, new = self._id(), self._id()
            conn.execute(
                "UPDATE zoo.every_type SET id = %(new)s WHERE id = %(old)s"
                " AND NOT EXISTS (SELECT FROM zoo.every_type WHERE id = %(new)s)",
                {"old": old, "new": new},
            )

    def _append(self, conn: psycopg.Connection) -> None:
        for _ in range(self._random.randint(1, 5)):
            conn.execute("INSERT INTO zoo.log (kind, amount, \"when\") VALUES (%s, %s, 'infinity')", ["x", self._id()])

    def _append_full(self, conn: psycopg.Connection) -> None:
        note = self._random.choice([None, "same", "naïve ☃"])
        conn.execute("INSERT INTO zoo.full_log VALUES (%s, %s, 'NaN'), (1, 'twin', 0)", [self._id(), note])

    def _change_full(self, conn: psycopg.Connection) -> None:
        if self._random.random() < 0.5:
            conn.execute("UPDATE zoo.full_log SET amount = %s WHERE id = %s", [self._random.random(), self._id()])
        else:
            conn.execute("DELETE FROM zoo.full_log WHERE id = %s", [self._id()])

    def _change_parted(self, conn: psycopg.Connection) -> None:
        region, other = self._random.choices(["north", "south", "naïve ☃"], k=2)
        key = self._id()
        conn.execute(
            "INSERT INTO zoo.parted VALUES (%s, %s, %s) ON CONFLICT (region, id) DO UPDATE SET note = excluded.note",
            [region, key, str(self._random.random())],
        )
        if self._random.random() < 0.3:
            conn.execute("DELETE FROM zoo.parted WHERE region = %s AND id = %s", [other, key])
            conn.execute("UPDATE zoo.parted SET region = %s WHERE id = %s AND region = %s", [other, key, region])

    def _change_by_text(self, conn: psycopg.Connection) -> None:
        code = self._random.choice(["", "a", "A", "ä", "🦫", "a "]) + str(self._first_id)
        conn.execute(
            "INSERT INTO zoo.by_text VALUES (%s, date '2000-01-01' + %s, 1)"
            " ON CONFLICT (code, day) DO UPDATE SET counter = by_text.counter + 1",
            [code, self._random.randint(-15, 15) - 730_485],
        )

    def _change_by_index(self, conn: psycopg.Connection) -> None:
        tag = f"00000000-0000-0000-0000-{self._id():012}"
        if not conn.execute("UPDATE zoo.by_index SET note = note || '.' WHERE tag = %s", [tag]).rowcount:
            conn.execute("INSERT INTO zoo.by_index VALUES (NULL, %s, '')", [tag])
        elif self._random.random() < 0.3:
            conn.execute("DELETE FROM zoo.by_index WHERE tag = %s", [tag])

    def _write_long(self, conn: psycopg.Connection) -> None:
        size = self._random.choice([10, 3_000, 40_000])
        body = self._random.randbytes(size)
        conn.execute(
            "INSERT INTO zoo.long VALUES (%s, 'new', %s, %s) ON CONFLICT (id) DO UPDATE SET body = excluded.body",
            [self._id(), body.hex(), body],
        )

    def _retitle_long(self, conn: psycopg.Connection) -> None:
        """The long values stay as they are, so the log leaves them out; sometimes the key changes as well."""
        key = self._id()
        conn.execute("UPDATE zoo.long SET title = %s WHERE id = %s", [str(self._random.random()), key])
        if self._random.random() < 0.3:
            new = self._id()
            conn.execute("DELETE FROM zoo.long WHERE id = %s AND id <> %s", [new, key])
            conn.execute("UPDATE zoo.long SET id = %s WHERE id = %s", [new, key])

    def _change_hostile(self, conn: psycopg.Connection) -> None:
        table, key, value = sql.Identifier(*HOSTILE), sql.Identifier(_HOSTILE_KEY), sql.Identifier(_HOSTILE_VALUE)
        name = f"'\"; DROP TABLE x; -- {self._id()}"
        query = "INSERT INTO {0} ({1}, {2}) VALUES (%s, 1) ON CONFLICT ({1}) DO UPDATE SET {2} = {0}.{2} + 1"
        conn.execute(sql.SQL(query).format(table, key, value), [name])
        if self._random.random() < 0.2:
            conn.execute(sql.SQL("DELETE FROM {} WHERE {} = %s").format(table, key), [name])
