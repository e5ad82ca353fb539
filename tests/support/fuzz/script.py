"""A sequence as a value: what the application did, and where the pipeline stood and died meanwhile.

It prints as Python that runs again, so that a sequence that failed can be put into a test as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Transaction:
    """Statements that commit together. One that fails undoes all of them, and the sequence goes on.

    `joined`: sent as one text, as a migration tool or psql -c does; the server then shows the whole text as the query
    of each command.
    """

    statements: tuple[str, ...]
    joined: bool = False


@dataclass(frozen=True)
class Alone:
    """A statement outside any transaction, such as VACUUM FULL."""

    statement: str


@dataclass(frozen=True)
class Receive:
    """The receiver reads what is committed by now into the journal; `crash` is a failpoint at which all dies."""

    crash: str = ""


@dataclass(frozen=True)
class Batch:
    """One micro-batch, of what the journal holds; `crash` is a failpoint at which all dies."""

    crash: str = ""


@dataclass(frozen=True)
class Discover:
    """The pipeline looks which tables there are, as it does every few seconds."""


@dataclass(frozen=True)
class Restart:
    """The pipeline dies between two batches and starts again."""


@dataclass(frozen=True)
class Settle:
    """The pipeline runs until it has everything."""


@dataclass(frozen=True)
class Resync:
    """An operator asks for a new copy of a table, by its qualified name."""

    table: str


Step = Transaction | Alone | Receive | Batch | Discover | Restart | Settle | Resync


@dataclass(frozen=True)
class Setting:
    """How a sequence is run. `pieces` is how many messages the receiver gets at once, 0 for all of them.

    `frame_bytes` is from which size on a transaction is cut into frames. A batch takes `limit` rows or `limit_bytes`.
    """

    trigger: bool = True
    destination: str = "memory"
    limit: int = 5000
    limit_bytes: int = 64_000_000
    lanes: int = 1
    pieces: int = 0
    frame_bytes: int = 8 * 1024 * 1024


@dataclass(frozen=True)
class Script:
    """A whole sequence: `tables` is SQL that runs before the pipeline begins."""

    tables: tuple[str, ...]
    steps: tuple[Step, ...]
    setting: Setting = field(default_factory=Setting)

    def __str__(self) -> str:
        lines = ["Script("]
        for name, items in (("tables", self.tables), ("steps", self.steps)):
            lines += [f"    {name}=(", *(f"        {_text(item)}," for item in items), "    ),"]
        return "\n".join([*lines, f"    setting={_text(self.setting)},", ")"])


def _text(item: Any) -> str:
    if isinstance(item, str):
        return repr(item)
    given = [
        f"{one.name}={getattr(item, one.name)!r}"
        for one in fields(item)
        if isinstance(item, Transaction | Alone | Resync) or getattr(item, one.name) != one.default
    ]
    if isinstance(item, Transaction) and not item.joined:
        given.pop()
    return f"{type(item).__name__}({', '.join(given)})"
