"""Every error that tailrace raises on purpose, as one tree.

    TailraceError                    anything below; carries what, where, why and the fix
    ├── ConfigError                  the YAML file or a command's argument is wrong
    ├── PreflightError               the upstream or the destination is not set up for this pipeline
    ├── UnavailableError             something is down or out of reach now: retried with backoff
    ├── OwnedError                   another runner owns the pipeline or its slot
    ├── LostError                    the upstream or the journal no longer holds changes that are still needed
    ├── DamagedError                 stored bytes fail their checksum; they are never served
    └── TableError                   one table stops; every other table continues
        ├── SchemaChangedError       the table's columns are not those of the stored version
        ├── UnfitError               the destination's type cannot hold a value
        ├── MismatchError            the table at the destination is older or newer than the state
        └── StaleCopyError           the table changed during its copy, which restarts automatically

Messages never contain row values or secrets.
"""

from __future__ import annotations

import base64
import difflib
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

RESYNC = "tailrace reset FILE, then tailrace run FILE: every table is copied again"
"""The fix when changes that were not read yet are lost."""


class TailraceError(Exception):
    """What happened (`message`), where (`table`, `position`) and the command or SQL that fixes it (`fix`)."""

    code: ClassVar[str] = "unexpected"
    """The stable name of the kind, for people and programs; `docs` is where it is explained."""
    exit_code: ClassVar[int] = 1
    retried: ClassVar[bool] = False

    raw: bytes | None = None
    """The bytes of the unreadable change, as the upstream sent them. For the dead letter; never in a message."""

    def __init__(
        self, message: str, *, fix: str | None = None, table: str | None = None, position: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.table = table
        self.position = position

    @property
    def docs(self) -> str:
        """Where the documentation explains this kind of error."""
        return f"docs/errors.md#{self.code}"

    @property
    def located(self) -> str:
        """What happened and where, without the fix."""
        places = (("table", self.table), ("at", self.position))
        return self.message + "".join(f" [{label} {value}]" for label, value in places if value)

    def __str__(self) -> str:
        # Through Spark only this text arrives: a line break in a name must not begin a line of it.
        first = self.located.replace("\r", "\\r").replace("\n", "\\n")
        return first + ("\n  fix: " + self.fix.replace("\n", "\n       ") if self.fix else "")

    def describe(self) -> dict[str, str | None]:
        """The error as JSON values, to send to another process, where `revive` rebuilds it.

        `kind` names the nearest class that this module defines: the other process may not know a plug-in's classes.
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
    """The configuration is not valid. Nothing was changed."""

    code = "config"
    exit_code = 2


class PreflightError(TailraceError):
    """The upstream or the destination lacks something that the pipeline needs. Nothing was created."""

    code = "preflight"
    exit_code = 3


class UnavailableError(TailraceError):
    """A server, disk or network does not answer now. The caller retries with backoff."""

    code = "unavailable"
    exit_code = 4
    retried = True


class OwnedError(TailraceError):
    """Another process runs this pipeline or reads its slot. This runner must stop."""

    code = "owned"
    exit_code = 5


class LostError(TailraceError):
    """Changes that are still needed are gone. The pipeline stops, because continuing would lose rows."""

    code = "lost"
    exit_code = 6


class DamagedError(TailraceError):
    """Stored bytes do not match their checksum. They are set aside, never served."""

    code = "damaged"
    exit_code = 7


class TableError(TailraceError):
    """One table stops at its position; the others continue."""

    code = "table"
    exit_code = 8


class SchemaChangedError(TableError):
    """The upstream's columns differ from the stored version in a way the policy does not allow."""

    code = "schema-changed"


class UnfitError(TableError):
    """A value does not fit the column's type at the destination and may not be altered."""

    code = "unfit"


class MismatchError(TableError):
    """The table does not hold what the state says it does: one of the two was restored from an earlier copy."""

    code = "mismatch"


class StaleCopyError(TableError):
    """The rows copied so far and those still to be copied no longer belong to the same table or schema."""

    code = "stale-copy"


def revive(described: Mapping[str, str | None]) -> TailraceError:
    """Rebuild the error that `describe` described. An unknown kind becomes a plain TailraceError."""
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
    """One line of `tailrace check`: what was checked, the result, and the SQL or command that fixes it.

    `table` is the name of the table that it is about, as `schema.table`: an error about a table stops only that table.
    An error without one stops the pipeline.
    """

    level: Literal["ok", "warning", "error"]
    subject: str
    message: str
    fix: str | None = None
    table: str | None = None

    def to_dict(self) -> dict[str, str | None]:
        return {
            "level": self.level,
            "subject": self.subject,
            "message": self.message,
            "fix": self.fix,
            "table": self.table,
        }


def require(findings: Sequence[Finding]) -> None:
    """Raise a PreflightError that lists every error about the pipeline, with all their fixes."""
    _refuse([finding for finding in findings if finding.level == "error" and finding.table is None])


def require_all(findings: Sequence[Finding]) -> None:
    """Raise a PreflightError that lists every error, those about single tables included."""
    _refuse([finding for finding in findings if finding.level == "error"])


def require_some(findings: Sequence[Finding], tables: Collection[str]) -> None:
    """Raise a PreflightError that lists every error, when no table is left without one."""
    if tables and problems(findings).keys() >= set(tables):
        require_all(findings)


def problems(findings: Iterable[Finding]) -> dict[str, Finding]:
    """By table, the error that stops it; of several, one that lists them all."""
    found: dict[str, Finding] = {}
    for finding in findings:
        if finding.level == "error" and finding.table is not None:
            known = found.get(finding.table)
            found[finding.table] = finding if known is None else _joined(known, finding)
    return found


def _joined(first: Finding, second: Finding) -> Finding:
    fixes = [finding.fix for finding in (first, second) if finding.fix]
    return replace(first, message=f"{first.message}; {second.message}", fix="\n".join(fixes) or None)


def _refuse(bad: Sequence[Finding]) -> None:
    if bad:
        fixes = "\n".join(finding.fix for finding in bad if finding.fix)
        raise PreflightError("; ".join(f"{finding.subject}: {finding.message}" for finding in bad), fix=fixes or None)


# The text of messages and fixes.

_COMMAND = re.compile(r"(\btailrace (?!sqlite |tape )[a-z]+(?: [a-z]+)? )FILE\b")
"""A command in a message or fix; those of `tailrace sqlite` and `tailrace tape` take another kind of file."""


_OF_ALL = re.compile(r"tailrace (run|prepare|receive|doctor|alert|dashboard)\b")
"""Commands for all destinations of a file together."""


@dataclass(frozen=True)
class PipelinePlace:
    """How commands name a pipeline: by its file and, where the file has several destinations, by one of them."""

    file: Path
    destination: str | None = None

    @classmethod
    def of(cls, file: Path, pipeline: str) -> PipelinePlace:
        """That of a pipeline by its name, in which a dot comes before the destination."""
        return cls(file, pipeline.partition(".")[2] or None)

    def __str__(self) -> str:
        return str(self.file)

    def words(self, command: str) -> str:
        """The arguments of a command."""
        quoted = shlex.quote(str(self.file))
        return (
            quoted
            if self.destination is None or _OF_ALL.match(command)
            else f"{quoted} --destination {self.destination}"
        )


def name_file(text: str | None, file: Path | PipelinePlace | None) -> str | None:
    """The text with the pipeline's file in its commands, ready to be run, instead of the word FILE."""
    if text is None or file is None:
        return text
    place = PipelinePlace(file) if isinstance(file, Path) else file
    return _COMMAND.sub(lambda found: found[1] + place.words(found[1]), text)


def suggest(word: str, known: list[str]) -> str:
    """`; did you mean x?` for a near miss, else the list of valid words."""
    if near := difflib.get_close_matches(word, known, n=1, cutoff=0.6):
        return f"; did you mean {near[0]}?"
    return f"; it can be {', '.join(known)}" if known else ""
