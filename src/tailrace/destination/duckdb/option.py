"""The keys of `destination:` with `type: duckdb`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tailrace.option.value import Duration, FilePath, TypedOptions


class DuckDbOptions(TypedOptions):
    """A replica in one DuckDB file."""

    type: Literal["duckdb"]
    path: FilePath = Field(description="the file; created if it is missing")
    deletes: Literal["hard", "soft"] = Field(
        default="hard", description="remove deleted rows, or keep them with the time they went"
    )
    metadata: bool = Field(default=False, description="add columns for the position and time of a row's last change")
    lock_timeout: Duration = Field(
        default=60.0, gt=0, description="how long to wait while another process has the file open"
    )
