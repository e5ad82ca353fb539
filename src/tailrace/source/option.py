"""Configuration keys that several sources share."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from tailrace.journal import JournalPlace, ObjectPlace
from tailrace.option.value import Location, OptionContext, Options, Secret, Size, TypedOptions
from tailrace.system.environment import ignored


class SourceOptions(TypedOptions):
    """The `source:` section of one type. `table_keys` are the keys of tables.settings that its source supports."""

    table_keys: ClassVar[frozenset[str]] = frozenset()


def _journal_path(value: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> object:
    if value is None and (place := OptionContext.find(info)) is None:
        return None  # set once the source is bound to a pipeline
    return handler(place.state / "journal" if value is None and place else value)


class JournalOptions(Options):
    """Changes that were received and are not applied yet, on disk."""

    path: Annotated[FilePath, WrapValidator(_journal_path, json_schema_input_type=str)] = Field(
        default=None,
        validate_default=True,
        description="default: the folder `journal` in `state`; on a cluster a folder that every executor sees",
    )
    max_bytes: Size = Field(
        default=20_000_000_000, description="above this the receiver pauses, and the upstream keeps the rest"
    )
    segment_bytes: Size = Field(default=64_000_000, ge=1_000_000, description="how large a journal file grows")
