"""The keys of `destination:` with `type: delta`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from tailrace.option.table import Pattern
from tailrace.option.value import Duration, Location, Off, Options, Secret, Size, TypedOptions, none_if_off

Updates = Literal["auto", "copy_on_write", "merge_on_read"]
"""What becomes of a file that holds a changed row: it is rewritten, or the row is marked in a deletion vector."""

TableMode = Literal["current", "changelog", "history"]
"""What the rows of a table are: those of upstream, its changes, or the versions of its rows."""


class CompactOptions(Options):
    """When small files are merged into large ones, next to the batches."""

    files: int = Field(default=32, ge=2, description="compact a table once it has this many small files")
    target_bytes: Size = Field(default=128_000_000, ge=1_000_000, description="how large a compacted file grows")


class VacuumOptions(Options):
    """When files that no version needs any more are deleted."""

    every: Duration = Field(default=86_400.0, description="how often")
    retention: Duration = Field(default=7 * 86_400.0, ge=3_600, description="how long old versions can still be read")


class DeltaOptions(TypedOptions):
    """A folder of Delta tables, `<path>/<schema>/<table>`."""

    type: Literal["delta"]
    path: Location = Field(description="a folder, or a URL such as s3://bucket/lake")
    storage_options: dict[str, Secret] = Field(default={}, description="credentials and settings of the object store")
    deletes: Literal["hard", "soft"] = Field(
        default="hard", description="remove deleted rows, or keep them with the time they went"
    )
    metadata: bool = Field(default=False, description="add columns for the position and time of a row's last change")
    partition_by: dict[str, list[str]] = Field(
        default={}, description="columns to partition a table by: {public.orders: [day]}"
    )
    mode: TableMode | dict[Pattern, TableMode] = Field(
        default="current",
        description="what tables keep: current rows, a changelog (a row for each change) or the history of each row"
        " (versions with the time they held), for all tables or by pattern: {public.prices: history}",
    )
    history: list[Pattern] = Field(
        default=[], description="the earlier way to write `mode: {pattern: changelog}`: [public.orders, audit.*]"
    )
    updates: Updates | dict[Pattern, Updates] = Field(
        default="auto",
        description="how changed rows are replaced: auto, copy_on_write or merge_on_read, for all tables or by pattern:"
        " {public.orders: merge_on_read}",
    )
    compact: Annotated[
        CompactOptions | None, BeforeValidator(none_if_off, json_schema_input_type=CompactOptions | Off | None)
    ] = Field(default_factory=CompactOptions, description="when small files are merged, or off")
    vacuum: Annotated[
        VacuumOptions | None, BeforeValidator(none_if_off, json_schema_input_type=VacuumOptions | Off | None)
    ] = Field(default_factory=VacuumOptions, description="when unneeded files are deleted, or off")
