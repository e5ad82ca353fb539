"""Which files this process has open."""

from __future__ import annotations

from pathlib import Path


def open_below(folder: Path) -> list[str]:
    """The files below a folder that are open in this process, one entry for each descriptor."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = descriptor.readlink()
        except FileNotFoundError:  # closed since
            continue
        if target.is_relative_to(folder.resolve()):
            found.append(str(target))
    return sorted(found)
