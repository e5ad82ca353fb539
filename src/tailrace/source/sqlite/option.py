"""The keys of `source:` with `type: sqlite` and `type: turso`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tailrace.option.value import DurationOrOff, FilePath
from tailrace.source.option import SourceOptions


class CapturedFileOptions(SourceOptions):
    """A database file with a capture table. Its tables are in schema `main`."""

    path: FilePath = Field(description="the database file; on a cluster a path that every executor sees")
    cdc_table: str = Field(default="turso_cdc", min_length=1, description="the capture table")
    chunk_rows: int = Field(default=100_000, ge=1, description="how many rows of a table one task copies")
    purge: DurationOrOff = Field(
        default=None,
        description="take changes out of the capture table once they are applied and this old; or off",
    )


class SqliteSourceOptions(CapturedFileOptions):
    """An SQLite file, captured by `tailrace sqlite enable FILE` or on the connections of its application."""

    type: Literal["sqlite"]


class TursoOptions(CapturedFileOptions):
    """A Turso file, while its application writes it (with the feature multiprocess_wal) or when it is closed."""

    type: Literal["turso"]
