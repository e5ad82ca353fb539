"""Advice for operators, by kind of error: what stops, what is retried, and what to do.

`docs/errors.md` prints this table. A kind that is not listed has the advice of its nearest ancestor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tailrace.errors import (
    ConfigError,
    DamagedError,
    LostError,
    MismatchError,
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
    """What an error of one kind stops, how that is retried, and what the operator should do.

    `stops`: the whole pipeline, or only the table that the error concerns.
    `retry`: `timed` is retried automatically after a delay, `manual` when an operator asks for it. `none` is never
    retried: a table needs a new copy, a pipeline a new start.
    `recopies`: the table is copied again, without delay.
    """

    stops: Literal["pipeline", "table"]
    retry: Retry
    text: str
    recopies: bool = False


ADVICE: Mapping[type[TailraceError], Advice] = {
    TailraceError: Advice("pipeline", "manual", "An unexpected error: read the message, and the log with --debug."),
    ConfigError: Advice("pipeline", "manual", "Correct the pipeline file or the command's arguments."),
    PreflightError: Advice("pipeline", "manual", "Run the SQL that `tailrace check FILE` prints, then start again."),
    UnavailableError: Advice(
        "pipeline", "timed", "Nothing to do: the pipeline continues once the server, disk or network is back."
    ),
    OwnedError: Advice("pipeline", "manual", "Stop the other runner, or keep it and stop this one."),
    LostError: Advice(
        "pipeline",
        "none",
        "Restore what was lost. If you cannot, run `tailrace reset FILE`: the next run copies every table again.",
    ),
    DamagedError: Advice(
        "pipeline",
        "none",
        "Restore the file from a backup, or run `tailrace reset FILE`: the next run copies every table again.",
    ),
    TableError: Advice("table", "timed", "Follow the fix in the message; the table continues where it stopped."),
    SchemaChangedError: Advice(
        "table",
        "manual",
        "Set `schema_changes` for the table and run `tailrace retry FILE TABLE`, or run `tailrace resync FILE TABLE`.",
    ),
    UnfitError: Advice(
        "table",
        "timed",
        "Fix the value upstream and run `tailrace resync FILE TABLE`, or skip it: `tailrace errors skip FILE ID`.",
    ),
    MismatchError: Advice(
        "table",
        "manual",
        "Run `tailrace resync FILE TABLE`, or put back the copy that fits and run `tailrace retry FILE TABLE`.",
    ),
    StaleCopyError: Advice("table", "timed", "Nothing to do: the copy restarts automatically.", recopies=True),
}


def advice_for(kind: type[TailraceError]) -> Advice:
    """The advice for a kind of error, its own or that of its nearest ancestor."""
    return next(ADVICE[each] for each in kind.__mro__ if each in ADVICE)
