"""The list `destinations` of a pipeline's file: its entries, each with a name, and where their keys are in the file.

destinations:
  - {name: lake, type: delta, path: ./lake}
  - {name: search, type: webhook, url: https://search.internal/changes}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailrace.config.document import KeyPath, Problem

KEY = "destinations"
_NAME = re.compile(r"[a-z0-9_-]{1,63}")
_EXAMPLE = "write destinations: [{name: lake, type: delta, path: ./lake}, …]"


@dataclass(frozen=True)
class Entry:
    """One of several destinations: its name, its section without the name, and its number in the list."""

    name: str
    section: Any
    number: int

    def place(self, path: KeyPath) -> KeyPath:
        """Where a key of the section `destination` is in the file."""
        return (KEY, self.number, *path[1:]) if path[:1] == ("destination",) else path

    def path_of(self, place: KeyPath) -> KeyPath | None:
        """The other way round; None for a key of another destination."""
        if place[:1] != (KEY,):
            return place
        return ("destination", *place[2:]) if place[1:2] == (self.number,) else None


def entries_of(data: Mapping[str, Any], problems: list[Problem]) -> list[Entry]:
    """The entries of the list, empty where the file has none. What is wrong with the list itself is a problem.

    An entry is a section with a `name`; one from a program may be a pair of name and destination.
    """
    if KEY not in data:
        return []
    if "destination" in data:
        problems.append(Problem((KEY,), "cannot be next to `destination`", "keep one of them"))
    listed = data[KEY]
    if not isinstance(listed, list) or not listed:
        problems.append(Problem((KEY,), "must be a list of destinations, each with a `name`", _EXAMPLE))
        return []
    found: list[Entry] = []
    for number, each in enumerate(listed):
        place = (KEY, number)
        if isinstance(each, tuple):
            name, section = each
        elif isinstance(each, dict):
            name, section = each.get("name"), {key: value for key, value in each.items() if key != "name"}
        else:
            problems.append(Problem(place, "must be a section of keys", _EXAMPLE))
            continue
        if name is None:
            problems.append(Problem((*place, "name"), "is missing", f"add `name:` to each of `{KEY}`"))
        elif not isinstance(name, str) or _NAME.fullmatch(name) is None:
            problems.append(Problem((*place, "name"), "may hold only a-z, 0-9, _ and -, 63 of them at most"))
        elif any(name == one.name for one in found):
            problems.append(Problem((*place, "name"), "is there twice", "give each destination a name of its own"))
        found.append(Entry(str(name), section, number))
    return found


def place_of(name: str, state: Path, member: str) -> tuple[str, Path]:
    """What a destination is called in the state, and its folder, below those of the file's pipeline."""
    return f"{name}.{member}", state / KEY / member


def named_schema(schema: dict[str, Any]) -> None:
    """Let the JSON Schema of a file with one destination also describe a file with several."""
    definitions, one = schema["$defs"], schema["properties"]["destination"]
    mapping = one["discriminator"]["mapping"]
    name = {"type": "string", "pattern": f"^{_NAME.pattern}$", "description": "a-z, 0-9, _ and -"}
    named = {}
    for type_, reference in mapping.items():
        plain = definitions[reference.rpartition("/")[2]]
        title = f"Named{reference.rpartition('/')[2]}"
        definitions[title] = plain | {
            "title": title,
            "properties": {"name": name, **plain["properties"]},
            "required": ["name", *plain.get("required", ())],
        }
        named[type_] = f"#/$defs/{title}"
    items = {
        "discriminator": {"mapping": named, "propertyName": "type"},
        "oneOf": [{"$ref": ref} for ref in named.values()],
    }
    schema["properties"][KEY] = {
        "type": "array",
        "minItems": 1,
        "items": items,
        "description": "instead of `destination`: several, each with a `name` of its own and the keys of its `type`",
    }
    schema["required"] = [key for key in schema["required"] if key != "destination"]
    schema["oneOf"] = [{"required": ["destination"]}, {"required": [KEY]}]
