"""The keys of `source:` with `type: postgres`."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationInfo

from tailrace.option.table import DecimalOptions
from tailrace.option.value import Dsn, DurationOrOff, OptionContext, Options, Size
from tailrace.source.option import DraftSection, JournalOptions, SourceOptions

_ADDRESS = re.compile(r"postgres(?:ql)?://|\s*\w+\s*=")
_NAME_BYTES = 63  # Postgres silently truncates longer identifiers


def _publication(value: str, info: ValidationInfo) -> str:
    if not value and (place := OptionContext.find(info)) is not None:
        value = place.name
    if len(value.encode()) > _NAME_BYTES:
        raise ValueError(f"is longer than {_NAME_BYTES} bytes")
    return value


def _slot(value: str, info: ValidationInfo) -> str:
    if not value:
        place = OptionContext.find(info)
        if place is None:
            return value  # set once the source is bound to a pipeline
        value = "tailrace_" + re.sub(r"[^a-z0-9_]", "_", place.name.lower())
        if len(value) > _NAME_BYTES:
            raise ValueError(f"made of the pipeline's name is longer than {_NAME_BYTES} bytes; set it, or shorten that")
    if not re.fullmatch(rf"[a-z0-9_]{{1,{_NAME_BYTES}}}", value):
        raise ValueError(f"may hold only a-z, 0-9 and _, at most {_NAME_BYTES} of them")
    return value


class PostgresCopyOptions(Options):
    """The initial copy of a table."""

    chunk_bytes: Size = Field(default=32_000_000, ge=1_000_000, description="how much of a table one task reads")
    parallel: int | None = Field(default=None, ge=1, description="connections that read at once; default: all cores")


class PostgresOptions(SourceOptions):
    """A PostgreSQL database (14 or later), followed through a logical replication slot."""

    table_keys: ClassVar[frozenset[str]] = frozenset({"numeric"})

    example_address: ClassVar[str] = "postgresql://user@localhost:5432/shop"

    type: Literal["postgres"]
    dsn: Dsn = Field(description="connection string, TLS options included; take it from the environment: ${SHOP_DSN}")
    publication: Annotated[str, AfterValidator(_publication)] = Field(
        default="", validate_default=True, description="default: the pipeline's name"
    )
    slot: Annotated[str, AfterValidator(_slot)] = Field(
        default="", validate_default=True, description="default: tailrace_ and the pipeline's name"
    )
    create_publication: bool = Field(default=True, description="create the publication, or add tables that it lacks")
    publish_without_identity: bool = Field(
        default=False,
        description="also publish tables without a replica identity; Postgres then refuses UPDATE and DELETE on them",
    )
    publish_via_partition_root: bool = Field(default=True, description="a partitioned table arrives as one table")
    heartbeat: DurationOrOff = Field(
        default=10.0, description="how often an idle database gets a heartbeat, so that its slot advances; or off"
    )
    messages: bool = Field(
        default=False, description="also follow pg_logical_emit_message, as rows of the table pg_logical.message"
    )
    numeric: DecimalOptions | None = Field(
        default=None, description="the decimal type of columns that are numeric without a precision; default: text"
    )
    acknowledge: Literal["journal", "applied"] = Field(
        default="journal", description="confirm changes to Postgres once in the journal, or once at the destination"
    )
    journal: JournalOptions = Field(default_factory=dict, validate_default=True)
    copying: PostgresCopyOptions = Field(default_factory=PostgresCopyOptions, alias="copy")

    @classmethod
    def for_address(cls, address: str, *, chosen: bool) -> DraftSection | None:
        return draft_for(address)


def draft_for(address: str) -> DraftSection | None:
    """The section for a Postgres connection string; None for anything else."""
    if not _ADDRESS.match(address):
        return None
    from tailrace.system.libpq import read_dsn

    parts = read_dsn(address, "source")
    return DraftSection(str(parts.get("dbname") or parts.get("user") or "postgres"), {"dsn": address})
