"""The fixtures of `format-0.1/`, unpacked for a test."""

from __future__ import annotations

import gzip
import tarfile
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[1] / "fixtures" / "format-0.1"


def unpack(name: str, folder: Path, **changed: dict[str, Any]) -> Path:
    """A stopped pipeline, as it lay; its file. `changed` are keys of sections that cannot be what they were."""
    with tarfile.open(FOLDER / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    file = folder / "pipeline.yaml"
    sections = yaml.safe_load(file.read_text())
    for section, keys in changed.items():
        sections[section] |= keys
    file.write_text(yaml.safe_dump(sections, sort_keys=False))
    # The only absolute path: the destination of the batches, stored to report a change of it.
    mark = folder / "state" / "checkpoint" / "destination"
    kind, _, place = mark.read_text().partition(" ")
    if place.startswith("/"):
        mark.write_text(f"{kind} {folder / Path(place).name}")
    return file


def unpack_state(number: int, folder: Path) -> Path:
    """A folder with a state store of that format."""
    (folder / "state.db").write_bytes(gzip.decompress((FOLDER / f"state-{number}.db.gz").read_bytes()))
    return folder
