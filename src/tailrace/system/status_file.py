"""Status files: small JSON files in which a process reports its state to people and other processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tailrace.system.atomic_file import make_private_folder, replace_text


def write_file(file: Path, status: Mapping[str, Any]) -> None:
    """Replace the status file. Creates the folder if it is missing.

    If the disk refuses the write, for example because it is full, the old status stays and no error is raised.
    """
    with suppress(OSError):
        if not file.parent.is_dir():
            make_private_folder(file.parent)
        replace_text(file, json.dumps(status))


def read_file(file: Path) -> dict[str, Any]:
    """The last status; empty if there is none or it cannot be read."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
