"""What some sources can do beyond following. A command checks for the capability, never for a type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable


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
