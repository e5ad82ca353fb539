"""JSON answers: encoded and compressed once, for all who ask."""

from __future__ import annotations

import gzip
import hashlib
import json
from functools import cached_property
from typing import Any

_LEAST_BYTES = 1000
"""Shorter bodies are not worth compressing."""
_LEVEL = 4


def encode(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class JsonAnswer:
    """The body of an answer. `tag` says whether two of them are the same."""

    def __init__(self, body: bytes, tag: str | None = None) -> None:
        self.body = body
        self.tag = tag or hashlib.sha256(body).hexdigest()[:20]

    @cached_property
    def compressed(self) -> bytes | None:
        """The same as gzip; None where that is not worth it."""
        return gzip.compress(self.body, _LEVEL, mtime=0) if len(self.body) >= _LEAST_BYTES else None

    @classmethod
    def of(cls, value: Any, *, without: str | None = None) -> JsonAnswer:
        """A value as JSON. Two that differ only in the key `without` have the same tag."""
        body = encode(value).encode()
        if without is None:
            return cls(body)
        compared = encode({key: each for key, each in value.items() if key != without}).encode()
        return cls(body, hashlib.sha256(compared).hexdigest()[:20])
