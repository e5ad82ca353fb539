"""Configuration keys that several sources share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, Self
from urllib.parse import unquote, urlsplit

from pydantic import Field, ValidationInfo, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from tailrace.option.value import OBJECT_SCHEMES, FilePath, OptionContext, Options, Secret, Size, TypedOptions

if TYPE_CHECKING:
    from tailrace.journal import ObjectPlace


class DraftSection(NamedTuple):
    """The keys of a new `source:` section, without `type`, and a name for the pipeline, which may hold any character.

    Values of a secret key stand here as they were given. A file has a reference to a variable in their place.
    """

    name: str
    keys: dict[str, Any]


class SourceOptions(TypedOptions):
    """The `source:` section of one type. `table_keys` are the keys of tables.settings that its source supports."""

    table_keys: ClassVar[frozenset[str]] = frozenset()
    example_address: ClassVar[str] = ""
    """What `tailrace init` fills into a template of this type; empty: it has none."""

    @classmethod
    def for_address(cls, address: str, *, chosen: bool) -> DraftSection | None:
        """The section for a URL, a connection string or a path; None for an address of another type.

        `chosen`: the user asked for this type. Otherwise only for addresses that no other type follows better. Looks at
        nothing but a file that the address names. Raises ConfigError, without the address, for one that is not valid.
        """
        return None

    def for_look(self) -> Self | None:
        """The same for a second pipeline that changes nothing upstream and may be killed at any moment.

        None, the default: there can be no such pipeline.
        """
        return None

    def beginning(self, place: str) -> Self | None:
        """The same from a place in the upstream: a batch, a position or a time. ValueError for one that is none.

        None, the default: a reader cannot choose where it begins.
        """
        return None


def _journal_path(value: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> object:
    if value is None and (place := OptionContext.find(info)) is None:
        return None  # set once the source is bound to a pipeline
    if isinstance(value, str) and "://" in value:
        url = urlsplit(value)
        if url.scheme == "file":
            return handler(Path(unquote(url.path)))
        if url.scheme not in OBJECT_SCHEMES or not url.netloc:
            known = ", ".join(f"{scheme}://" for scheme in OBJECT_SCHEMES)
            raise ValueError(f"must be a folder, or a URL that begins with {known} and names a bucket")
        return value.rstrip("/")
    if value is None and place is not None:
        return handler(place.state / "journal")
    return handler(Path(value) if isinstance(value, str) else value)


DISK_BYTES = 20_000_000_000
STORE_BYTES = 1_000_000_000_000
"""An object store has no disk to fill, and a copy may last for days, whose log is kept until it is complete."""


def _journal_bytes(value: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> object:
    if value is not None:
        return handler(value)
    return STORE_BYTES if isinstance(info.data.get("path"), str) else DISK_BYTES


class JournalOptions(Options):
    """Changes that were received and are not applied yet."""

    path: Annotated[FilePath | str, WrapValidator(_journal_path, json_schema_input_type=str)] = Field(
        default=None,
        validate_default=True,
        description="default: the folder `journal` in `state`; on a cluster a folder that every executor sees, or a"
        " prefix in an object store, such as s3://bucket/journal",
    )
    storage_options: dict[str, Secret] = Field(
        default={}, description="credentials and settings of the object store; default: from the environment"
    )
    max_bytes: Annotated[Size, WrapValidator(_journal_bytes)] = Field(
        default=None,
        validate_default=True,
        description="default: `20GB`, in an object store `1TB`; above this the receiver pauses, and the upstream keeps"
        " the rest",
    )
    segment_bytes: Size = Field(default=64_000_000, ge=1_000_000, description="how large a journal file grows")

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        if self.storage_options and not isinstance(self.path, str) and self.path is not None:
            raise ValueError("has storage_options, but its `path` is a local folder")
        return self

    @property
    def place(self) -> Path | ObjectPlace:
        """Where the journal is, for those who open it."""
        if not isinstance(self.path, str):
            return self.path
        from tailrace.journal import ObjectPlace

        return ObjectPlace(self.path, {name: value.reveal() for name, value in self.storage_options.items()})

    def local_folder(self, state: Path) -> Path:
        """Where the processes of one machine leave what only they need: in a local journal, next to its segments."""
        return state / "journal" if isinstance(self.path, str) else self.path
