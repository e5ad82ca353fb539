"""The keys of `source:` with `type: tape`."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field

from tailrace.option.value import Location, Secret
from tailrace.source.option import DraftSection, SourceOptions

_POSITION = re.compile(r"[0-9a-f]{32}")


def _place(value: object) -> object:
    if isinstance(value, datetime):
        value = value.isoformat()
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    if isinstance(value, str) and value.isdigit() and len(value) < 20:
        return _place(int(value))
    if isinstance(value, str) and _POSITION.fullmatch(value):
        return value
    try:
        at = datetime.fromisoformat(str(value))
    except ValueError:
        raise ValueError(
            "must be the number of a batch, a position of 32 hex digits, or a time such as 2026-05-04T12:00:00Z"
        ) from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).isoformat()


class TapeOptions(SourceOptions):
    """A changelog that a pipeline with `destination: {type: parquet}` writes."""

    example_address: ClassVar[str] = "./changes"

    type: Literal["tape"]
    path: Location = Field(description="its folder, or a URL such as s3://bucket/changes")
    storage_options: dict[str, Secret] = Field(default={}, description="credentials and settings of the object store")
    from_: Annotated[int | str | None, BeforeValidator(_place)] = Field(
        default=None,
        alias="from",
        description="where to begin: a batch by number, a position of the upstream, or a time; default: the beginning",
    )

    @classmethod
    def for_address(cls, address: str, *, chosen: bool) -> DraftSection | None:
        if not chosen:
            return None
        name = address.rstrip("/").rpartition("/")[2]
        path = address if "://" in address else str(Path(address).expanduser().absolute())
        return DraftSection(name, {"path": path})

    def beginning(self, place: str) -> Self:
        return self.model_copy(update={"from_": _place(place)})
