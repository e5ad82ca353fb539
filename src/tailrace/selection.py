"""Which tables a pipeline follows: the section `tables` of its file."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field

from tailrace.option import Options

Name = TypeVar("Name")


def _pattern(text: str) -> str:
    if "." not in text.strip("."):
        raise ValueError("is not a pattern of schema.table, such as public.orders, public.* or *.*")
    return text


Pattern = Annotated[str, AfterValidator(_pattern)]
"""A glob over `schema.table`, as `TableName` writes it: names with dots or quotes stand in double quotes."""


class TableSettings(Options):
    """What one table wants differently. A key belongs here once something honours it; any other is refused."""


class TableOptions(Options):
    """Which tables are followed. A table is, when an include pattern matches it and no exclude pattern does."""

    include: list[Pattern] = Field(default=["*.*"], min_length=1, description="patterns such as public.*")
    exclude: list[Pattern] = Field(default=[], description="patterns taken out again")
    settings: dict[str, TableSettings] = Field(default={}, description="what single tables want differently")

    def select(self, names: Iterable[Name]) -> list[Name]:
        """Those of the names that are followed, in their order. Names are matched by their text."""
        return [name for name in names if _matches(str(name), self.include) and not _matches(str(name), self.exclude)]

    def idle_patterns(self, names: Iterable[object]) -> list[str]:
        """Include patterns that match none of the names: probably typing errors."""
        texts = [str(name) for name in names]
        return [pattern for pattern in self.include if not any(fnmatchcase(text, pattern) for text in texts)]


def _matches(text: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(text, pattern) for pattern in patterns)
