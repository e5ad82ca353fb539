"""Keys that several sources have."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationInfo

from tailrace.option.value import FilePath, OptionContext, Options, Size


def _journal_path(value: object, info: ValidationInfo) -> object:
    return OptionContext.of(info).state / "journal" if value is None else value


class JournalOptions(Options):
    """What was received and is not yet applied, on disk."""

    path: Annotated[FilePath, BeforeValidator(_journal_path, json_schema_input_type=str)] = Field(
        default=None,
        validate_default=True,
        description="default: the folder `journal` in `state`; on a cluster a folder that every executor sees",
    )
    max_bytes: Size = Field(
        default=20_000_000_000, description="above this the receiver takes nothing in, and the upstream keeps the rest"
    )
    segment_bytes: Size = Field(default=64_000_000, ge=1_000_000, description="how large a journal file grows")
