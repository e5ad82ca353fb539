"""Text of unknown origin on one line, without what a terminal would act on."""

from __future__ import annotations

import json
import re

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
"""Control characters, the line and paragraph separators, and what turns the direction of text."""


def plain(text: str) -> str:
    r"""The text on one line: each character that a terminal would act on as JSON writes it, such as `\n`."""
    return _CONTROL.sub(lambda found: json.dumps(found[0])[1:-1], text)
