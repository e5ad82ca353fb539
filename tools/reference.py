"""Writes the pages of the reference: every key of a file, every option of every command, every answer of the API.

    python -m tools.reference       # `make reference` does it

The models, the commands and the API are where a key or an option is described; a test says when a page is out of date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from tailrace.cli import app
from tailrace.config.pipeline import json_schema
from tailrace.dashboard.openapi import describe

DOCS = Path(__file__).parents[1] / "docs"

_KEYS_HEAD = """# Every key

Every key that a pipeline's file may have, as the program knows it. `make reference` writes this page.
[Configuration](configuration.md) explains how they work together. A key in **bold** must be given. Sizes are written
`500MB` or `1GiB`, durations `200ms`, `10s`, `5m`, `2h` or `1d`.
"""

_COMMANDS_HEAD = """# Every option

What `tailrace COMMAND --help` prints, for every command. `make reference` writes this page. [Commands](commands.md)
has them in one table, with exit codes, what each changes upstream, and the output as JSON. Every command has `-h` and
`--help`.
"""

_API_HEAD = """# API

The JSON API of [the dashboard](dashboard.md), as the program describes it at `/openapi.json`. `make reference` writes
this page.

```console
$ tailrace dashboard shop.yaml
$ curl --silent http://127.0.0.1:8470/api/v1/pipelines/shop
$ curl --silent --json '{}' http://127.0.0.1:8470/api/v1/pipelines/shop/tables/public.orders/pause
```

- With a token, every request needs `Authorization: Bearer TOKEN`. Only `/healthz` without a query, and the page's own
  files, need none.
- Times are ISO 8601 in UTC, positions are texts that sort in order, sizes are bytes, durations seconds. Keys are always
  present, null where a value is not known. A key may be added; none is renamed or removed within `v1`.
- Every answer has an `ETag`: with `If-None-Match` an answer that did not change is a 304 without a body. A state is
  read at most once a second, however many ask.
- `tables?since=VERSION` gives the rows that changed after a `version` given before. `complete` says whether the answer
  has all rows: then it replaces what was there.
- A body is JSON, with `Content-Type: application/json`, `{}` where nothing has to be said. Everything else is refused:
  a key that is not known, a number of no dead letter that waits, a request that a page of another site makes.
- Names in a path are percent-encoded: a slash in the name of a table is `%2F`.
- An action leaves a request for the runner, as [the command](commands.md) of its name does, and answers 202 with its
  number: `requests/{request}` says what became of it. Where there is nothing to do it answers 200, and `request` is
  null.
- An error is `{"error": {"code", "message", "fix"}}`.
- `/healthz` is 200 while the server lives. `/healthz?pipeline=NAME` is 503 when the pipeline is failing, does not run,
  or its state cannot be read, and 200 when it is healthy or degraded.
- `/metrics` has all pipelines, with the [names of `tailrace metrics`](commands.md#metrics).

## Routes
"""


def keys_page() -> str:
    """The page of every key of a pipeline's file."""
    schema = json_schema()
    parts = [_KEYS_HEAD, "## The file\n\n" + _table(schema, schema)]
    for section in ("source", "destination", "store"):
        for type_, reference in schema["properties"][section]["discriminator"]["mapping"].items():
            parts += _section(f"{section}, type {type_}", _resolve(schema, reference), schema, 2)
    for section in ("tables", "batch", "spark", "alerts"):
        model = _resolve(schema, _references(schema["properties"][section])[0])
        parts += _section(section, model, schema, 2)
    return "\n".join(parts)


def _section(title: str, model: dict[str, Any], schema: dict[str, Any], depth: int) -> Iterator[str]:
    yield f"{'#' * depth} {title}\n\n{_escape(model.get('description', ''))}\n\n{_table(model, schema)}"
    done = set()
    for key, value in model["properties"].items():
        for reference in _references(value):
            if reference not in done:
                done.add(reference)
                yield from _section(f"{title}: {key}", _resolve(schema, reference), schema, min(depth + 1, 4))


def _table(model: dict[str, Any], schema: dict[str, Any]) -> str:
    rows = ["| key | value | default | |", "|---|---|---|---|"]
    for key, value in model["properties"].items():
        required = key in model.get("required", ())
        name = f"**`{key}`**" if required else f"`{key}`"
        about = value.get("description") or " ".join(
            _resolve(schema, each).get("description", "").rstrip(".") for each in _references(value)[:1]
        )
        if "discriminator" in value:
            about = "its keys depend on its `type`, see below"
        rows.append(f"| {name} | {_kind(value, schema)} | {'' if required else _default(value)} | {_escape(about)} |")
    return "\n".join(rows) + "\n"


def _kind(value: dict[str, Any], schema: dict[str, Any]) -> str:
    """What may be written as the value, in a few words."""
    if value.get("examples", [""])[0] == "256MB":
        return "size"
    if value.get("examples", [""])[0] == "10s":
        return "duration, or `off`" if "off" in value["examples"] else "duration"
    if "$ref" in value or "discriminator" in value:
        return "section"
    if "const" in value:
        return f"`{_written(value['const'])}`"
    if "enum" in value:
        return ", ".join(f"`{each}`" for each in dict.fromkeys(_written(each) for each in value["enum"]))
    if choices := value.get("anyOf") or value.get("oneOf"):
        kinds = [_kind(each, schema) for each in choices if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    match value.get("type"):
        case "array":
            return f"list of {_plural(_kind(value.get('items', {}), schema))}"
        case "object":
            inner = value.get("additionalProperties")
            return f"map of names to {_plural(_kind(inner, schema))}" if isinstance(inner, dict) else "section"
        case "boolean":
            return "`true`, `false`"
        case "integer":
            return "whole number"
        case "number":
            return "number"
        case _:
            return "text"


def _plural(kind: str) -> str:
    return f"{kind}s" if kind in ("text", "section", "number", "whole number", "size", "duration") else kind


def _default(value: dict[str, Any]) -> str:
    default = value.get("default")
    if default in (None, "", [], {}):
        return ""
    example = value.get("examples", [""])[0]
    if example == "256MB":
        return f"`{_size(default)}`"
    if example == "10s":
        return f"`{_duration(default)}`"
    if isinstance(default, list):
        return f"`[{', '.join(_quoted(each) for each in default)}]`"
    return f"`{_written(default)}`"


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) and not value.isalnum() else _written(value)


def _written(value: object) -> str:
    if value is False:
        return "false"
    return "true" if value is True else str(value)


def _size(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if count >= size and count % size == 0:
            return f"{count // size}{unit}"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size and count % size == 0:
            return f"{count // size}{unit}"
    return str(count)


def _duration(seconds: float) -> str:
    if 0 < seconds < 1:
        return f"{round(seconds * 1000)}ms"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{int(seconds // size)}{unit}"
    return f"{seconds:g}s"


def _references(value: Any) -> list[str]:
    """The models that a value may be, or hold."""
    if isinstance(value, list):
        return [found for each in value for found in _references(each)]
    if not isinstance(value, dict) or "discriminator" in value:
        return []
    own = [value["$ref"]] if "$ref" in value else []
    return own + [found for key in ("anyOf", "items", "additionalProperties") for found in _references(value.get(key))]


def _resolve(schema: dict[str, Any], reference: str) -> dict[str, Any]:
    model: dict[str, Any] = schema["$defs"][reference.removeprefix("#/$defs/")]
    return model


def commands_page() -> str:
    """The page of every command with its arguments and options."""
    return _COMMANDS_HEAD + "".join(_command(typer.main.get_command(app), "tailrace", None))


def _command(command: Any, name: str, parent: Any) -> Iterator[str]:
    with command.make_context(name, [], parent=parent, resilient_parsing=True) as context:
        if hasattr(command, "commands"):
            for word, inner in sorted(command.commands.items()):
                if not inner.hidden:
                    yield from _command(inner, word, context)
            return
        yield f"\n## {context.command_path}\n\n"
        pieces = " ".join(command.collect_usage_pieces(context))
        yield f"```\n{context.command_path} {pieces}\n```\n\n{_prose(command.help or '')}\n"
        if records := [record for each in command.params if (record := each.get_help_record(context))]:
            yield "\n| | |\n|---|---|\n"
            yield from (
                f"| `{' '.join(words.split())}` | {_escape(' '.join(text.split()))} |\n"
                for words, text in records
                if "--help" not in words
            )
        if command.epilog:
            example = command.epilog.removeprefix("Example: ")
            yield f"\n```console\n$ {example}\n```\n" if example != command.epilog else f"\n{command.epilog}\n"


def _prose(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def _escape(text: str) -> str:
    """Text for a cell of a table: what a page would read as HTML or as the end of a cell is shown as it is."""
    return re.sub(r"<(?=\w)", "&lt;", text.replace("|", "\\|"))


def api_page() -> str:
    """The page of every route and every answer of the dashboard's API."""
    api = describe()
    rows = ["", "| | answer | |", "|---|---|---|"]
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            rows.append(
                f"| `{method.upper()} {path}{_query(operation)}` | {_answer(operation)} | {operation['summary']} |"
            )
    codes = {
        code: each["description"] for operation in _operations(api) for code, each in operation["responses"].items()
    }
    rows += ["", "| status | |", "|---|---|"]
    rows += [f"| {code} | {codes[code]} |" for code in sorted(codes)]
    parts = ["\n".join(rows) + "\n\n## Answers\n"]
    for name, schema in api["components"]["schemas"].items():
        parts.append(f"\n### {name}\n\n| key | value | |\n|---|---|---|\n")
        parts += [
            f"| `{key}` | {_api_kind(value)} | {_escape(value.get('description', ''))} |\n"
            for key, value in ((key, _known(value)) for key, value in schema["properties"].items())
        ]
    return _API_HEAD + "".join(parts)


def _operations(api: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for methods in api["paths"].values():
        yield from methods.values()


def _query(operation: dict[str, Any]) -> str:
    names = [each["name"] for each in operation["parameters"] if each["in"] == "query"]
    return f"?{'&'.join(names)}" if names else ""


def _answer(operation: dict[str, Any]) -> str:
    [content] = operation["responses"]["200"]["content"].values()
    return _api_kind(content["schema"]) if content["schema"] else ""


def _known(value: dict[str, Any]) -> dict[str, Any]:
    """A value that may be null, as it is when it is not; with `or_null`."""
    if "anyOf" not in value:
        return value
    known: dict[str, Any] = value["anyOf"][0]
    return known | {"or_null": True}


def _api_kind(value: dict[str, Any]) -> str:
    end = " or null" if value.get("or_null") else ""
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()}){end}"
    if "enum" in value:
        return ", ".join(f"`{each}`" for each in value["enum"]) + end
    match value["type"]:
        case "array":
            return f"list of {_api_kind(_known(value['items']))}{end}"
        case "object":
            return f"map of names to {_api_kind(value['additionalProperties'])}s{end}"
        case "string":
            return ("time" if value.get("format") == "date-time" else "text") + end
        case "integer":
            return f"whole number{end}"
        case "boolean":
            return f"`true`, `false`{end}"
        case kind:
            return f"{kind}{end}"


PAGES = {"reference-keys.md": keys_page, "reference-commands.md": commands_page, "api.md": api_page}


def main() -> int:
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
