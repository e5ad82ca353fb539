"""What orders make of one table's place in an offset, the same for every source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self, TypeVar

from tailrace.source import Phase, TableDirectives


class DirectedTable(Protocol):
    """Where one table stands, as its source writes it down."""

    @property
    def phase(self) -> Phase: ...

    @property
    def request(self) -> int: ...

    @property
    def holds(self) -> bool:
        """Whether a stopped table can go on where it is, for which the log behind that place is kept."""
        ...

    def stop(self, at: Any) -> Self:
        """Not read from now on. Behind `at` it can go on; None: only a new copy helps."""
        ...

    def resume(self) -> Self:
        """Where a stopped table goes on."""
        ...


Table = TypeVar("Table", bound=DirectedTable)
LogPoint = TypeVar("LogPoint")


def apply_directives(
    table: Table,
    upstream_id: str,
    directives: TableDirectives,
    *,
    reached: LogPoint,
    place_of: Callable[[str, LogPoint], LogPoint | None],
) -> Table:
    """The table stopped, resumed or as it was. `reached` is where it is, `place_of` reads where an error left it then.

    A table in error or paused stays where it is, also while it waits for a new copy to begin: what it would read until
    then would be behind the changes that failed.
    """
    if upstream_id in directives.stopped:
        resume = directives.stopped[upstream_id]
        if table.phase != "stopped" or (resume is None and table.holds):
            return table.stop(place_of(resume, reached) if resume else None)
    elif upstream_id in directives.paused:
        if table.phase != "stopped":
            return table.stop(reached if table.phase != "init" else None)
    elif table.phase == "stopped":
        return table.resume()
    return table
