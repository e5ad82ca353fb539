-- The functions of the event trigger, in the schema `tailrace`. event_trigger.py replaces names in braces after an at
-- sign by values. None of them ever makes a command fail: an error inside becomes a warning.

-- The server puts a message of a subtransaction in order by where it ends in the log, which is where the next row
-- begins, and so may send that row first. Something after the message sets it apart.
CREATE OR REPLACE FUNCTION tailrace.emit(payload jsonb) RETURNS void LANGUAGE plpgsql
SET search_path = pg_catalog AS $tailrace$
BEGIN
    -- As bytes: text would be in the database's own encoding, whatever the client's.
    PERFORM pg_logical_emit_message(true, '@{DDL_PREFIX}', convert_to(payload::text, 'UTF8'));
    PERFORM pg_logical_emit_message(true, 'tailrace', 'ddl');
END $tailrace$;

-- The full description of one table; null when it is in no publication.
CREATE OR REPLACE FUNCTION tailrace.describe(target oid) RETURNS jsonb LANGUAGE plpgsql
@{SETTINGS} AS $tailrace$
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
                SELECT coalesce(jsonb_agg(jsonb_build_array(@{COLUMN_FIELDS}) ORDER BY a.attnum), '[]')
                FROM @{COLUMN_TABLES} WHERE a.attrelid = target AND a.attnum > 0 AND NOT a.attisdropped),
            'primary', (
                SELECT @{KEY_NUMBERS} FROM pg_index i
                WHERE i.indrelid = target AND i.indisprimary AND i.indisvalid AND i.indimmediate),
            'index', (
                SELECT @{KEY_NUMBERS} FROM pg_index i
                WHERE i.indrelid = target AND i.indisreplident AND i.indisvalid))
        FROM pg_class rel JOIN pg_namespace n ON n.oid = rel.relnamespace
        WHERE rel.oid = target AND views IS NOT NULL);
END $tailrace$;

-- A table with all its ancestors and descendants: a command may recurse, and a partition is published as its root.
CREATE OR REPLACE FUNCTION tailrace.family(target oid) RETURNS SETOF oid LANGUAGE sql
SET search_path = pg_catalog AS $tailrace$
    WITH RECURSIVE above AS (
        SELECT target AS relid UNION SELECT i.inhparent FROM above JOIN pg_inherits i ON i.inhrelid = above.relid
    ), below AS (
        SELECT target AS relid UNION SELECT i.inhrelid FROM below JOIN pg_inherits i ON i.inhparent = below.relid
    )
    SELECT relid FROM above UNION SELECT relid FROM below
$tailrace$;

-- The tables with a column whose values hold, at whatever depth, values of a type.
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

-- TRUNCATE of a leaf is not published under its root, and neither is its end. Each leaf of a table that is published
-- by its root carries a guard: a trigger whose name holds the root, so that a dropped leaf still shows where it was.
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
SET search_path = pg_catalog SET lock_timeout = '@{LOCK_SECONDS}s' AS $tailrace$
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

CREATE OR REPLACE FUNCTION tailrace.note_rewrite() RETURNS event_trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog AS $tailrace$
BEGIN
    -- Comes before the command's end, which takes it from here; gone with the transaction.
    PERFORM set_config('tailrace.rewritten', format('%s %s:%s', current_setting('tailrace.rewritten', true),
        pg_event_trigger_table_rewrite_oid(), pg_event_trigger_table_rewrite_reason()), true);
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'tailrace could not note a rewritten table: %', SQLERRM;
END $tailrace$;

-- The reasons of a rewrite are bits: 1 the table was unlogged before, 2 a new column was filled row by row, 4 a column's
-- type changed, 8 the access method did.
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
        IF query ~* '\m(add|drop|rename|alter)\s+attribute\M|\mrename\s+value\M'
            OR query !~* '\malter\s+type\M'
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
        IF tg_tag = 'ALTER TABLE' AND (query ~* '\m(add|drop)\M' OR query !~* '\malter\s+table\M') THEN
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
            WHEN rewrite & 4 <> 0 AND (query ~* '\musing\M' OR query !~* '\malter\s+table\M')
                THEN 'a column was computed anew with USING' END)) AS chosen (why);
    END LOOP;
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'tailrace could not report %: %', tg_tag, SQLERRM;
END $tailrace$;

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
