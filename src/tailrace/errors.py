"""Every error tailrace raises on purpose, and what each one asks of its reader.

    TailraceError                    anything below; carries what, where, why and the fix
    ├── ConfigError                  the YAML file or a command's argument is wrong
    ├── PreflightError               the upstream or the destination is not set up for this pipeline
    ├── UnavailableError             something is down or out of reach now: retried with backoff
    ├── OwnedError                   another runner owns the pipeline or its slot
    ├── LostError                    the upstream or the journal no longer holds what is still needed
    ├── DamagedError                 stored bytes fail their checksum; they are never served
    └── TableError                   one table cannot go on; every other table does
        ├── SchemaChangedError       the table's columns are not those of the stored version
        ├── UnfitError               a value that the destination's type cannot hold
        └── StaleCopyError           the table changed under its copy, which begins again by itself

Messages never contain row values or secrets.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal


class TailraceError(Exception):
    """What happened (`message`), where (`table`, `position`) and the command or SQL that mends it (`fix`)."""

    exit_code: ClassVar[int] = 1
    retried: ClassVar[bool] = False

    raw: bytes | None = None
    """The change that could not be read, as its upstream sent it, for the dead letter. Never in a message."""

    def __init__(
        self, message: str, *, fix: str | None = None, table: str | None = None, position: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.table = table
        self.position = position

    def __str__(self) -> str:
        places = (("table", self.table), ("at", self.position))
        where = "".join(f" [{label} {value}]" for label, value in places if value)
        return f"{self.message}{where}" + (f"\n  fix: {self.fix}" if self.fix else "")

    def describe(self) -> dict[str, str | None]:
        """The error as JSON values, for another process; `revive` makes it an error again.

        A kind of error that is not defined here goes as its nearest ancestor that is: the other side knows no others.
        """
        return {
            "kind": next(kind.__name__ for kind in type(self).__mro__ if kind.__module__ == __name__),
            "message": self.message,
            "fix": self.fix,
            "table": self.table,
            "position": self.position,
            "raw": base64.b64encode(self.raw).decode() if self.raw is not None else None,
        }

    def __reduce__(self) -> tuple[object, ...]:
        return revive, (self.describe(),)


class ConfigError(TailraceError):
    """The configuration cannot be understood. Nothing was touched."""

    exit_code = 2


class PreflightError(TailraceError):
    """The upstream or the destination lacks what the pipeline needs. Nothing was made."""

    exit_code = 3


class UnavailableError(TailraceError):
    """A server, disk or network does not answer now. The caller backs off and tries again."""

    exit_code = 4
    retried = True


class OwnedError(TailraceError):
    """Somebody else runs this pipeline or reads its slot. This runner must not go on."""

    exit_code = 5


class LostError(TailraceError):
    """Changes that are still needed are gone. Going on would lose rows, so nothing moves."""

    exit_code = 6


class DamagedError(TailraceError):
    """Stored bytes do not match their checksum. They are set aside, never served."""

    exit_code = 7


class TableError(TailraceError):
    """One table is stopped at its position; the others go on."""

    exit_code = 8


class SchemaChangedError(TableError):
    """The upstream's columns differ from the stored version in a way the policy does not allow."""


class UnfitError(TableError):
    """A value does not fit the column's type at the destination and may not be altered."""


class StaleCopyError(TableError):
    """What was copied so far and what is left do not belong together any more."""


def revive(described: Mapping[str, str | None]) -> TailraceError:
    """The error behind what `describe` gave; a plain TailraceError where its kind is not known here."""
    kind = globals().get(described["kind"] or "")
    if not (isinstance(kind, type) and issubclass(kind, TailraceError)):
        kind = TailraceError
    error: TailraceError = kind(
        described["message"] or "",
        fix=described.get("fix"),
        table=described.get("table"),
        position=described.get("position"),
    )
    if raw := described.get("raw"):
        error.raw = base64.b64decode(raw)
    return error


@dataclass(frozen=True)
class Finding:
    """One line of `tailrace check`: what was looked at, whether it will do, and the SQL or command that mends it."""

    level: Literal["ok", "warning", "error"]
    subject: str
    message: str
    fix: str | None = None

    def to_dict(self) -> dict[str, str | None]:
        return {"level": self.level, "subject": self.subject, "message": self.message, "fix": self.fix}


def require(findings: Sequence[Finding]) -> None:
    """Raises PreflightError that lists every error among the findings, with all their fixes."""
    bad = [finding for finding in findings if finding.level == "error"]
    if bad:
        fixes = "\n       ".join(finding.fix for finding in bad if finding.fix)
        raise PreflightError("; ".join(f"{finding.subject}: {finding.message}" for finding in bad), fix=fixes or None)
