"""What the first bytes of a database file say about it."""

from __future__ import annotations

from pathlib import Path

_MAGIC = b"SQLite format 3\0"
_MVCC_VERSIONS = b"\xff\xff"


def is_mvcc(path: Path) -> bool:
    """Whether Turso keeps the file in MVCC mode, whose versions in the header SQLite does not know.

    Call it only after SQLite refused the file: closing a file drops the locks that this process has on it.
    """
    with path.open("rb") as file:
        header = file.read(20)
    return header.startswith(_MAGIC) and header[18:20] == _MVCC_VERSIONS


MVCC_REASON = "is in Turso's MVCC mode, which other programs cannot read and in which capture is not possible"
MVCC_FIX = "close it in other programs, then in Turso: PRAGMA journal_mode = 'wal'"
