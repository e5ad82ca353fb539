"""The keys of `source:` with `type: poll`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import AfterValidator, Field, ValidationInfo

from tailrace.option.value import Dsn, Duration, resolve_path
from tailrace.source.option import DraftSection, SourceOptions
from tailrace.source.postgres.option import draft_for

FILE_SCHEMES = ("sqlite:///", "duckdb:///")


def _placed(dsn: Dsn, info: ValidationInfo) -> Dsn:
    """A file's path is relative to the pipeline's file, as every other path in it."""
    text = dsn.reveal()
    if "://" not in text and "=" not in text:
        raise ValueError("must begin with a scheme such as postgresql:// or sqlite:///")
    scheme = next((each for each in FILE_SCHEMES if text.startswith(each)), None)
    return dsn if scheme is None else Dsn(scheme + str(resolve_path(path_of(text), info)))


def path_of(dsn: str) -> Path:
    """The file a dsn names: the part after its scheme."""
    return Path(dsn.partition(":///")[2])


def _zone(name: str | None) -> str | None:
    try:
        return ZoneInfo(name).key if name is not None else None
    except (ZoneInfoNotFoundError, ValueError):
        raise ValueError("is not a time zone such as UTC or Europe/Berlin") from None


class PollOptions(SourceOptions):
    """A database that can only be queried: PostgreSQL, an SQLite or DuckDB file, or what a connector adds."""

    table_keys: ClassVar[frozenset[str]] = frozenset({"updated_at", "created_at", "deletes", "columns"})

    example_address: ClassVar[str] = "postgresql://user@localhost:5432/shop"

    type: Literal["poll"]
    dsn: Annotated[Dsn, AfterValidator(_placed)] = Field(
        description="postgresql://…, sqlite:///file.db or duckdb:///file.duckdb; from the environment: ${SHOP_DSN}"
    )
    page_rows: int = Field(default=10_000, ge=1, description="how many rows one query asks for")
    chunk_rows: int = Field(default=200_000, ge=1, description="how many rows of a copy or a full diff one task takes")
    interval: Duration = Field(default=1.0, gt=0, description="from one poll of a busy table to the next")
    idle_interval: Duration = Field(default=30.0, gt=0, description="the same for a table that has long been idle")
    statement_timeout: Duration = Field(default=60.0, gt=0, description="what one query may take")
    max_queries_per_second: float | None = Field(default=None, gt=0, description="for all tasks together")
    parallel: int | None = Field(
        default=None, ge=1, description="tasks that run at once and share max_queries_per_second; default: the cores"
    )
    look_back: Duration | None = Field(
        default=None,
        description="how far back rows are read again; default: 1s where open transactions are seen, else 60s",
    )
    time_zone: Annotated[str | None, AfterValidator(_zone)] = Field(
        default=None, description="of times without a zone; default: the database's own"
    )
    on_bad_watermark: Literal["strict", "permissive"] = Field(
        default="strict",
        description="stop a table whose stored watermark is damaged or of another column, or rewind it",
    )

    @classmethod
    def for_address(cls, address: str, *, chosen: bool) -> DraftSection | None:
        for scheme in FILE_SCHEMES:
            if address.startswith(scheme):
                path = path_of(address).expanduser().absolute()
                return DraftSection(path.stem, {"dsn": f"{scheme}{path}"})
        return draft_for(address) if chosen else None

    def for_look(self) -> Self:
        return self

    def needed_extra(self) -> str | None:
        return "duckdb" if self.dsn.reveal().startswith("duckdb:") else None
