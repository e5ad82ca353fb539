"""Which tables a pipeline follows: the section `tables` of its file."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, Field

from tailrace.option import Duration, Options

Name = TypeVar("Name")


def _pattern(text: str) -> str:
    if "." not in text.strip("."):
        raise ValueError("is not a pattern of schema.table, such as public.orders, public.* or *.*")
    return text


Pattern = Annotated[str, AfterValidator(_pattern)]
"""A glob over `schema.table`, as `TableName` writes it: names with dots or quotes stand in double quotes."""


class ErrorOptions(Options):
    """What happens to a table that cannot go on. The others go on in any case."""

    retry: Literal["timed", "manual", "none"] = Field(
        default="timed", description="try again by itself, when told to, or only with a new copy"
    )
    attempts: int = Field(default=5, ge=1, description="how often it is tried before it waits for somebody")
    backoff: Duration = Field(default=5.0, description="the wait before the first new attempt; doubles with each")
    hold: Duration = Field(
        default=86_400.0, description="how long its part of the log is kept; after that it needs a new copy"
    )


class TableSettings(Options):
    """How tables are kept: for all of them in `defaults`, for single ones in `settings`."""

    schema_changes: Literal["evolve", "ignore", "stop"] = Field(
        default="evolve", description="follow the columns upstream, keep those of the copy, or stop the table"
    )
    truncate: Literal["apply", "ignore"] = Field(default="apply", description="empty the table, or keep its rows")
    errors: ErrorOptions = Field(default_factory=ErrorOptions)


class TableOptions(Options):
    """Which tables are followed. A table is, when an include pattern matches it and no exclude pattern does."""

    include: list[Pattern] = Field(default=["*.*"], min_length=1, description="patterns such as public.*")
    exclude: list[Pattern] = Field(default=[], description="patterns taken out again")
    defaults: TableSettings = Field(default_factory=TableSettings, description="what every table wants")
    settings: dict[str, TableSettings] = Field(default={}, description="what single tables want differently")

    def settings_of(self, name: str) -> TableSettings:
        """What holds for one table: its own keys where it has them, else the defaults."""
        own = self.settings.get(name)
        if own is None:
            return self.defaults
        return self.defaults.model_copy(update={key: getattr(own, key) for key in own.model_fields_set})

    def select(self, names: Iterable[Name]) -> list[Name]:
        """Those of the names that are followed, in their order. Names are matched by their text."""
        return [name for name in names if _matches(str(name), self.include) and not _matches(str(name), self.exclude)]

    def idle_patterns(self, names: Iterable[object]) -> list[str]:
        """Include patterns that match none of the names: probably typing errors."""
        texts = [str(name) for name in names]
        return [pattern for pattern in self.include if not any(fnmatchcase(text, pattern) for text in texts)]


def _matches(text: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(text, pattern) for pattern in patterns)
