"""The description of the API as OpenAPI 3.1, for programs and people: every route, every answer, every key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tailrace.dashboard.health import LEVELS
from tailrace.dashboard.row import GROUPS
from tailrace.dashboard.series import COLUMNS
from tailrace.dashboard.table import KINDS
from tailrace.state import TableState

JsonSchema = dict[str, Any]


def describe() -> JsonSchema:
    return {
        "openapi": "3.1.0",
        "info": {"title": "tailrace dashboard", "version": "1", "summary": "How pipelines stand, and requests to them"},
        "paths": {path: _operations(path, methods) for path, methods in _PATHS.items()},
        "components": {
            "schemas": {name: _object(keys) for name, keys in SCHEMAS.items()},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


def _object(keys: Mapping[str, JsonSchema]) -> JsonSchema:
    return {"type": "object", "properties": dict(keys), "required": list(keys), "additionalProperties": False}


def _text(about: str = "") -> JsonSchema:
    return _about({"type": "string"}, about)


def _number(about: str = "") -> JsonSchema:
    return _about({"type": "number"}, about)


def _count(about: str = "") -> JsonSchema:
    return _about({"type": "integer"}, about)


def _flag(about: str = "") -> JsonSchema:
    return _about({"type": "boolean"}, about)


def _time(about: str = "") -> JsonSchema:
    return _about({"type": "string", "format": "date-time"}, about)


def _choice(values: Any, about: str = "") -> JsonSchema:
    return _about({"type": "string", "enum": [str(value) for value in values]}, about)


def _list(items: JsonSchema, about: str = "") -> JsonSchema:
    return _about({"type": "array", "items": items}, about)


def _of(name: str) -> JsonSchema:
    return {"$ref": f"#/components/schemas/{name}"}


def _maybe(schema: JsonSchema) -> JsonSchema:
    """The same, or null where it is not known or does not apply."""
    return {"anyOf": [schema, {"type": "null"}]}


def _about(schema: JsonSchema, about: str) -> JsonSchema:
    return schema | ({"description": about} if about else {})


_SUMMARY: Mapping[str, JsonSchema] = {
    "name": _text(),
    "file": _text("the pipeline's file as the dashboard was given it"),
    "at": _time("when the state was read"),
    "health": _of("Health"),
    "tables": _of("Groups"),
    "copied_per_second": _maybe(_number("rows of copies, of the last minute")),
    "changes_per_second": _maybe(_number("changes of the last minute")),
    "bytes_per_second": _maybe(_number("size of what was applied in the last minute")),
    "lag_seconds": _maybe(_number("of the slowest table that follows")),
    "lag_bytes": _maybe(_count("log of the server that is not applied")),
}

_ROW: Mapping[str, JsonSchema] = {
    "id": _text("stays the same when the table is renamed"),
    "name": _text(),
    "state": _choice(TableState),
    "group": _choice(GROUPS),
    "since": _time("when it came into this state"),
    "paused_at": _maybe(_time()),
    "rows_copied": _count(),
    "rows_total": _maybe(_count("an estimate")),
    "seconds_left": _maybe(_count("until the copy is complete, at the rate of the last seconds")),
    "changes_applied": _count(),
    "inserts": _count("since its last copy began"),
    "updates": _count("since its last copy began"),
    "deletes": _count("since its last copy began"),
    "rows_per_second": _maybe(_number("of the last ten seconds")),
    "lag_bytes": _maybe(_count()),
    "lag_seconds": _maybe(_number()),
    "letters": _count("changes that wait as dead letters"),
    "code": _maybe(_text("of the error, as in docs/errors.md")),
    "reason": _maybe(_text("why it is in error")),
    "retry": _maybe(_choice(("timed", "manual", "none"))),
    "attempts": _count("failures in a row"),
    "next_try": _maybe(_time()),
    "version": _maybe(_count("of its columns")),
}

SCHEMAS: Mapping[str, Mapping[str, JsonSchema]] = {
    "Error": {"error": _of("Problem")},
    "Problem": {
        "code": _text("of docs/errors.md, or refused, unknown, malformed"),
        "message": _text(),
        "fix": _maybe(_of("Fix")),
    },
    "Fix": {"text": _text(), "commands": _list(_text("a command or an SQL statement"))},
    "Health": {
        "level": _choice(LEVELS),
        "sentence": _text(),
        "detail": _text("a second sentence; may be empty"),
        "table": _maybe(_text("where to look first")),
        "fix": _maybe(_of("Fix")),
    },
    "Groups": {"total": _count(), **{group: _count() for group in GROUPS}},
    "Pipelines": {"pipelines": _list(_of("Summary"))},
    "Summary": _SUMMARY,
    "Pipeline": {
        **_SUMMARY,
        "runner": _maybe(_of("Runner")),
        "batch": _maybe(_count("the number of the last batch")),
        "position": _maybe(_text()),
        "source_type": _text(),
        "destination_type": _text(),
        "source": _maybe(_of("Source")),
        "way": _list(_of("Stage"), "the way of a change, in its order"),
        "slot": _maybe(_of("Slot")),
        "phases": {"type": "object", "additionalProperties": _number(), "description": "seconds of the last batch"},
        "batches": _list(_of("Batch"), "the newest first"),
        "series": _of("Series"),
        "delivery": _maybe(_of("Delivery")),
        "notices": _list(_of("Notice"), "what the run leaves out"),
        "alerts": _list(_of("Alert"), "each condition of the section `alerts` that was looked at"),
        "last_run": _maybe(_of("Run")),
        "requests": _list(_of("Request"), "the newest first"),
        "letters": _list(_of("Letter"), "the newest first, without values"),
        "events": _list(_of("Event"), "the newest first"),
    },
    "Runner": {"pid": _count(), "host": _text(), "started": _time()},
    "Source": {
        "gear": _maybe(_text("how it reads")),
        "received": _maybe(_text("a position")),
        "journal_bytes": _maybe(_count()),
        "server": _maybe(_text("the position of the server")),
        "slot_restart": _maybe(_text()),
        "slot_confirmed": _maybe(_text()),
        "error": _maybe(_text()),
        "fix": _maybe(_of("Fix")),
        "at": _maybe(_time()),
    },
    "Stage": {
        "stage": _choice(("source", "slot", "journal", "batch", "destination")),
        "title": _text(),
        "value": _text(),
        "detail": _text(),
        "why": _maybe(_text("what makes it slow")),
        "slow": _flag("whether the others wait for it; at most one stage is slow"),
    },
    "Slot": {
        "status": _text("wal_status of the server"),
        "kept_bytes": _maybe(_count()),
        "safe_bytes": _maybe(_count("how much more the server keeps")),
        "growth": _maybe(_number("bytes a second")),
        "full_in": _maybe(_number("seconds until the server gives the slot up, if it grows on like that")),
        "full_at": _maybe(_time()),
        "limit_bytes": _maybe(_count()),
        "name": _maybe(_text()),
        "restart": _maybe(_text("a position")),
        "confirmed": _maybe(_text("a position")),
        "fix": _maybe(_of("Fix")),
    },
    "Batch": {
        "id": _count(),
        "at": _maybe(_time()),
        "seconds": _number(),
        "rows": _count(),
        "bytes": _count("the size of its changes in memory, and of its copied rows as they were staged"),
        "copied": _count(),
        "inserts": _count(),
        "updates": _count(),
        "deletes": _count(),
        "phases": {"type": "object", "additionalProperties": _number(), "description": "seconds of work"},
    },
    "Series": {name: _list(_maybe(_number())) for name in COLUMNS},
    "Delivery": {
        "pending": _maybe(_count()),
        "oldest": _maybe(_time()),
        "delivered": _maybe(_count()),
        "dropped": _maybe(_count()),
        "failures": _count(),
        "error": _maybe(_text()),
        "fix": _maybe(_of("Fix")),
        "lag_seconds": _maybe(_number()),
    },
    "Notice": {
        "level": _choice(("ok", "warning", "error")),
        "subject": _text(),
        "message": _text(),
        "fix": _maybe(_of("Fix")),
        "table": _maybe(_text()),
    },
    "Alert": {
        "name": _text("the condition, as in the section `alerts`"),
        "holds": {"type": "boolean"},
        "since": _time("since when it holds, or does not"),
        "told_at": _maybe(_time("when people were last told that it holds; null while they need not know")),
        "text": _maybe(_text("what they were told")),
        "tables": _list(_text(), "which it is about"),
        "failure": _maybe(_text("why they could not be told")),
    },
    "Run": {
        "begun_at": _time(),
        "ended_at": _maybe(_time()),
        "kind": _maybe(_text()),
        "message": _maybe(_text()),
        "table": _maybe(_text()),
        "fix": _maybe(_of("Fix")),
    },
    "Request": {
        "id": _count(),
        "kind": _choice(KINDS),
        "table": _text(),
        "at": _time(),
        "argument": _maybe(_text("of skip, the number of a dead letter")),
        "done_at": _maybe(_time()),
        "outcome": _maybe(_text("what became of it")),
    },
    "Letter": {
        "id": _count(),
        "table": _text(),
        "position": _text(),
        "kind": _text("of the error"),
        "reason": _text(),
        "fix": _maybe(_of("Fix")),
        "status": _choice(("waiting", "skipped", "resolved")),
        "tries": _count(),
        "version": _maybe(_count()),
        "first_at": _time(),
        "last_at": _time(),
    },
    "Event": {
        "at": _time(),
        "kind": _choice(("table", "error", "pause", "request", "run", "letter")),
        "table": _maybe(_text()),
        "text": _text(),
    },
    "Tables": {
        "version": _text("for `since` in the next request"),
        "complete": _flag("whether these are all tables; else they replace the rows of the same id"),
        "total": _count(),
        "gone": _list(_text("the id of a row to remove")),
        "tables": _list(_of("Row")),
    },
    "Row": {**_ROW, "hours": _list(_count(), "changes of the last 24 hours, oldest first; empty: none")},
    "Table": {
        "pipeline": _text(),
        "file": _text(),
        **_ROW,
        "hours": _list(_of("Hour"), "of the last 48 hours, oldest first; hours without a change are left out"),
        "position": _maybe(_text()),
        "chunks_done": _count(),
        "chunks_total": _maybe(_count()),
        "last_change_committed_at": _maybe(_time()),
        "last_applied_at": _maybe(_time()),
        "states": _list(_of("Entered"), "when it last came into each state, oldest first"),
        "error": _maybe(_of("TableError")),
        "columns": _list(_of("Column")),
        "versions": _list(_of("Version"), "the newest first"),
        "letters": _list(_of("Letter")),
        "requests": _list(_of("Request")),
        "actions": _list(_of("Action")),
        "events": _list(_of("Event")),
    },
    "Hour": {
        "hour": _time("when it began"),
        "copied": _count(),
        "inserts": _count(),
        "updates": _count(),
        "deletes": _count(),
    },
    "Entered": {"state": _choice(TableState), "at": _time()},
    "TableError": {
        "code": _text("of docs/errors.md"),
        "docs": _text(),
        "message": _maybe(_text()),
        "fix": _maybe(_of("Fix")),
        "retry": _maybe(_choice(("timed", "manual", "none"))),
        "retry_meaning": _maybe(_text()),
        "attempts": _count(),
        "attempts_allowed": _count("after so many a timed retry becomes a manual one"),
        "next_try": _maybe(_time()),
        "failed_in": _maybe(_choice(TableState)),
        "resumes_at": _maybe(_text("the position where it goes on")),
        "log_kept_until": _maybe(_time("from then on only a new copy helps; null: nothing is kept")),
    },
    "Column": {
        "name": _text(),
        "type": _text("of Arrow"),
        "upstream_type": _text(),
        "nullable": _flag(),
        "key": _flag("whether it is part of the key"),
    },
    "Version": {"version": _count(), "position": _text("where it begins"), "changes": _list(_text())},
    "Action": {
        "action": _choice(KINDS),
        "command": _text("the command that does the same"),
        "effect": _text("what becomes of the table"),
        "possible": _flag("whether it would do something now"),
        "hindrance": _maybe(_text("why not")),
        "asked": _flag("whether it is asked for and not done yet"),
    },
    "Asked": {
        "request": _maybe(_count("its number; null: nothing had to be asked for")),
        "kind": _choice(KINDS),
        "table": _text(),
        "runner": _maybe(_count("the process that does it; null: the next run does")),
        "text": _text("what happens now"),
        "command": _text("the command that does the same"),
    },
    "Alive": {
        "status": _choice(("ok", *LEVELS), "of the server, or the level of the pipeline's health"),
        "sentence": _maybe(_text("of the pipeline")),
    },
    "Login": {"needed": _flag("whether there is a token at all")},
}

# The routes.

_PIPELINE = {"name": "pipeline", "in": "path", "required": True, "schema": {"type": "string"}}
_TABLE = {**_PIPELINE, "name": "table", "description": "schema.table, percent-encoded"}
_HOURS = {"name": "hours", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 24, "default": 1}}
_SINCE = {"name": "since", "in": "query", "schema": {"type": "string"}, "description": "a version given before"}
_WATCHED = {"name": "pipeline", "in": "query", "schema": {"type": "string"}}
_BASE = "/api/v1/pipelines"

_PATHS: Mapping[str, Mapping[str, tuple[str, str | None, list[JsonSchema]]]] = {
    _BASE: {"get": ("All pipelines", "Pipelines", [])},
    _BASE + "/{pipeline}": {"get": ("One pipeline, without its tables", "Pipeline", [_PIPELINE, _HOURS])},
    _BASE + "/{pipeline}/tables": {"get": ("Its tables, or those that changed", "Tables", [_PIPELINE, _SINCE])},
    _BASE + "/{pipeline}/tables/{table}": {"get": ("One table", "Table", [_PIPELINE, _TABLE])},
    _BASE + "/{pipeline}/tables/{table}/{action}": {
        "post": (
            "Ask the runner to do something to a table",
            "Asked",
            [_PIPELINE, _TABLE, {**_PIPELINE, "name": "action", "schema": _choice(KINDS)}],
        )
    },
    _BASE + "/{pipeline}/requests/{request}": {
        "get": (
            "What became of a request",
            "Request",
            [_PIPELINE, {**_PIPELINE, "name": "request", "schema": {"type": "integer"}}],
        )
    },
    "/healthz": {"get": ("Whether the server lives, or a pipeline is healthy", "Alive", [_WATCHED])},
    "/metrics": {"get": ("For Prometheus", None, [])},
    "/openapi.json": {"get": ("This description", None, [])},
    "/login": {"post": ("Exchange the token for a cookie", "Login", [])},
    "/logout": {"post": ("End the session of this browser", "Login", [])},
}

_BODIES: Mapping[str, JsonSchema] = {
    "/login": {"type": "object", "properties": {"token": _text()}, "required": ["token"]},
    "/logout": {"type": "object"},
    _BASE + "/{pipeline}/tables/{table}/{action}": {
        "type": "object",
        "properties": {"letter": _count("for skip: only this dead letter")},
        "additionalProperties": False,
    },
}

_CODES: Mapping[int, str] = {
    304: "The client has this already",
    400: "The request is malformed",
    401: "No or a wrong token",
    403: "A request of another origin, or no JSON",
    404: "There is no such pipeline, table or request",
    409: "The request cannot be done now, such as a skip where no change waits",
    413: "The body is too large",
    421: "A Host header that is not known here",
    503: "The state cannot be read, or the pipeline is not healthy",
}
_GET_CODES = (304, 400, 401, 404, 421, 503)
_POST_CODES = (400, 401, 403, 404, 409, 413, 421, 503)


def _operations(path: str, methods: Mapping[str, tuple[str, str | None, list[JsonSchema]]]) -> JsonSchema:
    return {method: _operation(path, method, *each) for method, each in methods.items()}


def _operation(path: str, method: str, summary: str, answer: str | None, parameters: list[JsonSchema]) -> JsonSchema:
    kind = "text/plain" if path == "/metrics" else "application/json"
    content = {kind: {"schema": _of(answer) if answer else {}}}
    is_action = path.endswith("/{action}")
    responses: dict[str, JsonSchema] = {"200": {"description": "The answer", "content": content}}
    if is_action:
        responses["202"] = {"description": "The request is recorded", "content": content}
    for code in _GET_CODES if method == "get" else _POST_CODES:
        responses[str(code)] = {"description": _CODES[code]}
        if code != 304:
            responses[str(code)]["content"] = {"application/json": {"schema": _of("Error")}}
    name = "".join(part.strip("{}").title() for part in path.removeprefix("/api/v1").split("/")).replace(".", "")
    described = {"operationId": f"{method}{name}", "summary": summary, "parameters": parameters, "responses": responses}
    if path in _BODIES:
        described["requestBody"] = {"content": {"application/json": {"schema": _BODIES[path]}}}
    return described
