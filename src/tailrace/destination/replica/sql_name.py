"""Names in SQL."""

from __future__ import annotations

from collections.abc import Iterable


def quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def listed(names: Iterable[str]) -> str:
    """Names for SQL, quoted, with commas between them."""
    return ", ".join(map(quote, names))


def fold_ascii(name: str) -> str:
    """A name as a database compares names that disregards the case of ASCII letters, and of no others."""
    return name.translate(_LOWER)


_LOWER = {letter: letter + 32 for letter in range(ord("A"), ord("Z") + 1)}
