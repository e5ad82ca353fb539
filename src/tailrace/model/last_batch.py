"""The last batch that a destination holds: does the next one follow it, repeat it, or do the two not fit together?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class LastBatch:
    """The last batch of a pipeline that a table, or a whole destination, holds. None: not known.

    id        its number
    end       identifies the offset at which it ends: after a restore, another batch can have the same number
    version   the version that the destination itself gives the table; it never goes back
    least     the number of the earliest batch that it can be, if it is not certain that `id` was stored
    table     the name of the table that holds it: one that is renamed is another table at the destination
    """

    id: int
    end: int | None = None
    version: int | None = None
    least: int | None = None
    table: str | None = None

    def __str__(self) -> str:
        return str(self.id) if self.end is None else f"{self.id}-{self.end:016x}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `str`, which has only `id` and `end`."""
        number, _, end = text.partition("-")
        return cls(int(number), int(end, 16) if end else None)

    def is_of(self, table: str) -> bool:
        """Whether the table of this name holds it, as far as that is known."""
        return self.table in (None, table)

    def is_other(self, batch: LastBatch) -> bool:
        """Whether it is certainly not the same batch."""
        return self.id != batch.id or (None not in (self.end, batch.end) and self.end != batch.end)


class MismatchedBatch(Exception):  # noqa: N818 - never raised to a caller outside of a destination
    """The batch that a destination holds last is not the one that comes before the batch to be written."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.fix = fix


def is_repeat(batch: LastBatch, last: LastBatch | None, known: LastBatch | None, *, replaces: bool = False) -> bool:
    """Whether a destination that holds `last` holds `batch` already. Pure.

    `known` is what the state says that it holds, None when the state says nothing. Only an equal batch is a repeat.
    Raises MismatchedBatch when `last` is neither the batch nor what is known, unless the batch `replaces` everything.
    """
    if last is not None and not last.is_other(batch):
        return True
    if not replaces:
        require_known(last, known or LastBatch(batch.id - 1, least=-1))
    return False


def require_known(last: LastBatch | None, known: LastBatch) -> None:
    """Raises MismatchedBatch when a destination that holds `last` is older or newer than the state says it is."""
    least = known.id if known.least is None else known.least
    if (last.id if last is not None else -1) < least:
        held = f"only batch {last.id}" if last is not None else "no batch"
        raise MismatchedBatch(f"the state says that it holds batch {known.id}, but it holds {held}{_OLDER}", _PUT_BACK)
    if last is None:
        return
    if last.id > known.id:
        raise MismatchedBatch(
            f"it holds batch {last.id}, and the state knows of batches up to {known.id}{_NEWER}", _STATE
        )
    if last.id == known.id and last.is_other(known):
        raise MismatchedBatch(f"it holds another batch {last.id} than the one that the state knows{_NEWER}", _STATE)
    if None not in (last.version, known.version) and (last.version or 0) < (known.version or 0):
        raise MismatchedBatch(
            f"the state says that it had version {known.version}, but it has version {last.version}{_OLDER}", _PUT_BACK
        )


_OLDER = ": it was put back to an earlier copy, and changes since then are missing from it"
_NEWER = ": the state was put back to an earlier copy"
_PUT_BACK = "put its last copy back"
_STATE = "put back the state that belongs to it"
