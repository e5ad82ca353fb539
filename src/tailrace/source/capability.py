"""What some sources can do beyond following. A command checks for the capability, never for a type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from tailrace.model.schema import TableName


@runtime_checkable
class Preparable(Protocol):
    """A source that follows better with something installed upstream. `tailrace prepare` installs it."""

    def setup_sql(self, *, remove: bool) -> str:
        """The statements that install it or, with `remove`, remove it."""
        ...

    def set_up(self, *, remove: bool) -> str:
        """Install or remove it, and return what was done as text. A repeat changes nothing.

        Raises PreflightError when the role may not do this.
        """
        ...


@runtime_checkable
class Receivable(Protocol):
    """A source that an upstream pushes to. `tailrace receive` receives without the pipeline."""

    def receive_until(self, should_stop: Callable[[], bool], on_status: Callable[[dict[str, Any]], None]) -> None:
        """Receive in this process until `should_stop` returns true. `on_status` gets the status about once a second.

        Raises OwnedError when another process receives, UnavailableError when the address is taken or the disk does
        not answer, ConfigError when the certificate cannot be used.
        """
        ...


@dataclass(frozen=True)
class SurveyedTable:
    """A table of an upstream, before there is a pipeline. `rows` is an estimate, None where the upstream has none.

    `reason` says why it is better left out for now, and `fix` what changes that. None: it can be followed as it is.
    """

    table: TableName
    key: tuple[str, ...]
    rows: int | None = None
    reason: str | None = None
    fix: str | None = None


@runtime_checkable
class Surveyable(Protocol):
    """A source that can list all tables of its upstream, also those it would not follow. `tailrace init` shows them."""

    def survey(self) -> list[SurveyedTable]:
        """Every table, whatever `tables` selects and whether or not the upstream is set up. Changes nothing.

        Raises UnavailableError when the upstream does not answer, PreflightError when it refuses.
        """
        ...
