"""The JSON Schema of a file: values may also be references to the environment."""

from __future__ import annotations

from typing import Any

_REFERENCE = {"type": "string", "pattern": r"\$\{"}
_ABOUT = frozenset({"title", "description", "default"})
_VALUES = frozenset({"integer", "number", "boolean"})


def with_references(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema, with `${NAME}` allowed wherever a number or a truth value is."""
    if _is_value(schema):
        value = {key: each for key, each in schema.items() if key not in _ABOUT}
        return {key: each for key, each in schema.items() if key in _ABOUT} | {"anyOf": [value, _REFERENCE]}
    return {key: _deeper(key, each) for key, each in schema.items()}


def _deeper(key: str, part: Any) -> Any:
    if key in ("default", "const", "enum"):
        return part
    if key == "anyOf":
        is_lacking = any(map(_is_value, part)) and {"type": "string"} not in part
        return [each if _is_value(each) else with_references(each) for each in part] + [_REFERENCE] * is_lacking
    if isinstance(part, dict):
        return with_references(part)
    return [_deeper("", each) for each in part] if isinstance(part, list) else part


def _is_value(schema: dict[str, Any]) -> bool:
    kind = schema.get("type")  # of a map of properties, the schema of the one with this name
    return isinstance(kind, str) and kind in _VALUES and "const" not in schema
