"""What a capture keeps of each change, in the argument form of Turso's pragma: `<mode>[,<table>]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tailrace.errors import ConfigError

DEFAULT_TABLE = "turso_cdc"
MODES = ("id", "before", "after", "full")


@dataclass(frozen=True)
class Mode:
    """id: which row; before, after: that image as well; full: both and which columns an update changed."""

    name: str
    table: str

    @property
    def has_before(self) -> bool:
        return self.name in ("before", "full")

    @property
    def has_after(self) -> bool:
        return self.name in ("after", "full")

    @property
    def has_updates(self) -> bool:
        return self.name == "full"

    def __str__(self) -> str:
        return f"{self.name},{self.table}"


class CaptureState(NamedTuple):
    """What the pragma reads back: ('full', 'turso_cdc', 'v2'), or ('off', None, None)."""

    mode: str
    table: str | None
    version: str | None

    def to_dict(self) -> dict[str, str | None]:
        return {"mode": self.mode, "table": self.table, "version": self.version}


OFF = CaptureState("off", None, None)


def parse_mode(argument: str) -> Mode | None:
    """The mode that `<mode>[,<table>]` asks for; None for `off`. Raises ConfigError for anything else."""
    name, _, table = (part.strip() for part in argument.partition(","))
    if name == "off":
        return None
    if name not in MODES:
        raise ConfigError(
            f"unknown capture mode {name!r}", fix=f"use one of {', '.join(MODES)}, off; then optionally ,TABLE"
        )
    if table.lower().startswith("sqlite_"):
        raise ConfigError(f"{table} cannot be a capture table", fix="names that begin with sqlite_ are SQLite's own")
    return Mode(name, table or DEFAULT_TABLE)
