"""The keys of `source:` with `type: slatedb`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from tailrace.option.value import Duration, FilePath, Options, Secret, Size
from tailrace.source.option import DraftSection, SourceOptions

_PLACE = {"local": "path", "memory": "name", "s3": "bucket", "gcs": "bucket", "azure": "container"}


class ObjectStoreOptions(Options):
    """An object store. Client settings (region, endpoint, credentials) go into `options`, under the client's names."""

    type: Literal["local", "memory", "s3", "gcs", "azure"]
    path: FilePath | None = Field(default=None, description="local: the folder that is the store")
    name: str | None = Field(default=None, description="memory: one of this process, for tests")
    bucket: str | None = Field(default=None, description="s3 and gcs")
    container: str | None = Field(default=None, description="azure")
    options: dict[str, Secret] = Field(
        default={}, description="settings of the client, such as region, endpoint, access_key_id, secret_access_key"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        wanted = _PLACE[self.type]
        for key in ("path", "name", "bucket", "container"):
            given = getattr(self, key) is not None
            if given != (key == wanted):
                what = f"has no {key}" if given else f"needs a {key}"
                raise ValueError(f"of type {self.type} {what}")
        return self


class PartitionOptions(Options):
    """One of several consumers that share the keys: those whose hash modulo `of` is `index`."""

    of: int = Field(ge=1, le=4096, description="into how many shares the keys are divided")
    index: int = Field(ge=0, description="which of them this pipeline follows, from 0")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.index >= self.of:
            raise ValueError("has an index that is not below `of`; the first is 0")
        return self


class SlateDbOptions(SourceOptions):
    """A SlateDB database, followed through the WAL files in its object store."""

    table_keys: ClassVar[frozenset[str]] = frozenset({"mapping"})

    example_address: ClassVar[str] = "store/shop"

    type: Literal["slatedb"]
    path: str = Field(min_length=1, description="the database's path in the store")
    store: ObjectStoreOptions
    wal_store: ObjectStoreOptions | None = Field(default=None, description="where the WAL is, if not in `store`")
    poll: Duration = Field(default=0.1, description="how often the store is asked for a new WAL file")
    min_age: Duration = Field(
        default=300.0, description="the age at which the writer's garbage collector deletes WAL files"
    )
    keep_wal: FilePath | None = Field(
        default=None, description="a folder to copy WAL files to as they appear; on a cluster one every executor sees"
    )
    copy_buffer: Size = Field(
        default=4 << 30,
        ge=0,
        description="how much disk the WAL files may take that appear while a table is copied; 0: they are not kept",
    )
    on_collected: Literal["stop", "resnapshot"] = Field(
        default="stop", description="when a WAL file that is still needed was deleted: stop, or copy again by itself"
    )
    partition: PartitionOptions | None = None

    @classmethod
    def for_address(cls, address: str, *, chosen: bool) -> DraftSection | None:
        """The path of a database in a local store: a store elsewhere takes settings that no address holds."""
        if not chosen or "://" in address:
            return None
        path = Path(address).expanduser().absolute()
        return DraftSection(path.name, {"path": path.name, "store": {"type": "local", "path": str(path.parent)}})

    def needed_extra(self) -> str | None:
        return "slatedb"
