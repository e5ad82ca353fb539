"""The event trigger that writes the effect of DDL on published tables to the log, in order with the rows.

It is optional. With it, a schema change and its position are known exactly; without it, the change is derived from the
Relation message before the next row. Its functions are in the schema `tailrace` and never make a command fail: an error
inside them becomes a warning. `ddl_message` reads what they write.
"""

from __future__ import annotations

from importlib.resources import files
from string import Template
from typing import Final

import psycopg

from tailrace.errors import PreflightError, UnavailableError
from tailrace.source.postgres.catalog import COLUMN_FIELDS, COLUMN_TABLES, KEY_NUMBERS, STORAGE
from tailrace.source.postgres.connection import PgConnection
from tailrace.source.postgres.copy_query import SESSION
from tailrace.source.postgres.ddl_message import FORMAT
from tailrace.source.postgres.frame_builder import DDL_PREFIX

VERSION: Final = 4
"""The version of the functions. `install` replaces another version."""

LOCK_SECONDS: Final = 2
"""How long to wait for a partition that is being written to, before it is left without its guard."""

_MARK: Final = f"tailrace {VERSION}"
_TRIGGERS: Final = {
    "tailrace_ddl": ("ddl_command_end", "report_ddl"),
    "tailrace_drop": ("sql_drop", "report_drop"),
    "tailrace_rewrite": ("table_rewrite", "report_rewrite"),
}
_SEARCH_PATH: Final = "SET search_path = pg_catalog, pg_temp"
"""Without a mention of it, temporary tables come before all others, also before those of the catalog."""


class _Sql(Template):
    """SQL with values for `@{NAME}`, because `$` quotes the bodies of functions."""

    delimiter = "@"


def _create_functions() -> str:
    text = files(__package__).joinpath("event_trigger.sql").read_text("utf-8")
    settings = (
        f"SET {name} = {value}" for name, value in SESSION.items() if name not in ("client_encoding", "search_path")
    )
    return _Sql(text).substitute(
        COLUMN_FIELDS=COLUMN_FIELDS,
        COLUMN_TABLES=COLUMN_TABLES,
        DDL_PREFIX=DDL_PREFIX,
        FORMAT=FORMAT,
        KEY_NUMBERS=KEY_NUMBERS,
        LOCK_SECONDS=LOCK_SECONDS,
        SEARCH_PATH=_SEARCH_PATH,
        SETTINGS=" ".join([_SEARCH_PATH, *settings]),
        STORAGE=STORAGE,
    )


def _create_trigger(name: str, event: str, function: str) -> str:
    return (
        f"CREATE EVENT TRIGGER {name} ON {event} EXECUTE FUNCTION tailrace.{function}();\n"
        f"ALTER EVENT TRIGGER {name} ENABLE ALWAYS;\n"
    )


_DROP_TRIGGERS = "".join(f"DROP EVENT TRIGGER IF EXISTS {name};\n" for name in _TRIGGERS)
_DROP_OLD = "DROP ROUTINE IF EXISTS tailrace.note_rewrite;\n"  # of version 2
_FUNCTIONS: Final = (
    *("report_ddl", "report_rewrite", "report_drop", "report_truncate", "is_own_command", "guard", "family", "users"),
    *("describe", "emit", "is_genuine"),
)
# A role that owns the schema, or a function in it, could replace what the triggers call with the rights of another.
_REQUIRE_OWNER = """DO $tailrace$ BEGIN
IF EXISTS (
    SELECT FROM pg_catalog.pg_namespace n JOIN pg_catalog.pg_roles r ON r.oid = n.nspowner
    WHERE n.nspname = 'tailrace' AND NOT r.rolsuper AND r.rolname <> current_user
) OR EXISTS (
    SELECT FROM pg_catalog.pg_namespace n JOIN pg_catalog.pg_roles r ON NOT r.rolsuper AND r.rolname <> current_user
    LEFT JOIN pg_catalog.pg_proc p ON p.pronamespace = n.oid AND p.proowner = r.oid
    LEFT JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relowner = r.oid
    WHERE n.nspname = 'tailrace' AND (p.oid IS NOT NULL OR c.oid IS NOT NULL)
) THEN
    RAISE insufficient_privilege USING MESSAGE = 'the schema tailrace, or something in it, belongs to another role';
END IF;
END $tailrace$;
"""


def _install_body() -> str:
    return "".join(
        [
            _REQUIRE_OWNER,
            _DROP_TRIGGERS,
            "CREATE SCHEMA IF NOT EXISTS tailrace;\n",
            _DROP_OLD,
            _create_functions(),
            "REVOKE ALL ON SCHEMA tailrace FROM PUBLIC;\n",
            "REVOKE ALL ON ALL FUNCTIONS IN SCHEMA tailrace FROM PUBLIC;\n",
            # Pipelines of any role ask whether a message is genuine; the answer does not show the token.
            "GRANT USAGE ON SCHEMA tailrace TO PUBLIC;\n",
            "GRANT EXECUTE ON FUNCTION tailrace.is_genuine TO PUBLIC;\n",
            f"COMMENT ON FUNCTION tailrace.report_ddl() IS '{_MARK}';\n",
            "DO 'BEGIN PERFORM tailrace.guard(); END';\n",
            *(_create_trigger(name, event, function) for name, (event, function) in _TRIGGERS.items()),
        ]
    )


def install_sql() -> str:
    """The script that installs the trigger, for a superuser to run with psql. Running it again changes nothing."""
    return f"BEGIN;\n{_install_body()}COMMIT;\n"


def uninstall_sql() -> str:
    """The script that removes everything that `install_sql` created. It may also run when nothing is installed."""
    dropped = "".join(f"DROP ROUTINE IF EXISTS tailrace.{name} CASCADE;\n" for name in _FUNCTIONS)
    return f"""BEGIN;
{_DROP_TRIGGERS}DO $tailrace$ BEGIN
{_DROP_OLD}{dropped}DROP MATERIALIZED VIEW IF EXISTS tailrace.secret;
DROP SCHEMA IF EXISTS tailrace;
EXCEPTION WHEN invalid_schema_name OR dependent_objects_still_exist THEN NULL;
END $tailrace$;
COMMIT;
"""


def install(connection: PgConnection) -> None:
    """Install the trigger in the connection's database, or update an older one; all of it or nothing.

    Each leaf of a partitioned table that is published by its root gets its own trigger, which waits for transactions
    that write to that leaf. Raises PreflightError when the role may not do this, UnavailableError when a leaf stays
    busy.
    """
    try:
        with connection.transaction():
            connection.execute(_install_body().encode())
    except psycopg.errors.InsufficientPrivilege as error:
        raise PreflightError(
            f"the role {connection.info.user!r} may not install the event trigger: {error.diag.message_primary}",
            fix="let a superuser install it; without it, a schema change is found at the table's next row",
        ) from error
    except psycopg.errors.LockNotAvailable as error:
        raise UnavailableError(
            f"a partition was busy for {LOCK_SECONDS} s while the event trigger was being installed",
            fix="try again when no long transaction writes to the published partitioned tables",
        ) from error


def is_genuine(connection: PgConnection, token: str) -> bool:
    """Whether the trigger that is installed in this database wrote a message with this token."""
    try:
        row = connection.execute("SELECT tailrace.is_genuine(%s)", [token]).fetchone()
    except (psycopg.errors.InvalidSchemaName, psycopg.errors.UndefinedFunction):
        return False
    return row is not None and bool(row[0])


def installed_version(connection: PgConnection) -> int | None:
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
