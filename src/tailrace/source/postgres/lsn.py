"""Log sequence numbers: Postgres's place in its WAL, and how they become positions."""

from __future__ import annotations

from tailrace.change import Position, end_of


def parse_lsn(text: str) -> int:
    """`16/B374D848` as an integer."""
    high, _, low = text.partition("/")
    return int(high, 16) << 32 | int(low, 16)


def format_lsn(lsn: int) -> str:
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def before(lsn: int) -> Position:
    """The position behind every commit whose record starts before `lsn`, and before all others.

    A commit at LSN c ends at e, and the next commit starts at e or later; so `before(e)` is the end of c.
    """
    return end_of(lsn - 1)
