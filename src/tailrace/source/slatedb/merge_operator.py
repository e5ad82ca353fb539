"""Merge operands folded into values: built-in operators, and others by import path.

An operator is `fold(existing, operand) -> value`, where `existing` is None for a key without a value. It must be the
one the writer uses; SlateDB itself decides which operands are folded, in the order of `seq`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from tailrace.errors import ConfigError
from tailrace.source.slatedb.object_store import binding
from tailrace.source.slatedb.value_layout import NUMBERS

Fold = Callable[[bytes | None, bytes], bytes]

BUILT_IN = ("sum", "max", "min", "append", "json_merge")
_CODES = {"int64": "q", "uint64": "Q", "float64": "d"}
_COMBINE: dict[str, Callable[[Any, Any], Any]] = {"sum": lambda a, b: a + b, "max": max, "min": min}


def make(name: str, value_format: str) -> Fold:
    """The operator of that name for values of a format. Raises ConfigError for one that cannot be loaded."""
    if name == "append":
        return lambda existing, operand: (existing or b"") + operand
    if name == "json_merge":
        return lambda existing, operand: _dump(_merge(json.loads(existing or b"{}"), json.loads(operand)))
    if name in _COMBINE:
        return _numeric(_COMBINE[name], name, value_format)
    return _custom(name)


def _numeric(combine: Callable[[Any, Any], Any], name: str, value_format: str) -> Fold:
    read: Callable[[bytes], Any] = json.loads
    write: Callable[[Any], bytes] = _dump
    if value_format in NUMBERS:
        packed = struct.Struct(NUMBERS[value_format][1] + _CODES[value_format.removesuffix("_le")])
        read, write = (lambda value: packed.unpack(value)[0]), packed.pack
    elif value_format not in ("json", "utf8"):
        raise ConfigError(
            f"the merge operator {name} cannot read numbers from values of format {value_format}",
            fix=f"set `value` to one of {', '.join(NUMBERS)}, json or utf8",
        )
    return lambda existing, operand: operand if existing is None else write(combine(read(existing), read(operand)))


def _dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _merge(target: Any, patch: Any) -> Any:
    """JSON Merge Patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge(merged.get(key), value)
    return merged


def _custom(reference: str) -> Fold:
    module, _, name = reference.partition(":")
    if not name:
        raise ConfigError(
            f"{reference} is not a merge operator",
            fix=f"use one of {', '.join(BUILT_IN)}, or `package.module:function` for one of your own",
        )
    try:
        fold = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"cannot load the merge operator {reference}: {error}", fix="install it where tailrace runs"
        ) from error
    made: Fold = fold
    return made


def for_reader(folds: Mapping[bytes, Fold]) -> Any:
    """A merge operator for SlateDB, which calls the one of the key's longest prefix."""
    api = binding()
    prefixes = sorted(folds, key=len, reverse=True)

    def merge(self: object, key: bytes, existing_value: bytes | None, operand: bytes) -> bytes:
        fold = next((folds[prefix] for prefix in prefixes if key.startswith(prefix)), None)
        if fold is None:
            raise api.MergeOperatorCallbackError.Failed("no operator is configured for this key")
        try:
            return fold(existing_value, operand)
        except Exception as error:
            # Leave out the exception's text: it may hold the value.
            raise api.MergeOperatorCallbackError.Failed(f"it raised {type(error).__name__}") from error

    return type("Dispatch", (api.MergeOperator,), {"merge": merge})()
