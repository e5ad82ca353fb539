"""Which tables a pipeline follows: the section `tables` of its file."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from tailrace.option.value import Duration, Off, Options, none_if_off

Name = TypeVar("Name")
Model = TypeVar("Model", bound=Options)


def _pattern(text: str) -> str:
    if "." not in text.strip("."):
        raise ValueError("is not a pattern of schema.table, such as public.orders, public.* or *.*")
    return text


Pattern = Annotated[str, AfterValidator(_pattern)]
"""A glob over `schema.table`, as `TableName` writes it: names with dots or quotes stand in double quotes."""


class ErrorOptions(Options):
    """What happens to a table in error. The others always go on."""

    retry: Literal["timed", "manual", "none"] = Field(
        default="timed", description="retry automatically, on `tailrace retry`, or only with a new copy"
    )
    attempts: int = Field(default=5, ge=1, description="how many attempts before it waits for `tailrace retry`")
    backoff: Duration = Field(default=5.0, description="the wait before the first retry; doubles with each")
    hold: Duration = Field(
        default=86_400.0, description="how long its part of the log is kept; after that it needs a new copy"
    )


class FullDiffOptions(Options):
    """When a table's keys and row hashes are compared with the last ones: after so many polls, or by time."""

    every_cycles: int | None = Field(default=None, ge=1, description="after this many polls of the table")
    every: Duration | None = Field(default=None, gt=0, description="when the last one is this long ago")

    @model_validator(mode="after")
    def _is_due_sometime(self) -> Self:
        if self.every_cycles is None and self.every is None:
            raise ValueError("needs every_cycles or every; write `full_diff: {every_cycles: 10}`")
        return self


class DeleteOptions(Options):
    """How deleted rows are found. Without any of these, polling does not see deletes."""

    soft: str | None = Field(default=None, description="the column that is not null in rows that count as deleted")
    full_diff: FullDiffOptions | None = Field(default=None, description="compare the whole table now and then")


class DecimalOptions(Options):
    """A decimal type."""

    precision: int = Field(ge=1, le=38, description="digits in all")
    scale: int = Field(ge=0, description="digits after the point")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.scale > self.precision:
            raise ValueError("has a scale above its precision")
        return self


def _none_if_disabled(value: object) -> object:
    return None if value == "disabled" else none_if_off(value)


class TableSettings(Options):
    """How tables are kept: for all of them in `defaults`, for single ones in `settings`."""

    schema_changes: Literal["evolve", "ignore", "stop"] = Field(
        default="evolve", description="follow the columns upstream, keep those of the copy, or stop the table"
    )
    truncate: Literal["apply", "ignore"] = Field(default="apply", description="empty the table, or keep its rows")
    errors: ErrorOptions = Field(default_factory=ErrorOptions)
    updated_at: str | None = Field(
        default=None, description="poll: the column that grows with every change of a row; a time or a number"
    )
    created_at: str | None = Field(
        default=None, description="poll: the column that equals updated_at in a row that was only inserted"
    )
    deletes: Annotated[
        DeleteOptions | None,
        BeforeValidator(_none_if_disabled, json_schema_input_type=DeleteOptions | Literal["disabled"] | Off | None),
    ] = Field(default=None, description="poll: how deleted rows are found, or disabled")
    columns: list[str] | None = Field(default=None, min_length=1, description="poll: only these columns, and the key")
    mapping: dict[str, Any] | None = Field(
        default=None, description="slatedb: prefix, key layout, value format, merge operator of the table"
    )
    numeric: dict[str, DecimalOptions] | None = Field(
        default=None, description="postgres: decimal types of columns that are numeric without a precision, by column"
    )


SOURCE_KEYS: Final = frozenset({"updated_at", "created_at", "deletes", "columns", "mapping", "numeric"})
"""Keys of `TableSettings` that only some sources use: those whose options name them in `table_keys`."""


def _named_in_full(settings: dict[str, TableSettings]) -> dict[str, TableSettings]:
    if short := [name for name in settings if "." not in name.strip(".")]:
        raise ValueError(f"takes names in full, as schema.table; {short[0]} is none")
    return settings


class TableOptions(Options):
    """Which tables are followed: those that an include pattern matches and no exclude pattern does."""

    include: list[Pattern] = Field(default=["*.*"], min_length=1, description="patterns such as public.*")
    exclude: list[Pattern] = Field(default=[], description="patterns of tables to leave out")
    defaults: TableSettings = Field(default_factory=TableSettings, description="settings of every table")
    settings: Annotated[dict[str, TableSettings], AfterValidator(_named_in_full)] = Field(
        default={}, description="settings of single tables, by name"
    )

    def settings_of(self, name: str) -> TableSettings:
        """The settings of one table: its own keys where it has them, else the defaults."""
        own = self.settings.get(name)
        return self.defaults if own is None else _merged(self.defaults, own)

    def select(self, names: Iterable[Name]) -> list[Name]:
        """Those of the names that are followed, in their order. Names are matched by their text."""
        return [name for name in names if matches(name, self.include) and not matches(name, self.exclude)]

    def only(self, name: str) -> TableOptions:
        """The same for one table alone, whatever characters its name holds."""
        return self.model_copy(update={"include": [glob.escape(name)]})

    def idle_patterns(self, names: Iterable[object]) -> list[str]:
        """Include patterns that match none of the names: probably typing errors."""
        return idle(self.include, names)


def matches(name: object, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(str(name), pattern) for pattern in patterns)


def idle(patterns: Iterable[str], names: Iterable[object]) -> list[str]:
    """Those of the patterns that match none of the names."""
    known = list(names)
    return [pattern for pattern in patterns if not any(matches(name, [pattern]) for name in known)]


def _merged(general: Model, own: Model) -> Model:
    """The keys that `own` was given, at any depth, over the general ones."""
    given = {key: getattr(own, key) for key in own.model_fields_set}
    nested = {
        key: _merged(known, value)
        for key, value in given.items()
        if isinstance(value, Options) and isinstance(known := getattr(general, key), Options)
    }
    return general.model_copy(update={**given, **nested})
