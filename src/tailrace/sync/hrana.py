"""The values and batches of `/v2/pipeline`, in Hrana's JSON."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from typing import Any

SqlValue = str | int | float | bytes | None
_WIDEST = 63


class MalformedBatchError(ValueError):
    """The JSON is not a batch of statements."""


def encode_value(value: SqlValue) -> dict[str, Any]:
    """A value as JSON. JSON has no infinity: write those into the SQL."""
    if value is None:
        return {"type": "null"}
    if isinstance(value, int):
        return {"type": "integer", "value": str(value)}
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("JSON has no infinite numbers")
        return {"type": "float", "value": value}
    if isinstance(value, str):
        return {"type": "text", "value": value}
    return {"type": "blob", "base64": base64.b64encode(value).decode().rstrip("=")}


def decode_value(value: Any) -> SqlValue:
    """The inverse. Raises MalformedBatchError for anything else, also for a float without a value (an infinity)."""
    try:
        match value["type"]:
            case "null":
                return None
            case "integer":
                number = int(value["value"])
                if number.bit_length() > _WIDEST and number != -(1 << _WIDEST):
                    raise MalformedBatchError("an integer has more than 64 bits")
                return number
            case "float":
                return float(value["value"])
            case "text":
                return str(value["value"])
            case "blob":
                text = value["base64"]
                return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (KeyError, TypeError, AttributeError, ValueError, binascii.Error):
        pass
    raise MalformedBatchError("an argument is not a value of Hrana; infinite numbers cannot be sent")


Step = tuple[str, Sequence[SqlValue]]


def encode_transaction(steps: Sequence[Step]) -> dict[str, Any]:
    """A batch that is one transaction on any server, also on one that does not roll back by itself.

    Each step runs only if the one before it succeeded, and what is still open at the end is rolled back.
    """
    chain: list[Step] = [("BEGIN IMMEDIATE", ()), *steps, ("COMMIT", ())]
    encoded = [
        _step(sql, values, {"type": "ok", "step": at - 1} if at else None) for at, (sql, values) in enumerate(chain)
    ]
    encoded.append(_step("ROLLBACK", (), {"type": "not", "cond": {"type": "is_autocommit"}}))
    return _request(encoded)


def encode_query(sql: str, values: Sequence[SqlValue] = ()) -> dict[str, Any]:
    return _request([_step(sql, values, None)])


def _request(steps: list[dict[str, Any]]) -> dict[str, Any]:
    return {"baton": None, "requests": [{"type": "batch", "batch": {"steps": steps}}]}


def _step(sql: str, values: Sequence[SqlValue], condition: Mapping[str, Any] | None) -> dict[str, Any]:
    args = [encode_value(value) for value in values]
    return {"condition": condition, "stmt": {"sql": sql, "args": args, "named_args": [], "want_rows": True}}
