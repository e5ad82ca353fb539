"""The keys of `destination:` with `type: postgres`."""

from __future__ import annotations

import string
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from tailrace.option.value import Dsn, TypedOptions


def _pattern(text: str) -> str:
    try:
        fields = [(name, spec, kind) for _, name, spec, kind in string.Formatter().parse(text) if name is not None]
    except ValueError:
        raise ValueError("has an unpaired brace") from None
    if any(field != ("schema", "", None) for field in fields):
        raise ValueError("can only refer to {schema}, the schema of the table upstream")
    if not text.strip():
        raise ValueError("must not be empty")
    return text


class PostgresDestinationOptions(TypedOptions):
    """A replica in a PostgreSQL database, 14 or later."""

    type: Literal["postgres"]
    dsn: Dsn = Field(description="connection string, TLS options included; from the environment: ${REPLICA_DSN}")
    schema_name: Annotated[str, AfterValidator(_pattern)] = Field(
        default="{schema}", alias="schema", description="the schema of a table; {schema} is the one it has upstream"
    )
    native_types: bool = Field(
        default=True,
        description="declare columns as the Postgres type that the upstream names (uuid, jsonb …), or all such as text",
    )
    deletes: Literal["hard", "soft"] = Field(
        default="hard", description="remove deleted rows, or keep them with the time they went"
    )
    metadata: bool = Field(default=False, description="add columns for the position and time of a row's last change")
