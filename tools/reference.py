"""Writes the pages of the reference: every key of a pipeline's file, and every option of every command.

    python -m tools.reference       # `make reference` does it

The models and the commands are where a key or an option is described; a test says when a page is out of date.
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


PAGES = {"reference-keys.md": keys_page, "reference-commands.md": commands_page}


def main() -> int:
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
