"""The event trigger that writes what DDL did to published tables into the log, in order with the rows.

It is optional. With it, a schema change is known exactly and where it was made; without it, it is derived from the
Relation message before the next row. Its functions live in the schema `tailrace` and never make a command fail: what
goes wrong inside them becomes a warning. `ddl_message` reads what they write.
"""

from __future__ import annotations

from typing import Any, Final

import psycopg

from tailrace.errors import PreflightError, UnavailableError
from tailrace.source.postgres.catalog import COLUMN_FIELDS, COLUMN_TABLES, KEY_NUMBERS
from tailrace.source.postgres.framing import DDL_PREFIX
from tailrace.source.postgres.mapping import SESSION

Session = psycopg.Connection[tuple[Any, ...]]

VERSION: Final = 2
"""Of the functions. A database with another one gets these by `install`."""

LOCK_SECONDS: Final = 2
"""How long to wait for a partition that somebody is writing to, before it goes without its guard."""

_MARK: Final = f"tailrace {VERSION}"
_TRIGGERS: Final = {
    "tailrace_ddl": ("ddl_command_end", "report_ddl"),
    "tailrace_drop": ("sql_drop", "report_drop"),
    "tailrace_rewrite": ("table_rewrite", "note_rewrite"),
}
_TAGS: Final = (
    *("ALTER TABLE", "CREATE TABLE", "CREATE TABLE AS", "SELECT INTO", "ALTER TYPE", "ALTER SCHEMA"),
    *("CREATE PUBLICATION", "ALTER PUBLICATION"),
)

# The server puts a message of a subtransaction in order by where it ends in the log, which is where the next row
# begins, and so may send that row first. Something behind the message sets it apart.
_EMIT = f"""
CREATE OR REPLACE FUNCTION tailrace.emit(payload jsonb) RETURNS void LANGUAGE plpgsql
SET search_path = pg_catalog AS $tailrace$
BEGIN
    -- As bytes: text would be in the database's own encoding, whatever the client's.
    PERFORM pg_logical_emit_message(true, '{DDL_PREFIX}', convert_to(payload::text, 'UTF8'));
    PERFORM pg_logical_emit_message(true, 'tailrace', 'ddl');
END $tailrace$;
"""

# Everything that is said of one table; null when no publication shows it.
_DESCRIBE = f"""
CREATE OR REPLACE FUNCTION tailrace.describe(target oid) RETURNS jsonb LANGUAGE plpgsql
{" ".join(f"SET {name} = {value}" for name, value in SESSION.items() if name != "client_encoding")} AS $tailrace$
DECLARE
    views jsonb;
BEGIN
    IF current_setting('server_version_num')::int >= 150000 THEN
        SELECT jsonb_object_agg(p.pubname, jsonb_build_array(
            string_to_array(r.prattrs::text, ' ')::int[], pg_get_expr(g.qual, g.relid), coalesce(r.oid, 0)::int8,
            coalesce(to_jsonb(p) ->> 'pubgencols' = 's', false)))
        INTO views
        FROM pg_publication p CROSS JOIN LATERAL pg_get_publication_tables(p.pubname) g
        LEFT JOIN pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = g.relid WHERE g.relid = target;
    ELSE
        SELECT jsonb_object_agg(p.pubname, jsonb_build_array(NULL, NULL, coalesce(r.oid, 0)::int8, false)) INTO views
        FROM pg_publication p CROSS JOIN LATERAL pg_get_publication_tables(p.pubname) g
        LEFT JOIN pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = g.relid WHERE g.relid = target;
    END IF;
    RETURN (
        SELECT jsonb_build_object(
            'v', 1, 'oid', rel.oid::int8, 'schema', n.nspname, 'name', rel.relname, 'identity', rel.relreplident,
            'partitioned', rel.relkind = 'p', 'is_partition', rel.relispartition, 'publications', views,
            'columns', (
                SELECT coalesce(jsonb_agg(jsonb_build_array({COLUMN_FIELDS}) ORDER BY a.attnum), '[]')
                FROM {COLUMN_TABLES} WHERE a.attrelid = target AND a.attnum > 0 AND NOT a.attisdropped),
            'primary', (
                SELECT {KEY_NUMBERS} FROM pg_index i
                WHERE i.indrelid = target AND i.indisprimary AND i.indisvalid AND i.indimmediate),
            'index', (
                SELECT {KEY_NUMBERS} FROM pg_index i
                WHERE i.indrelid = target AND i.indisreplident AND i.indisvalid))
        FROM pg_class rel JOIN pg_namespace n ON n.oid = rel.relnamespace
        WHERE rel.oid = target AND views IS NOT NULL);
END $tailrace$;
"""  # noqa: S608

# A table with all that hangs above and below it: a command may recurse, and a partition is published as its root.
_FAMILY = """
CREATE OR REPLACE FUNCTION tailrace.family(target oid) RETURNS SETOF oid LANGUAGE sql
SET search_path = pg_catalog AS $tailrace$
    WITH RECURSIVE above AS (
        SELECT target AS relid UNION SELECT i.inhparent FROM above JOIN pg_inherits i ON i.inhrelid = above.relid
    ), below AS (
        SELECT target AS relid UNION SELECT i.inhrelid FROM below JOIN pg_inherits i ON i.inhparent = below.relid
    )
    SELECT relid FROM above UNION SELECT relid FROM below
$tailrace$;
"""

# The tables with a column whose values hold, at whatever depth, values of a type.
_USERS = """
CREATE OR REPLACE FUNCTION tailrace.users(target oid) RETURNS SETOF oid LANGUAGE sql
SET search_path = pg_catalog AS $tailrace$
    WITH RECURSIVE used AS (
        SELECT target AS type
      UNION
        SELECT next.type FROM used CROSS JOIN LATERAL (
            SELECT t.oid FROM pg_type t WHERE used.type IN (t.typelem, t.typbasetype)
          UNION ALL
            SELECT unnest(ARRAY[r.rngtypid, r.rngmultitypid]) FROM pg_range r WHERE r.rngsubtype = used.type
          UNION ALL
            SELECT c.reltype FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
            WHERE a.atttypid = used.type AND NOT a.attisdropped AND c.reltype <> 0) AS next (type)
    )
    SELECT DISTINCT c.oid FROM used JOIN pg_attribute a ON a.atttypid = used.type AND NOT a.attisdropped
    JOIN pg_class c ON c.oid = a.attrelid WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p'
$tailrace$;
"""

# TRUNCATE of a leaf is not published under its root, and neither is its end. Each leaf of a table that is published
# by its root carries a guard: a trigger whose name tells the root, so that a dropped leaf still says where it was.
_GUARD = f"""
CREATE OR REPLACE FUNCTION tailrace.report_truncate() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog AS $tailrace$
BEGIN
    PERFORM tailrace.emit(jsonb_build_object('v', 1, 'oid', TG_ARGV[0]::int8, 'tag', 'TRUNCATE TABLE',
        'recopy', true, 'reason', 'a partition was truncated'));
    RETURN NULL;
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'tailrace could not report a truncated partition: %', SQLERRM;
    RETURN NULL;
END $tailrace$;

CREATE OR REPLACE FUNCTION tailrace.guard() RETURNS TABLE (root oid, leaf oid, joined boolean) LANGUAGE plpgsql
SET search_path = pg_catalog SET lock_timeout = '{LOCK_SECONDS}s' AS $tailrace$
#variable_conflict use_column
BEGIN
    PERFORM set_config('tailrace.quiet', 'on', true);
    FOR root, leaf, joined IN
        WITH wanted AS (
            SELECT DISTINCT g.relid, t.relid::oid AS part, true AS there
            FROM pg_publication p CROSS JOIN LATERAL pg_get_publication_tables(p.pubname) g
            JOIN pg_class top ON top.oid = g.relid AND top.relkind = 'p'
            CROSS JOIN LATERAL pg_partition_tree(g.relid) t JOIN pg_class c ON c.oid = t.relid
            WHERE p.pubviaroot AND t.isleaf AND c.relkind = 'r'
        ), held AS (
            SELECT substr(tg.tgname, 16)::oid AS relid, tg.tgrelid AS part, true AS there FROM pg_trigger tg
            WHERE tg.tgfoid = 'tailrace.report_truncate()'::regprocedure AND NOT tg.tgisinternal
        )
        SELECT relid, part, h.there IS NULL FROM wanted w FULL JOIN held h USING (relid, part)
        WHERE w.there IS NULL OR h.there IS NULL
    LOOP
        IF joined THEN
            EXECUTE format('CREATE TRIGGER tailrace_guard_%s AFTER TRUNCATE ON %s FOR EACH STATEMENT'
                ' EXECUTE FUNCTION tailrace.report_truncate(%L)', root, leaf::regclass, root);
            EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER tailrace_guard_%s', leaf::regclass, root);
        ELSE
            EXECUTE format('DROP TRIGGER tailrace_guard_%s ON %s', root, leaf::regclass);
        END IF;
        RETURN NEXT;
    END LOOP;
    PERFORM set_config('tailrace.quiet', '', true);
END $tailrace$;
"""  # noqa: S608

_NOTE_REWRITE = """
CREATE OR REPLACE FUNCTION tailrace.note_rewrite() RETURNS event_trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog AS $tailrace$
BEGIN
    -- Comes before the command's end, which takes it from here; gone with the transaction.
    PERFORM set_config('tailrace.rewritten', format('%s %s:%s', current_setting('tailrace.rewritten', true),
        pg_event_trigger_table_rewrite_oid(), pg_event_trigger_table_rewrite_reason()), true);
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'tailrace could not note a rewritten table: %', SQLERRM;
END $tailrace$;
"""

# The reasons of a rewrite are bits: 1 the table was unlogged before, 2 a new column was filled row by row, 4 a column's
# type changed, 8 the access method did.
_REPORT_DDL = """
CREATE OR REPLACE FUNCTION tailrace.report_ddl() RETURNS event_trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog AS $tailrace$
DECLARE
    query text := current_query();
    noted text := current_setting('tailrace.rewritten', true);
    targets oid[];
    target oid;
    parts record;
    rewrite int;
    reason text;
    moved jsonb := '{}';
    filled boolean;
    described jsonb;
BEGIN
    IF current_setting('tailrace.quiet', true) = 'on' THEN
        RETURN;
    END IF;
    IF noted <> '' THEN
        PERFORM set_config('tailrace.rewritten', '', true);
    END IF;
    IF tg_tag = 'ALTER SCHEMA' THEN
        targets := ARRAY(SELECT c.oid FROM pg_event_trigger_ddl_commands() d
            JOIN pg_class c ON c.relnamespace = d.objid AND c.relkind IN ('r', 'p') AND c.relpersistence = 'p'
            WHERE d.classid = 'pg_namespace'::regclass);
    ELSIF tg_tag = 'ALTER TYPE' THEN
        -- Only what changes the text of stored values.
        IF query ~* '\\m(add|drop|rename|alter)\\s+attribute\\M|\\mrename\\s+value\\M'
            OR query !~* '\\malter\\s+type\\M'
        THEN
            targets := ARRAY(SELECT DISTINCT u.relid FROM pg_event_trigger_ddl_commands() d
                LEFT JOIN pg_class c ON d.classid = 'pg_class'::regclass AND c.oid = d.objid
                CROSS JOIN tailrace.users(coalesce(c.reltype, d.objid)) AS u(relid));
            reason := 'a type of its columns changed the text of stored values';
        END IF;
    ELSIF tg_tag LIKE '% PUBLICATION' THEN
        PERFORM tailrace.guard();
    ELSE
        targets := ARRAY(SELECT DISTINCT c.oid FROM pg_event_trigger_ddl_commands() d JOIN pg_class c ON c.oid = d.objid
            WHERE d.classid = 'pg_class'::regclass AND c.relkind IN ('r', 'p') AND c.relpersistence = 'p');
        -- Rows of a table that are values in another are printed with a field for each of its columns.
        IF tg_tag = 'ALTER TABLE' AND (query ~* '\\m(add|drop)\\M' OR query !~* '\\malter\\s+table\\M') THEN
            SELECT coalesce(jsonb_object_agg(u.relid, 'a type of its columns changed the text of stored values'), '{}')
            INTO moved FROM unnest(targets) AS t(oid) CROSS JOIN tailrace.family(t.oid) AS f(relid)
            JOIN pg_class c ON c.oid = f.relid CROSS JOIN tailrace.users(c.reltype) AS u(relid);
            targets := targets || ARRAY(SELECT jsonb_object_keys(moved)::oid);
        END IF;
    END IF;
    IF coalesce(cardinality(targets), 0) = 0 OR NOT EXISTS (SELECT FROM pg_publication) THEN
        RETURN;
    END IF;
    IF EXISTS (SELECT FROM pg_class c WHERE c.oid = ANY(targets) AND (c.relkind = 'p' OR c.relispartition)) THEN
        BEGIN
            FOR parts IN SELECT * FROM tailrace.guard() LOOP
                -- Only a fresh snapshot sees every row.
                filled := current_setting('transaction_isolation') <> 'read committed';
                IF NOT filled THEN
                    EXECUTE format('SELECT EXISTS (SELECT FROM ONLY %s)', parts.leaf::regclass) INTO filled;
                END IF;
                IF filled AND tg_tag = 'ALTER TABLE' THEN
                    moved := moved || jsonb_build_object(parts.root, CASE WHEN parts.joined
                        THEN 'a partition with rows was attached' ELSE 'a partition with rows was detached' END);
                    targets := targets || parts.root;
                END IF;
            END LOOP;
        EXCEPTION WHEN OTHERS THEN
            RAISE WARNING 'tailrace could not guard the partitions: %', SQLERRM;
        END;
    END IF;
    IF tg_tag NOT LIKE 'CREATE%' THEN
        targets := ARRAY(SELECT f.relid FROM unnest(targets) AS t(oid) CROSS JOIN tailrace.family(t.oid) AS f(relid));
    END IF;
    FOR target IN SELECT DISTINCT t.oid FROM unnest(targets) AS t(oid) ORDER BY 1 LOOP
        described := tailrace.describe(target);
        CONTINUE WHEN described IS NULL;
        SELECT coalesce(bit_or(split_part(note, ':', 2)::int), 0) INTO rewrite
        FROM unnest(string_to_array(trim(noted), ' ')) AS note
        WHERE split_part(note, ':', 1)::oid IN (SELECT tailrace.family(target));
        PERFORM tailrace.emit(described || jsonb_build_object(
            'tag', tg_tag, 'rewritten', rewrite & 4 <> 0, 'reason', why, 'recopy', why IS NOT NULL))
        FROM (SELECT coalesce(reason, moved ->> target::text, CASE
            WHEN rewrite & 2 <> 0 THEN 'a new column was filled with a value for each row'
            WHEN rewrite & 1 <> 0 THEN 'the table was not logged before'
            -- Where the command itself cannot be seen, as inside a function, it may have had a USING.
            WHEN rewrite & 4 <> 0 AND (query ~* '\\musing\\M' OR query !~* '\\malter\\s+table\\M')
                THEN 'a column was computed anew with USING' END)) AS chosen (why);
    END LOOP;
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'tailrace could not report %: %', tg_tag, SQLERRM;
END $tailrace$;
"""

_REPORT_DROP = """
CREATE OR REPLACE FUNCTION tailrace.report_drop() RETURNS event_trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog AS $tailrace$
DECLARE
    root oid;
    wide boolean := EXISTS (SELECT FROM pg_publication p WHERE p.puballtables);
    schemas text[] := '{}';
BEGIN
    -- What ALTER TABLE drops is reported when it ends.
    IF current_setting('tailrace.quiet', true) = 'on' OR tg_tag = 'ALTER TABLE' THEN
        RETURN;
    END IF;
    IF current_setting('server_version_num')::int >= 150000 THEN
        schemas := ARRAY(SELECT n.nspname FROM pg_publication_namespace s JOIN pg_namespace n ON n.oid = s.pnnspid);
    END IF;
    PERFORM tailrace.emit(jsonb_build_object('v', 1, 'oid', d.objid::int8,
        'schema', d.schema_name, 'name', d.object_name, 'tag', tg_tag, 'dropped', true))
    FROM pg_event_trigger_dropped_objects() d
    WHERE d.object_type = 'table' AND d.objsubid = 0 AND NOT d.is_temporary AND (
        wide OR d.schema_name = ANY(schemas) OR EXISTS (
            SELECT FROM pg_event_trigger_dropped_objects() m
            WHERE m.object_type = 'publication relation' AND m.address_names = ARRAY[d.schema_name, d.object_name]
                OR m.object_type = 'publication namespace' AND m.address_names[1] = d.schema_name));
    PERFORM tailrace.emit(described.payload || jsonb_build_object(
        'tag', tg_tag, 'rewritten', false, 'reason', altered.why, 'recopy', altered.why IS NOT NULL))
    FROM (
        SELECT f.relid, max(lost.why) AS why FROM pg_event_trigger_dropped_objects() d
        CROSS JOIN LATERAL (
            SELECT d.objid, NULL WHERE d.object_type = 'table column'
          UNION ALL
            SELECT u.relid, 'a type of its columns changed the text of stored values'
            FROM pg_class c CROSS JOIN tailrace.users(c.reltype) AS u(relid) WHERE c.oid = d.objid
        ) AS lost (relid, why)
        CROSS JOIN tailrace.family(lost.relid) AS f(relid)
        WHERE d.object_type IN ('table column', 'composite type column') AND NOT d.is_temporary
        GROUP BY f.relid
    ) AS altered CROSS JOIN LATERAL tailrace.describe(altered.relid) AS described (payload)
    WHERE described.payload IS NOT NULL;
    FOR root IN SELECT DISTINCT substr(d.address_names[3], 16)::oid FROM pg_event_trigger_dropped_objects() d
        WHERE d.object_type = 'trigger' AND d.address_names[3] ~ '^tailrace_guard_[0-9]+$'
    LOOP
        PERFORM tailrace.emit(jsonb_build_object('v', 1, 'oid', root::int8,
            'tag', tg_tag, 'recopy', true, 'reason', 'a partition was dropped'))
        WHERE EXISTS (SELECT FROM pg_class c WHERE c.oid = root);
    END LOOP;
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'tailrace could not report %: %', tg_tag, SQLERRM;
END $tailrace$;
"""


def _create_trigger(name: str, event: str, function: str) -> str:
    tags = ", ".join(f"'{tag}'" for tag in _TAGS)
    when = f" WHEN TAG IN ({tags})" if event == "ddl_command_end" else ""
    return (
        f"CREATE EVENT TRIGGER {name} ON {event}{when} EXECUTE FUNCTION tailrace.{function}();\n"
        f"ALTER EVENT TRIGGER {name} ENABLE ALWAYS;\n"
    )


_DROP_TRIGGERS = "".join(f"DROP EVENT TRIGGER IF EXISTS {name};\n" for name in _TRIGGERS)
_FUNCTIONS: Final = (
    "report_ddl",
    "report_drop",
    "note_rewrite",
    "report_truncate",
    "guard",
    "family",
    "users",
    "describe",
    "emit",
)


def _install_body() -> str:
    return "".join(
        [
            _DROP_TRIGGERS,
            "CREATE SCHEMA IF NOT EXISTS tailrace;\n",
            *(_EMIT, _DESCRIBE, _FAMILY, _USERS, _GUARD, _NOTE_REWRITE, _REPORT_DDL, _REPORT_DROP),
            "REVOKE ALL ON ALL FUNCTIONS IN SCHEMA tailrace FROM PUBLIC;\n",
            f"COMMENT ON FUNCTION tailrace.report_ddl() IS '{_MARK}';\n",
            "DO 'BEGIN PERFORM tailrace.guard(); END';\n",
            *(_create_trigger(name, event, function) for name, (event, function) in _TRIGGERS.items()),
        ]
    )


def install_sql() -> str:
    """The script that installs the trigger, for a superuser to run with psql. Running it again changes nothing."""
    return f"BEGIN;\n{_install_body()}COMMIT;\n"


def uninstall_sql() -> str:
    """The script that takes everything away again that `install_sql` made. It may be run where nothing is installed."""
    dropped = "".join(f"DROP ROUTINE IF EXISTS tailrace.{name} CASCADE;\n" for name in _FUNCTIONS)
    return f"""BEGIN;
{_DROP_TRIGGERS}DO $tailrace$ BEGIN
{dropped}DROP SCHEMA IF EXISTS tailrace;
EXCEPTION WHEN invalid_schema_name OR dependent_objects_still_exist THEN NULL;
END $tailrace$;
COMMIT;
"""


def install(connection: Session) -> None:
    """Install the trigger in the connection's database, or bring an older one up to date; all of it or nothing.

    Each leaf of a partitioned table that is published by its root gets a trigger of its own, which waits for whoever
    writes to that leaf. Raises PreflightError when the role may not do this, UnavailableError when a leaf stays busy.
    """
    try:
        with connection.transaction():
            connection.execute(_install_body().encode())
    except psycopg.errors.InsufficientPrivilege as error:
        raise PreflightError(
            f"the role {connection.info.user!r} may not install the event trigger: {error.diag.message_primary}",
            fix="let a superuser install it; without it, schema changes are found at the next row of a table",
        ) from error
    except psycopg.errors.LockNotAvailable as error:
        raise UnavailableError(
            f"a partition was busy for {LOCK_SECONDS} s while the event trigger was being installed",
            fix="try again when no long transaction writes to the published partitioned tables",
        ) from error


def installed_version(connection: Session) -> int | None:
    """The version of the trigger in this database; None when it, or a part of it, is absent or disabled."""
    row = connection.execute(
        """
        SELECT obj_description(p.oid, 'pg_proc'),
               (SELECT count(*) FROM pg_event_trigger e WHERE e.evtname = ANY(%s) AND e.evtenabled IN ('O', 'A'))
        FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
        WHERE n.nspname = 'tailrace' AND p.proname = 'report_ddl'
        """,
        [list(_TRIGGERS)],
    ).fetchone()
    if row is None or row[1] < len(_TRIGGERS):
        return None
    name, _, version = (row[0] or "").partition(" ")
    return int(version) if name == "tailrace" and version.isdigit() else 0
