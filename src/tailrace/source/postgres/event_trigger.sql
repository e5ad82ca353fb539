-- The functions of the event trigger, in the schema `tailrace`. event_trigger.py replaces names in braces after an at
-- sign by values. None of them ever makes a command fail: an error inside becomes a warning.
--
-- They run with the rights of the role that installed them, inside commands of any role. So each sets a search path in
-- which a temporary table comes last, and takes nothing from the session, which its user can set as he likes.

-- Proves that a message, or a command, is of these functions. A materialized view is private like a table, but belongs
-- to no publication.
CREATE MATERIALIZED VIEW IF NOT EXISTS tailrace.secret AS SELECT pg_catalog.gen_random_uuid()::pg_catalog.text AS token;
REVOKE ALL ON tailrace.secret FROM PUBLIC;

CREATE OR REPLACE FUNCTION tailrace.is_genuine(claimed text) RETURNS boolean LANGUAGE sql STABLE SECURITY DEFINER
@{SEARCH_PATH} AS $tailrace$
    SELECT EXISTS (SELECT FROM tailrace.secret
        WHERE sha256(convert_to(token, 'UTF8')) = sha256(convert_to(claimed, 'UTF8')))
$tailrace$;

-- The server puts a message of a subtransaction in order by where it ends in the log, which is where the next row
-- begins, and so may send that row first. Something after the message sets it apart.
CREATE OR REPLACE FUNCTION tailrace.emit(payload jsonb) RETURNS void LANGUAGE plpgsql
@{SEARCH_PATH} AS $tailrace$
BEGIN
    -- As bytes: text would be in the database's own encoding, whatever the client's.
    PERFORM pg_logical_emit_message(true, '@{DDL_PREFIX}', convert_to(
        (payload || jsonb_build_object('v', @{FORMAT}, 'token', (SELECT token FROM tailrace.secret)))::text, 'UTF8'));
    PERFORM pg_logical_emit_message(true, 'tailrace', 'ddl');
END $tailrace$;

-- The full description of one table; null when it is in no publication.
CREATE OR REPLACE FUNCTION tailrace.describe(target oid) RETURNS jsonb LANGUAGE plpgsql
@{SETTINGS} AS $tailrace$
DECLARE
    views jsonb;
    is_root boolean := EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.oid = target AND c.relkind = 'p');
BEGIN
    IF current_setting('server_version_num')::int >= 150000 THEN
        SELECT jsonb_object_agg(p.pubname, jsonb_build_array(
            string_to_array(r.prattrs::text, ' ')::int[], pg_get_expr(g.qual, g.relid), coalesce(r.oid, 0)::int8,
            coalesce(to_jsonb(p) ->> 'pubgencols' = 's', false), p.xmin::text::int8, r.oid IS NOT NULL OR is_root))
        INTO views
        FROM pg_catalog.pg_publication p CROSS JOIN LATERAL pg_get_publication_tables(p.pubname) g
        LEFT JOIN pg_catalog.pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = g.relid WHERE g.relid = target;
    ELSE
        SELECT jsonb_object_agg(p.pubname, jsonb_build_array(
            NULL, NULL, coalesce(r.oid, 0)::int8, false, p.xmin::text::int8, r.oid IS NOT NULL OR is_root))
        INTO views
        FROM pg_catalog.pg_publication p CROSS JOIN LATERAL pg_get_publication_tables(p.pubname) g
        LEFT JOIN pg_catalog.pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = g.relid WHERE g.relid = target;
    END IF;
    RETURN (
        SELECT jsonb_build_object(
            'oid', rel.oid::int8, 'schema', n.nspname, 'name', rel.relname, 'identity', rel.relreplident,
            'partitioned', rel.relkind = 'p', 'is_partition', rel.relispartition, 'publications', views,
            'file', storage.file, 'width', storage.width, 'types', storage.types, 'key', storage.key,
            'columns', (
                SELECT coalesce(jsonb_agg(jsonb_build_array(@{COLUMN_FIELDS}) ORDER BY a.attnum), '[]')
                FROM @{COLUMN_TABLES} WHERE a.attrelid = target AND a.attnum > 0 AND NOT a.attisdropped),
            'primary', (
                SELECT @{KEY_NUMBERS} FROM pg_catalog.pg_index i
                WHERE i.indrelid = target AND i.indisprimary AND i.indisvalid AND i.indimmediate),
            'index', (
                SELECT @{KEY_NUMBERS} FROM pg_catalog.pg_index i
                WHERE i.indrelid = target AND i.indisreplident AND i.indisvalid))
        FROM pg_catalog.pg_class rel JOIN pg_catalog.pg_namespace n ON n.oid = rel.relnamespace CROSS JOIN LATERAL (
            @{STORAGE} WHERE root.oid = rel.oid
        ) AS storage
        WHERE rel.oid = target AND views IS NOT NULL);
END $tailrace$;

-- A table with all its ancestors and descendants: a command may recurse, and a partition is published as its root.
CREATE OR REPLACE FUNCTION tailrace.family(target oid) RETURNS SETOF oid LANGUAGE sql
@{SEARCH_PATH} AS $tailrace$
    WITH RECURSIVE above AS (
        SELECT target AS relid
      UNION
        SELECT i.inhparent FROM above JOIN pg_catalog.pg_inherits i ON i.inhrelid = above.relid
    ), below AS (
        SELECT target AS relid
      UNION
        SELECT i.inhrelid FROM below JOIN pg_catalog.pg_inherits i ON i.inhparent = below.relid
    )
    SELECT relid FROM above UNION SELECT relid FROM below
$tailrace$;

-- The tables with a column whose values hold, at whatever depth, values of a type.
CREATE OR REPLACE FUNCTION tailrace.users(target oid) RETURNS SETOF oid LANGUAGE sql
@{SEARCH_PATH} AS $tailrace$
    WITH RECURSIVE used AS (
        SELECT target AS type
      UNION
        SELECT next.type FROM used CROSS JOIN LATERAL (
            SELECT t.oid FROM pg_catalog.pg_type t WHERE used.type IN (t.typelem, t.typbasetype)
          UNION ALL
            SELECT unnest(ARRAY[r.rngtypid, r.rngmultitypid]) FROM pg_catalog.pg_range r WHERE r.rngsubtype = used.type
          UNION ALL
            SELECT c.reltype FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_class c ON c.oid = a.attrelid
            WHERE a.atttypid = used.type AND NOT a.attisdropped AND c.reltype <> 0) AS next (type)
    )
    SELECT DISTINCT c.oid FROM used JOIN pg_catalog.pg_attribute a ON a.atttypid = used.type AND NOT a.attisdropped
    JOIN pg_catalog.pg_class c ON c.oid = a.attrelid WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p'
$tailrace$;

-- TRUNCATE of a leaf is not published under its root, and neither is its end. Each leaf of a table that is published
-- by its root carries a guard: a trigger whose name holds the root, so that a dropped leaf still shows where it was.
CREATE OR REPLACE FUNCTION tailrace.report_truncate() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
@{SEARCH_PATH} AS $tailrace$
BEGIN
    PERFORM tailrace.emit(jsonb_build_object('oid', TG_ARGV[0]::int8, 'tag', 'TRUNCATE TABLE',
        'recopy', true, 'reason', 'a partition was truncated'));
    RETURN NULL;
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'tailrace could not report a truncated partition: %', SQLERRM;
    RETURN NULL;
END $tailrace$;

CREATE OR REPLACE FUNCTION tailrace.guard() RETURNS TABLE (root oid, leaf oid, joined boolean) LANGUAGE plpgsql
@{SEARCH_PATH} SET lock_timeout = '@{LOCK_SECONDS}s' AS $tailrace$
#variable_conflict use_column
BEGIN
    PERFORM set_config('tailrace.quiet', (SELECT token FROM tailrace.secret), true);
    FOR root, leaf, joined IN
        WITH wanted AS (
            SELECT DISTINCT g.relid, t.relid::oid AS part, true AS there
            FROM pg_catalog.pg_publication p CROSS JOIN LATERAL pg_get_publication_tables(p.pubname) g
            JOIN pg_catalog.pg_class top ON top.oid = g.relid AND top.relkind = 'p'
            CROSS JOIN LATERAL pg_partition_tree(g.relid) t JOIN pg_catalog.pg_class c ON c.oid = t.relid
            WHERE p.pubviaroot AND t.isleaf AND c.relkind = 'r'
        ), held AS (
            SELECT CASE WHEN tg.tgfoid = 'tailrace.report_truncate()'::regprocedure THEN substr(tg.tgname, 16)::oid END
                AS relid, tg.tgrelid AS part, true AS there
            FROM pg_catalog.pg_trigger tg
            WHERE tg.tgfoid = 'tailrace.report_truncate()'::regprocedure AND NOT tg.tgisinternal
            AND tg.tgname ~ '^tailrace_guard_[0-9]+$'
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

-- Whether the command is one of `guard`, which knows the token.
CREATE OR REPLACE FUNCTION tailrace.is_own_command() RETURNS boolean LANGUAGE sql STABLE
@{SEARCH_PATH} AS $tailrace$
    SELECT EXISTS (SELECT FROM tailrace.secret WHERE token = current_setting('tailrace.quiet', true))
$tailrace$;

-- Describes every published table that a command may have changed. What changed is for the reader to judge.
CREATE OR REPLACE FUNCTION tailrace.report_ddl() RETURNS event_trigger LANGUAGE plpgsql SECURITY DEFINER
@{SEARCH_PATH} AS $tailrace$
DECLARE
    targets oid[];
    target oid;
    parts record;
    moved jsonb := '{}';
    filled boolean;
    described jsonb;
BEGIN
    IF tg_tag = 'COMMENT' OR tailrace.is_own_command() OR NOT EXISTS (SELECT FROM pg_catalog.pg_publication) THEN
        RETURN;
    END IF;
    IF tg_tag LIKE '% PUBLICATION' THEN
        PERFORM tailrace.guard();
        RETURN;
    END IF;
    WITH command AS (
        SELECT d.classid, d.objid FROM pg_event_trigger_ddl_commands() d
    ), touched AS (
        SELECT c.objid AS relid FROM command c WHERE c.classid = 'pg_catalog.pg_class'::regclass
      UNION
        SELECT rel.oid FROM command c JOIN pg_catalog.pg_class rel ON rel.relnamespace = c.objid
        WHERE c.classid = 'pg_catalog.pg_namespace'::regclass AND tg_tag = 'ALTER SCHEMA'
    ), used AS (
        -- Rows of a table that are values in another are printed with a field for each of its columns.
        SELECT rel.reltype AS type FROM touched t CROSS JOIN tailrace.family(t.relid) AS f(relid)
        JOIN pg_catalog.pg_class rel ON rel.oid = f.relid WHERE rel.reltype <> 0
      UNION
        SELECT c.objid FROM command c WHERE c.classid = 'pg_catalog.pg_type'::regclass
    ), concerned AS (
        SELECT relid FROM touched
      UNION
        SELECT u.relid FROM used CROSS JOIN tailrace.users(used.type) AS u(relid) WHERE tg_tag NOT LIKE 'CREATE%'
    )
    SELECT array_agg(c.oid) INTO targets FROM concerned JOIN pg_catalog.pg_class c ON c.oid = concerned.relid
    WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p';
    IF targets IS NULL THEN
        RETURN;
    END IF;
    IF EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.oid = ANY(targets) AND (c.relkind = 'p' OR c.relispartition))
        OR EXISTS (SELECT FROM pg_catalog.pg_trigger tg WHERE tg.tgrelid = ANY(targets)
            AND tg.tgfoid = 'tailrace.report_truncate()'::regprocedure)
    THEN
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
        PERFORM tailrace.emit(described || jsonb_build_object('tag', tg_tag,
            'reason', moved ->> target::text, 'recopy', moved ? target::text));
    END LOOP;
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'tailrace could not report %: %', tg_tag, SQLERRM;
END $tailrace$;

-- Changes of an unlogged table, or partition, are not in the log, and neither are those before it is logged again.
CREATE OR REPLACE FUNCTION tailrace.report_rewrite() RETURNS event_trigger LANGUAGE plpgsql SECURITY DEFINER
@{SEARCH_PATH} AS $tailrace$
BEGIN
    IF pg_event_trigger_table_rewrite_reason() & 1 = 1 AND EXISTS (SELECT FROM pg_catalog.pg_publication) THEN
        PERFORM tailrace.emit(jsonb_build_object('oid', f.relid::int8, 'tag', tg_tag,
            'recopy', true, 'reason', 'it, or a partition of it, was unlogged for a while'))
        FROM tailrace.family(pg_event_trigger_table_rewrite_oid()) AS f(relid);
    END IF;
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'tailrace could not report %: %', tg_tag, SQLERRM;
END $tailrace$;

CREATE OR REPLACE FUNCTION tailrace.report_drop() RETURNS event_trigger LANGUAGE plpgsql SECURITY DEFINER
@{SEARCH_PATH} AS $tailrace$
DECLARE
    wide boolean := EXISTS (SELECT FROM pg_catalog.pg_publication p WHERE p.puballtables);
    schemas text[] := '{}';
BEGIN
    -- What ALTER drops is reported when it ends.
    IF tg_tag IN ('ALTER TABLE', 'ALTER TYPE') OR tailrace.is_own_command() THEN
        RETURN;
    END IF;
    IF current_setting('server_version_num')::int >= 150000 THEN
        schemas := ARRAY(SELECT n.nspname FROM pg_catalog.pg_publication_namespace s
            JOIN pg_catalog.pg_namespace n ON n.oid = s.pnnspid);
    END IF;
    PERFORM tailrace.emit(jsonb_build_object('oid', d.objid::int8,
        'schema', d.schema_name, 'name', d.object_name, 'tag', tg_tag, 'dropped', true))
    FROM pg_event_trigger_dropped_objects() d
    WHERE d.object_type = 'table' AND d.objsubid = 0 AND NOT d.is_temporary AND (
        wide OR d.schema_name = ANY(schemas) OR EXISTS (
            SELECT FROM pg_event_trigger_dropped_objects() m
            WHERE m.object_type = 'publication relation' AND m.address_names = ARRAY[d.schema_name, d.object_name]
                OR m.object_type = 'publication namespace' AND m.address_names[1] = d.schema_name));
    PERFORM tailrace.emit(described.payload || jsonb_build_object('tag', tg_tag))
    FROM (
        SELECT f.relid FROM pg_event_trigger_dropped_objects() d
        CROSS JOIN LATERAL (
            SELECT d.objid WHERE d.object_type = 'table column'
          UNION ALL
            SELECT u.relid FROM pg_catalog.pg_class c CROSS JOIN tailrace.users(c.reltype) AS u(relid)
            WHERE c.oid = d.objid
        ) AS lost (relid)
        CROSS JOIN tailrace.family(lost.relid) AS f(relid)
        WHERE d.object_type IN ('table column', 'composite type column') AND NOT d.is_temporary
      UNION
        -- A dropped index no longer shows its table: those whose rows were identified by an index that is gone.
        SELECT c.oid FROM pg_catalog.pg_class c
        WHERE c.relreplident = 'i' AND NOT EXISTS (
            SELECT FROM pg_catalog.pg_index i WHERE i.indrelid = c.oid AND i.indisreplident)
        AND EXISTS (SELECT FROM pg_event_trigger_dropped_objects() d WHERE d.object_type = 'index')
    ) AS altered CROSS JOIN LATERAL tailrace.describe(altered.relid) AS described (payload)
    WHERE described.payload IS NOT NULL;
    -- Any role can give a trigger of its own such a name: it must not make this fail.
    PERFORM tailrace.emit(jsonb_build_object('oid', root.oid::int8,
        'tag', tg_tag, 'recopy', true, 'reason', 'a partition was dropped'))
    FROM pg_catalog.pg_class root WHERE root.relkind = 'p' AND EXISTS (
        SELECT FROM pg_event_trigger_dropped_objects() d
        WHERE d.object_type = 'trigger' AND d.address_names[3] = 'tailrace_guard_' || root.oid);
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'tailrace could not report %: %', tg_tag, SQLERRM;
END $tailrace$;
