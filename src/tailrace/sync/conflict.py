"""Conflicts: an own change that is not pushed yet meets a row that others changed since.

The remote's order of commits decides what all replicas hold in the end, so a policy only decides what this replica
pushes: its own change (which is then the last one), or nothing. Both converge, and so does a merged row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from tailrace.errors import ConfigError
from tailrace.sync.hrana import SqlValue

SyncPolicy = Literal["local", "remote", "stop"]
POLICIES: tuple[SyncPolicy, ...] = ("local", "remote", "stop")
SyncRow = Mapping[str, SqlValue]


@dataclass(frozen=True)
class SyncConflict:
    """One own change and what others did to its row.

    `kind` is insert-insert, update-update (of one column at least), update-delete or delete-update; `own` and
    `theirs` are the row in both versions, None where it is deleted.
    """

    table: str
    kind: str
    key: tuple[SqlValue, ...]
    own: SyncRow | None
    theirs: SyncRow | None


SyncDecision = SyncPolicy | SyncRow
"""Whose version stays; or the values to write instead, by column."""
Decide = Callable[[SyncConflict], SyncDecision]


def choose(policy: str | None, decide: Decide | None) -> Decide:
    """The function that decides. Raises ConfigError for an unknown policy, and for a policy next to a function."""
    if decide is not None:
        if policy is not None:
            raise ConfigError("give a conflict policy or a function, not both", fix="leave one out")
        return decide
    chosen = "local" if policy is None else policy
    if chosen not in POLICIES:
        raise ConfigError(f"unknown conflict policy {chosen!r}", fix=f"use one of {', '.join(POLICIES)}")
    return lambda conflict: chosen
