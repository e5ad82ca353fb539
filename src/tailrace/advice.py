"""What each kind of error means for whoever runs a pipeline: what stops, what is tried again, and what helps.

`docs/errors.md` is this table for people. A kind that is not listed has the advice of its nearest ancestor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tailrace.errors import (
    ConfigError,
    DamagedError,
    LostError,
    OwnedError,
    PreflightError,
    SchemaChangedError,
    StaleCopyError,
    TableError,
    TailraceError,
    UnavailableError,
    UnfitError,
)

Retry = Literal["timed", "manual", "none"]


@dataclass(frozen=True)
class Advice:
    """`stops` says how far an error reaches. `retry` is how what it stopped may come back: by itself after a while,
    when somebody asks for it, or not without a new copy (of a table) or a new start (of a pipeline).

    `anew`: a table comes back with a new copy, and at once.
    """

    stops: Literal["pipeline", "table"]
    retry: Retry
    text: str
    recopies: bool = False


ADVICE: Mapping[type[TailraceError], Advice] = {
    TailraceError: Advice("pipeline", "manual", "Not foreseen: read the message, and the log with --debug."),
    ConfigError: Advice("pipeline", "manual", "Mend the pipeline's file or the command's arguments."),
    PreflightError: Advice("pipeline", "manual", "Run the SQL that `tailrace check FILE` prints, then start again."),
    UnavailableError: Advice(
        "pipeline", "timed", "Nothing to do: it goes on once the server, disk or network is back."
    ),
    OwnedError: Advice("pipeline", "manual", "Stop the other runner, or let it run and stop this one."),
    LostError: Advice(
        "pipeline", "none", "Bring back what was lost, or `tailrace reset FILE` and copy every table anew."
    ),
    DamagedError: Advice(
        "pipeline", "none", "Restore the file from a backup, or `tailrace reset FILE` and copy every table anew."
    ),
    TableError: Advice("table", "timed", "Follow the fix in the message; the table goes on where it stopped."),
    SchemaChangedError: Advice(
        "table",
        "manual",
        "Set `schema_changes` for the table and `tailrace retry FILE TABLE`, or `tailrace resync FILE TABLE`.",
    ),
    UnfitError: Advice(
        "table",
        "timed",
        "Mend the value upstream and `tailrace resync FILE TABLE`, or pass over it: `tailrace errors skip FILE ID`.",
    ),
    StaleCopyError: Advice("table", "timed", "Nothing to do: the copy begins again by itself.", recopies=True),
}


def advice_for(kind: type[TailraceError]) -> Advice:
    """The advice for a kind of error, its own or that of its nearest ancestor."""
    return next(ADVICE[each] for each in kind.__mro__ if each in ADVICE)
