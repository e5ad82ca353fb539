"""Small JSON files in which a part says of itself how it stands, for people and for other processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tailrace.system.atomic_file import replace_text


def write_file(file: Path, status: Mapping[str, Any]) -> None:
    """Replace what was said before; the folder is made where it is missing.

    A disk that refuses it, being full perhaps, does not stop the writer: what stands there stays.
    """
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, json.dumps(status))


def read_file(file: Path) -> dict[str, Any]:
    """What was last said; empty before anything was, and for what cannot be read."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
