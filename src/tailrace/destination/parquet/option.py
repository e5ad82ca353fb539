"""The keys of `destination:` with `type: parquet`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tailrace.option.value import Location, Secret, TypedOptions


class ParquetOptions(TypedOptions):
    """A changelog in Parquet files, `<path>/<schema>/<table>`."""

    type: Literal["parquet"]
    path: Location = Field(description="a folder, or a URL such as s3://bucket/changes")
    storage_options: dict[str, Secret] = Field(default={}, description="credentials and settings of the object store")
    partition_by: Literal["none", "day"] = Field(
        default="none", description="whether files are in a folder of the day of their commits, `day=2026-11-19`"
    )
