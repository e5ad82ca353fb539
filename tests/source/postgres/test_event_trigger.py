"""The event trigger on real servers: what DDL writes into the log, between the rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
import pyarrow as pa
import pytest

from tailrace.demo.server import EmbeddedPostgres, find_servers
from tailrace.errors import PreflightError, UnavailableError
from tailrace.model.schema import TableName
from tailrace.source.postgres import ddl_message, event_trigger
from tailrace.source.postgres.catalog import Published, describe, list_published, list_tables
from tailrace.source.postgres.connection import PgConnection, session
from tailrace.source.postgres.ddl_message import DdlEvent, to_published
from tailrace.source.postgres.frame_builder import DDL_PREFIX
from tailrace.source.postgres.pgoutput import message
from tailrace.source.postgres.pgoutput.message import LogicalMessage, MalformedError, MessageKind
from tailrace.source.postgres.schema_diff import compare
from tailrace.source.postgres.type_map import read_types
from tests.support.database import PostgresDatabase

TABLES = """
CREATE TABLE t (id int PRIMARY KEY, a int, b text);
CREATE TABLE root (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
CREATE TABLE leaf PARTITION OF root FOR VALUES FROM (0) TO (100);
INSERT INTO root VALUES (1, 'one');
CREATE PUBLICATION pub FOR TABLE t, root WITH (publish_via_partition_root = true);
"""


class Site:
    """A database with the trigger, some published tables and a slot that began before the changes."""

    def __init__(self, database: PostgresDatabase, connection: PgConnection, user: PgConnection) -> None:
        self.database = database
        self.connection = connection
        self.user = user
        self.warnings: list[str] = []
        user.add_notice_handler(
            lambda notice: self.warnings.append(str(notice.message_primary)) if notice.severity == "WARNING" else None
        )
        self.run(TABLES)
        event_trigger.install(connection)
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [f"site_{database.name}"])

    def run(self, statements: str) -> None:
        """Several statements in one transaction."""
        self.user.execute(statements.encode())

    def log(self) -> list[DdlEvent | str]:
        """What the slot has since the last look: rows and truncates by their letter, the trigger's messages read."""
        rows = self.connection.execute(
            "SELECT data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL,"
            " 'proto_version', '1', 'publication_names', 'pub', 'messages', 'true')",
            [f"site_{self.database.name}"],
        ).fetchall()
        found: list[DdlEvent | str] = []
        for (data,) in rows:
            if data[0] in (MessageKind.INSERT, MessageKind.UPDATE, MessageKind.DELETE, MessageKind.TRUNCATE):
                found.append(chr(data[0]))
            elif data[0] == MessageKind.MESSAGE:
                parsed = message.parse(data)
                assert isinstance(parsed, LogicalMessage)
                assert parsed.transactional
                if parsed.prefix == DDL_PREFIX:
                    described = ddl_message.parse(parsed.content)
                    assert described is not None
                    found.append(described)
        return found

    def ddl_event(self, statements: str) -> DdlEvent:
        """The one message that the statements left in the log."""
        self.run(statements)
        [described] = [entry for entry in self.log() if isinstance(entry, DdlEvent)]
        return described

    def recopy(self, statements: str, name: str = "t") -> str | None:
        """Why the statements, which leave one message, make a new copy of the table."""
        before = catalog(self.connection, name).schema
        described = self.ddl_event(statements)
        assert described.oid == int(before.upstream_id)
        if described.recopy:
            return described.reason
        published = self.published(described)
        return compare(before, published.schema, unknown=published.unknown).recopy

    def published(self, described: DdlEvent) -> Published:
        types = read_types(self.connection, described.type_oids)
        published = to_published(described, "pub", types)
        assert published is not None
        return published


@contextmanager
def open_site(database: PostgresDatabase) -> Iterator[Site]:
    with session(database.dsn, "testing") as connection, database.connect() as user:
        site = Site(database, connection, user)
        yield site
        assert site.warnings == []


@pytest.fixture
def site(database: PostgresDatabase) -> Iterator[Site]:
    with open_site(database) as opened:
        yield opened


def catalog(connection: PgConnection, name: str, publication: str = "pub") -> Published:
    [relation] = [one for one in list_tables(connection) if one.table.name == name]
    [published] = describe(connection, [relation], list_published(connection, publication))
    return published


CHANGES = {
    "add": "ALTER TABLE t ADD c int",
    "default": "ALTER TABLE t ADD c timestamptz DEFAULT '2024-02-29 12:00:00.5+02'",
    "array": "ALTER TABLE t ADD c int[] NOT NULL DEFAULT '{1,NULL,3}', ADD d numeric(10,2) DEFAULT 1.50",
    "bytes": "ALTER TABLE t ADD c bytea DEFAULT '\\x00ff', ADD d boolean DEFAULT true, ADD e date DEFAULT '2024-01-01'",
    "drop": "ALTER TABLE t DROP b",
    "rename": "ALTER TABLE t RENAME b TO c",
    "widen": "ALTER TABLE t ALTER a TYPE bigint",
    "nullability": "ALTER TABLE t ALTER a SET NOT NULL",
    "later default": "ALTER TABLE t ALTER a SET DEFAULT 7",
    "table": "ALTER TABLE t RENAME TO u",
    "schema": "CREATE SCHEMA other; ALTER TABLE t SET SCHEMA other",
    "key": "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (id, a)",
    "full": "ALTER TABLE t REPLICA IDENTITY FULL",
    "index": "ALTER TABLE t ALTER a SET NOT NULL, ADD CONSTRAINT by_a UNIQUE (a), REPLICA IDENTITY USING INDEX by_a",
    "enum": "CREATE TYPE mood AS ENUM ('calm'); ALTER TABLE t ADD c mood DEFAULT 'calm'",
    "root": "ALTER TABLE root ADD c int DEFAULT 5",
}


@pytest.mark.parametrize("version", sorted(find_servers()))
def test_every_schema_change_is_logged_between_the_rows_as_the_catalog_has_it(
    version: int,
    postgres_server: Callable[[int], EmbeddedPostgres],
    make_database: Callable[[EmbeddedPostgres], PostgresDatabase],
) -> None:
    for statement in CHANGES.values():
        with open_site(make_database(postgres_server(version))) as site:
            # The index of a replica identity is made by an ALTER of its own.
            statement = statement.replace(", REPLICA", "; ALTER TABLE t REPLICA")
            site.run(
                f"BEGIN; INSERT INTO t VALUES (1, 1, 'x'); {statement}; INSERT INTO root VALUES (2, 'two'); COMMIT"
            )
            first, *messages, last = site.log()
            assert (first, last) == ("I", "I"), statement
            assert messages, statement
            described = messages[-1]
            assert isinstance(described, DdlEvent)
            assert described.tag == "ALTER TABLE"
            assert not described.recopy, statement
            assert described.table is not None
            published = site.published(described)
            assert published == catalog(site.connection, described.table.name), statement


def test_several_changes_of_one_transaction_come_in_order_between_the_rows(site: Site) -> None:
    site.run(
        "BEGIN; INSERT INTO t VALUES (1, 1, 'x'); ALTER TABLE t ADD c int DEFAULT 3; INSERT INTO t VALUES (2, 2, 'y');"
        "ALTER TABLE t DROP b; ALTER TABLE t RENAME a TO z; UPDATE t SET z = 4 WHERE id = 1; COMMIT"
    )
    names = [
        entry if isinstance(entry, str) else [column.name for column in entry.columns or ()] for entry in site.log()
    ]
    assert names == ["I", ["id", "a", "b", "c"], "I", ["id", "a", "c"], ["id", "z", "c"], "U"]


def test_rows_right_after_a_schema_change_in_a_subtransaction_come_after_it(site: Site) -> None:
    for number in range(1, 6):
        site.run(
            f"BEGIN; SAVEPOINT s; ALTER TABLE t ADD c{number} int; RELEASE s; INSERT INTO t VALUES ({number}, 1, 'x');"
            f"DO $$ BEGIN ALTER TABLE t ADD d{number} int; EXCEPTION WHEN OTHERS THEN RAISE; END $$;"
            f"UPDATE t SET a = 2 WHERE id = {number}; COMMIT"
        )
    assert "".join(entry if isinstance(entry, str) else "M" for entry in site.log()) == "MIMU" * 5


def test_a_rolled_back_schema_change_is_not_logged(site: Site) -> None:
    site.run("BEGIN; SAVEPOINT s; ALTER TABLE t ADD c int; ROLLBACK TO s; ALTER TABLE t ADD d int; COMMIT")
    [described] = site.log()
    assert isinstance(described, DdlEvent)
    assert [column.name for column in described.columns or ()] == ["id", "a", "b", "d"]


def test_an_added_column_comes_with_what_older_rows_hold(site: Site) -> None:
    published = site.published(
        site.ddl_event("ALTER TABLE t ADD c int DEFAULT 5, ADD d text DEFAULT 'it''s', ADD e int")
    )
    assert published.schema.column("c").initial == pa.scalar(5, pa.int32())
    assert published.schema.column("d").initial == pa.scalar("it's")
    assert published.schema.column("e").initial is None
    assert published.unknown == frozenset()


def test_an_initial_value_that_its_type_cannot_hold_is_unknown(site: Site) -> None:
    before = catalog(site.connection, "t").schema
    published = site.published(site.ddl_event("ALTER TABLE t ADD c timestamptz DEFAULT 'infinity'"))
    assert published.unknown == {4}
    assert compare(before, published.schema, unknown=published.unknown).recopy is not None


RECOPIES = {
    "ALTER TABLE t ADD c int DEFAULT 5, ALTER a TYPE bigint": "filled with a value for each row",
    "ALTER TABLE t ADD c double precision DEFAULT random()": "filled with a value for each row",
    "ALTER TABLE t ADD c int GENERATED ALWAYS AS IDENTITY": "filled with a value for each row",
    "ALTER TABLE t ALTER b TYPE text USING upper(b)": "column b was changed and the rows",
    "ALTER TABLE t ALTER a TYPE bigint": "column a was changed and the rows",
    "ALTER TABLE t ALTER a TYPE text": "column a was changed and the rows",
    "ALTER TABLE t ALTER b TYPE varchar(10)": "column b was changed and the rows",
    "DO $$ BEGIN EXECUTE 'ALTER TABLE t ALTER a TYPE bigint USING -a'; END $$": "column a was changed and the rows",
    "SELECT 1; /* */ ALTER TABLE t ALTER a TYPE int USING -a": "column a was changed and the rows",
    "CREATE FUNCTION f() RETURNS void LANGUAGE sql AS 'ALTER TABLE public.t ALTER a TYPE int USING -a'; SELECT f()": (
        "column a was changed and the rows"
    ),
    "CREATE TABLE more (LIKE root); INSERT INTO more VALUES (150, 'm');"
    " ALTER TABLE root ATTACH PARTITION more FOR VALUES FROM (100) TO (200)": "attached",
    "ALTER TABLE root DETACH PARTITION leaf": "detached",
    "DROP TABLE leaf": "a partition was dropped",
    "TRUNCATE leaf": "a partition was truncated",
}


@pytest.mark.parametrize("statement", RECOPIES)
def test_rows_that_change_without_a_log_ask_for_a_new_copy(site: Site, statement: str) -> None:
    site.run("INSERT INTO t VALUES (1, 1, 'x')")
    name = "root" if "root" in statement or "leaf" in statement else "t"
    assert RECOPIES[statement] in (site.recopy(statement, name) or "")


@pytest.mark.parametrize("how", ["UNLOGGED", "LOGGED"])
def test_a_partition_that_is_unlogged_for_a_while_asks_for_a_new_copy_of_its_root(site: Site, how: str) -> None:
    if how == "LOGGED":
        site.run("ALTER TABLE leaf SET UNLOGGED")
        site.log()
    root = int(catalog(site.connection, "root").schema.upstream_id)
    site.run(f"ALTER TABLE leaf SET {how}")
    events = [entry for entry in site.log() if isinstance(entry, DdlEvent)]
    assert [event.reason for event in events if event.recopy and event.oid == root] == [
        "it, or a partition of it, was unlogged for a while"
    ]


@pytest.mark.parametrize(
    "statement",
    [
        "ALTER TABLE t ALTER a SET DEFAULT 7",
        "ALTER TABLE t ADD c int DEFAULT 5",
        "ALTER TABLE t DROP b",
        "ALTER VIEW t RENAME COLUMN b TO c",
        "ALTER TABLE t ALTER a SET NOT NULL",
    ],
)
def test_a_command_that_leaves_the_rows_alone_asks_for_no_copy(site: Site, statement: str) -> None:
    site.run("INSERT INTO t VALUES (1, 1, 'x')")
    assert site.recopy(statement) is None


def test_rows_in_a_new_file_ask_for_no_copy_unless_a_column_changed(site: Site) -> None:
    before = catalog(site.connection, "t").schema
    site.user.execute("VACUUM FULL t")
    vacuumed = catalog(site.connection, "t").schema
    assert vacuumed.fingerprint != before.fingerprint
    assert compare(before, vacuumed).recopy is None
    site.run("TRUNCATE t")
    assert compare(vacuumed, catalog(site.connection, "t").schema).recopy is None
    site.run("ALTER TABLE t ALTER a TYPE int USING a + 1")
    assert compare(before, catalog(site.connection, "t").schema).recopy is not None


def test_a_published_column_that_was_generated_before_asks_for_a_new_copy(site: Site) -> None:
    site.run("ALTER TABLE t ADD g int GENERATED ALWAYS AS (id * 2) STORED")
    site.log()
    assert "not published before" in (site.recopy("ALTER TABLE t ALTER g DROP EXPRESSION") or "")


def test_a_dropped_index_that_identified_rows_asks_for_a_new_copy(site: Site) -> None:
    site.run("CREATE UNIQUE INDEX by_id ON t (id); ALTER TABLE t REPLICA IDENTITY USING INDEX by_id")
    site.log()
    assert "the key (id) is now ()" in (site.recopy("DROP INDEX by_id") or "")


def test_a_renamed_enum_value_and_a_new_attribute_ask_for_a_new_copy_and_a_new_value_does_not(site: Site) -> None:
    site.run("CREATE TYPE mood AS ENUM ('calm'); CREATE TYPE pair AS (x int, m mood); ALTER TABLE t ADD m mood[]")
    site.log()
    text = "a type of its columns changed the text of stored values"
    assert site.recopy("ALTER TYPE mood RENAME VALUE 'calm' TO 'quiet'") == text
    assert site.recopy("ALTER TYPE mood ADD VALUE 'loud'") is None
    assert site.recopy("ALTER TABLE t ADD p pair") is None
    assert site.recopy("ALTER TYPE pair ADD ATTRIBUTE y int") == text
    assert site.recopy("ALTER TYPE pair DROP ATTRIBUTE x") == text


def test_a_changed_type_asks_for_a_copy_of_tables_that_hold_it_in_ranges_and_rows_of_other_tables(site: Site) -> None:
    site.run(
        "CREATE TYPE mood AS ENUM ('calm', 'loud'); CREATE TYPE moods AS RANGE (subtype = mood);"
        "CREATE TABLE part (m mood); ALTER TABLE t ADD r moods"
    )
    site.log()
    assert site.recopy("ALTER TYPE mood RENAME VALUE 'calm' TO 'quiet'")
    site.run("ALTER TABLE t DROP r, ADD p part[]")
    site.log()
    assert site.recopy("ALTER TYPE mood RENAME VALUE 'quiet' TO 'still'")
    assert site.recopy("ALTER TABLE part ADD n int")
    assert site.recopy("ALTER TABLE part DROP m")
    assert site.recopy("ALTER TABLE part RENAME n TO number") is None


def test_a_database_in_another_encoding_describes_changes_in_utf8(postgres: EmbeddedPostgres) -> None:
    database = PostgresDatabase(postgres, "latin")
    with postgres.connect() as connection:
        connection.execute("CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0 LOCALE 'C'")
    try:
        with open_site(database) as site:
            site.run("SET client_encoding = 'UTF8'")
            described = site.ddl_event("ALTER TABLE t ADD façade text DEFAULT 'é'")
            assert described.columns is not None
            assert (described.columns[-1].name, described.columns[-1].missing) == ("façade", "é")
    finally:
        database.drop()


def test_partitions_without_rows_come_and_go_without_a_new_copy(site: Site) -> None:
    site.run(
        "CREATE TABLE made PARTITION OF root FOR VALUES FROM (100) TO (200); CREATE TABLE like_it (LIKE root);"
        "ALTER TABLE root ATTACH PARTITION like_it FOR VALUES FROM (200) TO (300);"
        "ALTER TABLE root DETACH PARTITION like_it; DROP TABLE like_it"
    )
    assert not any(isinstance(entry, DdlEvent) and entry.recopy for entry in site.log())
    # A leaf that was made later is guarded like the first one.
    assert site.ddl_event("TRUNCATE made").reason == "a partition was truncated"


def test_leaves_of_a_table_published_later_are_guarded_then(site: Site) -> None:
    site.run(
        "CREATE TABLE late (id int PRIMARY KEY) PARTITION BY RANGE (id);"
        "CREATE TABLE late_leaf PARTITION OF late FOR VALUES FROM (0) TO (10); TRUNCATE late_leaf"
    )
    assert site.log() == []
    site.run("ALTER PUBLICATION pub ADD TABLE late")
    assert site.ddl_event("TRUNCATE late_leaf").oid == catalog(site.connection, "late").oid
    site.run("ALTER PUBLICATION pub DROP TABLE late; TRUNCATE late_leaf")
    assert site.log() == []


def test_a_truncated_root_is_truncated_before_its_leaves_ask_for_a_copy(site: Site) -> None:
    site.run("TRUNCATE root")
    first, *rest = site.log()
    assert first == "T"
    assert all(isinstance(entry, DdlEvent) and entry.recopy for entry in rest)


def test_a_change_of_a_leaf_is_reported_for_its_root(site: Site) -> None:
    described = site.ddl_event("ALTER TABLE leaf SET (fillfactor = 50)")
    assert described.table == TableName("public", "root")


def test_leaves_published_on_their_own_are_each_reported(site: Site) -> None:
    site.run("ALTER PUBLICATION pub SET (publish_via_partition_root = false)")
    described = site.ddl_event("ALTER TABLE root ADD c int")
    assert described.table == TableName("public", "leaf")
    site.run("TRUNCATE leaf")
    assert site.log() == ["T"]


def test_a_dropped_table_and_a_column_dropped_with_its_type_are_reported(site: Site) -> None:
    site.run("CREATE DOMAIN short AS text; ALTER TABLE t ADD c short")
    site.log()
    described = site.ddl_event("DROP DOMAIN short CASCADE")
    assert [column.name for column in described.columns or ()] == ["id", "a", "b"]
    oid = catalog(site.connection, "t").oid
    gone = site.ddl_event("DROP TABLE t")
    assert (gone.oid, gone.table, gone.dropped, gone.columns) == (oid, TableName("public", "t"), True, None)


def test_a_renamed_schema_renames_its_tables(site: Site) -> None:
    assert site.ddl_event("CREATE SCHEMA s; ALTER TABLE t SET SCHEMA s").table == TableName("s", "t")
    assert site.ddl_event("ALTER SCHEMA s RENAME TO r").table == TableName("r", "t")


def test_unpublished_and_temporary_tables_log_nothing(site: Site) -> None:
    site.run(
        "CREATE TABLE private (id int); ALTER TABLE private ADD v text DEFAULT clock_timestamp();"
        "CREATE TEMP TABLE t (id int); ALTER TABLE pg_temp.t ADD v int; DROP TABLE pg_temp.t; DROP TABLE private;"
        "CREATE UNLOGGED TABLE u (id int); ALTER TABLE u ADD v int; CREATE INDEX ON public.t (a);"
        "CREATE VIEW w AS SELECT 1"
    )
    assert site.log() == []


def test_a_publication_that_does_not_show_the_table_has_nothing_of_it(site: Site) -> None:
    site.run("CREATE PUBLICATION narrow FOR TABLE t (id, b) WHERE (id > 3)")
    described = site.ddl_event("ALTER TABLE t RENAME b TO c")
    types = read_types(site.connection, described.type_oids)
    assert to_published(described, "nothing", types) is None
    narrow = to_published(described, "narrow", types)
    assert narrow == catalog(site.connection, "t", "narrow")
    assert narrow is not None
    assert [column.name for column in narrow.schema.columns] == ["id", "c"]
    assert narrow.row_filter == "(id > 3)"


def test_a_type_that_was_dropped_since_is_kept_as_text(site: Site) -> None:
    described = site.ddl_event("CREATE DOMAIN small AS int; ALTER TABLE t ADD c small DEFAULT 4")
    column = to_published(described, "pub", {}).schema.column("c")  # type: ignore[union-attr]
    assert (column.type, column.upstream_type, column.initial) == (pa.string(), "public.small", pa.scalar("4"))


def test_a_trigger_that_cannot_do_its_work_warns_and_lets_the_command_pass(site: Site) -> None:
    site.run("DROP FUNCTION tailrace.describe; ALTER TABLE t ADD c int")
    assert [column.name for column in catalog(site.connection, "t").schema.columns][-1] == "c"
    assert any("tailrace could not report ALTER TABLE" in warning for warning in site.warnings)
    site.warnings.clear()


def test_a_user_without_rights_on_the_trigger_can_alter_his_tables(site: Site) -> None:
    site.run("DROP ROLE IF EXISTS owner_of_t; CREATE ROLE owner_of_t LOGIN; ALTER TABLE t OWNER TO owner_of_t")
    site.log()
    with session(site.database.server.dsn(site.database.name, user="owner_of_t"), "altering") as connection:
        connection.execute("ALTER TABLE public.t ADD c int DEFAULT 1")
    [described] = site.log()
    assert isinstance(described, DdlEvent)
    site.run("ALTER TABLE t OWNER TO postgres; DROP ROLE owner_of_t")


def test_installing_can_be_repeated_detected_and_undone(database: PostgresDatabase) -> None:
    with session(database.dsn, "testing") as connection:
        assert event_trigger.installed_version(connection) is None
        connection.execute(event_trigger.install_sql().encode())
        event_trigger.install(connection)
        assert event_trigger.installed_version(connection) == event_trigger.VERSION
        connection.execute("COMMENT ON FUNCTION tailrace.report_ddl() IS 'tailrace 0'")
        assert event_trigger.installed_version(connection) == 0
        event_trigger.install(connection)
        connection.execute("ALTER EVENT TRIGGER tailrace_drop DISABLE")
        assert event_trigger.installed_version(connection) is None
        for _ in range(2):
            connection.execute(event_trigger.uninstall_sql().encode())
            assert event_trigger.installed_version(connection) is None
        assert connection.execute("SELECT count(*) FROM pg_event_trigger").fetchone() == (0,)
        assert connection.execute("SELECT count(*) FROM pg_namespace WHERE nspname = 'tailrace'").fetchone() == (0,)


def test_uninstalling_takes_the_guards_of_the_leaves_with_it(site: Site) -> None:
    guards = "SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'tailrace%'"
    assert site.database.rows(guards) == [(1,)]
    site.run(event_trigger.uninstall_sql())
    assert site.database.rows(guards) == [(0,)]
    site.run("TRUNCATE leaf; ALTER TABLE t ADD c int")
    assert site.log() == []


def test_a_role_without_rights_is_refused_with_the_role_that_can_install(database: PostgresDatabase) -> None:
    database.run("DROP ROLE IF EXISTS modest", "CREATE ROLE modest LOGIN")
    with session(database.server.dsn(database.name, user="modest"), "testing") as connection:
        with pytest.raises(PreflightError) as caught:
            event_trigger.install(connection)
        assert "modest" in caught.value.message
        assert "superuser" in (caught.value.fix or "")
    database.run("DROP ROLE modest")


def test_a_busy_partition_is_waited_for_and_then_named(database: PostgresDatabase) -> None:
    database.run(*TABLES.strip().split("\n"))
    with database.connect(autocommit=False) as writer, session(database.dsn, "testing") as connection:
        writer.execute("INSERT INTO leaf VALUES (7, 'busy')")
        with pytest.raises(UnavailableError):
            event_trigger.install(connection)
        assert event_trigger.installed_version(connection) is None


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"v": 2}', b'{"v": 2, "oid": 5, "tag": "x", "name": "t"}', b"\xff", b'{"v":2,"oid":{}}'],
)
def test_a_damaged_message_is_refused_without_quoting_it(content: bytes) -> None:
    with pytest.raises(MalformedError, match=f"{len(content)} bytes"):
        ddl_message.parse(content)


def test_a_message_of_another_format_is_ignored() -> None:
    assert ddl_message.parse(json.dumps({"v": 1, "whatever": 1}).encode()) is None


def test_taking_a_table_out_and_putting_it_back_gives_another_membership(site: Site) -> None:
    before = catalog(site.connection, "t").membership
    assert before > 0
    site.run("ALTER PUBLICATION pub DROP TABLE t; ALTER PUBLICATION pub ADD TABLE t")
    after = catalog(site.connection, "t").membership
    assert after not in (0, before)
    assert site.published(site.ddl_event("ALTER TABLE t ADD c int")).membership == after
    site.run("ALTER PUBLICATION pub SET TABLE t (id, a)")
    assert catalog(site.connection, "t").membership not in (0, after)
    site.run("CREATE PUBLICATION everything FOR ALL TABLES")
    all_tables = catalog(site.connection, "t", "everything").membership
    site.run("DROP PUBLICATION everything; CREATE PUBLICATION everything FOR ALL TABLES")
    assert catalog(site.connection, "t", "everything").membership not in (0, all_tables)


@pytest.mark.parametrize("part", ["TABLE part (n int, m mood)", "TYPE part AS (n int, m mood)"], ids=["table", "type"])
def test_a_type_that_takes_a_field_of_stored_rows_with_it_asks_for_a_copy(site: Site, part: str) -> None:
    site.run(f"CREATE TYPE mood AS ENUM ('calm'); CREATE {part}; ALTER TABLE t ADD p part")
    site.log()
    assert site.recopy("DROP TYPE mood CASCADE")


def test_a_column_that_comes_from_a_parent_to_stored_rows_asks_for_a_copy(site: Site) -> None:
    site.run("CREATE TABLE part (n int); CREATE TABLE child () INHERITS (part); ALTER TABLE t ADD p child")
    site.log()
    assert site.recopy("ALTER TABLE part ADD m int")


# -- no one gains rights by it, or hides a change from it ---------------------------------------------------


@pytest.fixture
def intruder(site: Site) -> Iterator[PgConnection]:
    """A role that may log in and create tables of its own, nothing else."""
    name = f"intruder_{site.database.name}"
    site.run(f"CREATE ROLE {name} LOGIN; GRANT CREATE ON SCHEMA public TO {name}; ALTER TABLE t OWNER TO {name}")
    site.log()
    with session(site.database.server.dsn(site.database.name, user=name), "attacking") as connection:
        connection.execute("SET search_path = public")
        yield connection
    site.run(f"ALTER TABLE IF EXISTS t OWNER TO postgres; DROP OWNED BY {name}; DROP ROLE {name}")


@pytest.mark.parametrize("relation", ["pg_publication", "pg_class", "pg_inherits", "pg_trigger", "pg_index"])
def test_a_temporary_view_with_the_name_of_a_catalog_gains_no_rights(
    site: Site, intruder: PgConnection, relation: str
) -> None:
    intruder.execute(
        "CREATE FUNCTION pg_temp.attack() RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN"
        " EXECUTE format('ALTER ROLE %I SUPERUSER', session_user); RETURN true; END $$"
    )
    intruder.execute(
        f"CREATE TEMP VIEW {relation} AS SELECT * FROM pg_catalog.{relation} WHERE pg_temp.attack()".encode()
    )
    intruder.execute("CREATE TABLE public.own (id int PRIMARY KEY)")
    intruder.execute("ALTER TABLE public.t ADD c int")
    intruder.execute("DROP TABLE public.own")
    assert site.database.rows("SELECT rolname FROM pg_roles WHERE rolsuper AND rolname LIKE 'intruder%'") == []
    assert any(isinstance(entry, DdlEvent) and entry.columns for entry in site.log())


def test_a_setting_of_the_session_hides_no_change(site: Site, intruder: PgConnection) -> None:
    before = catalog(site.connection, "t").schema
    intruder.execute("SET tailrace.quiet = 'on'")
    intruder.execute(
        "CREATE FUNCTION public.hide(int) RETURNS int LANGUAGE plpgsql AS $$ BEGIN"
        " PERFORM set_config('tailrace.quiet', 'on', true), set_config('tailrace.rewritten', '', true);"
        " RETURN $1 + 1; END $$"
    )
    intruder.execute("ALTER TABLE public.t ALTER a TYPE int USING public.hide(a)")
    [described] = site.log()
    assert isinstance(described, DdlEvent)
    assert compare(before, site.published(described).schema).recopy


@pytest.mark.parametrize("number", ["99999999999", None], ids=["that is no number of a table", "of a table"])
def test_a_trigger_with_the_name_of_a_guard_hides_no_change_and_asks_for_no_copy(
    site: Site, intruder: PgConnection, number: str | None
) -> None:
    before = catalog(site.connection, "t").schema
    name = f"tailrace_guard_{number or before.upstream_id}"
    intruder.execute(b"CREATE TYPE public.mark AS (x int)")
    intruder.execute(b"CREATE FUNCTION public.f(public.mark) RETURNS int LANGUAGE sql IMMUTABLE RETURN 1")
    intruder.execute(b"ALTER TABLE public.t ADD c public.mark")
    intruder.execute(b"CREATE FUNCTION public.g() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'")
    intruder.execute(
        f"CREATE TRIGGER {name} BEFORE UPDATE ON public.t FOR EACH ROW WHEN (public.f(NEW.c) = 1)"
        " EXECUTE FUNCTION public.g()".encode()
    )
    site.log()
    intruder.execute(b"DROP TYPE public.mark CASCADE")
    events = [entry for entry in site.log() if isinstance(entry, DdlEvent)]
    assert [[column.name for column in event.columns or ()] for event in events] == [["id", "a", "b"]]
    assert not any(event.recopy for event in events)


def test_only_messages_of_the_trigger_are_genuine(site: Site, intruder: PgConnection) -> None:
    described = site.ddl_event("ALTER TABLE t ADD c int")
    assert event_trigger.is_genuine(intruder, described.token)
    assert not event_trigger.is_genuine(intruder, "")
    assert not event_trigger.is_genuine(intruder, described.token.upper())
    for statement in (
        "SELECT token FROM tailrace.secret",
        "SELECT tailrace.emit('{}')",
        "REFRESH MATERIALIZED VIEW tailrace.secret",
        "CREATE TRIGGER g AFTER TRUNCATE ON t EXECUTE FUNCTION tailrace.report_truncate('1')",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            intruder.execute(statement)
    # Installing again keeps the token: messages in the log stay genuine.
    event_trigger.install(site.connection)
    assert event_trigger.is_genuine(intruder, described.token)


def test_every_function_has_a_safe_search_path(site: Site) -> None:
    unsafe = site.database.rows(
        "SELECT proname FROM pg_proc WHERE pronamespace = 'tailrace'::regnamespace"
        " AND NOT coalesce('search_path=pg_catalog, pg_temp' = ANY(proconfig), false)"
    )
    assert unsafe == []


def test_a_schema_that_belongs_to_another_role_is_not_used(database: PostgresDatabase) -> None:
    name = f"squatter_{database.name}"
    database.run(f"CREATE ROLE {name}", f"CREATE SCHEMA tailrace AUTHORIZATION {name}")
    with session(database.dsn, "testing") as connection:
        with pytest.raises(PreflightError, match="belongs to another role"):
            event_trigger.install(connection)
        assert event_trigger.installed_version(connection) is None
    database.run(f"DROP OWNED BY {name} CASCADE", f"DROP ROLE {name}")
