"""The keys of `destination:` with `type: iceberg`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from tailrace.option.value import Duration, Location, Off, Options, Secret, Size, TypedOptions, none_if_off


class CatalogOptions(Options):
    """The catalog that knows the tables."""

    type: Literal["sql", "rest", "glue", "hive"] = Field(default="sql", description="its kind")
    name: str = Field(default="tailrace", min_length=1, description="the name of the catalog")
    uri: Secret | None = Field(
        default=None, description="its address; a SQL catalog without one is the file catalog.db in the warehouse"
    )
    properties: dict[str, Secret] = Field(
        default={}, description="further properties of PyIceberg: credentials of the catalog and the object store"
    )


class IcebergCompactOptions(Options):
    """When files are merged and rows that are marked as deleted are left out, next to the batches."""

    files: int = Field(default=32, ge=2, description="merge small files once a table has this many")
    target_bytes: Size = Field(default=128_000_000, ge=1_000_000, description="how large a merged file grows")


class IcebergVacuumOptions(Options):
    """When files that no listed snapshot needs are deleted."""

    every: Duration = Field(default=3_600.0, description="how often to look for them")
    retention: Duration = Field(default=86_400.0, ge=3_600, description="how long they are kept after they were found")


class IcebergOptions(TypedOptions):
    """Iceberg tables in a warehouse, each in the namespace that is its schema upstream."""

    type: Literal["iceberg"]
    warehouse: Location = Field(description="a folder, or a URL such as s3://bucket/ice")
    catalog: CatalogOptions = Field(default_factory=CatalogOptions, description="the catalog that knows the tables")
    deletes: Literal["hard", "soft"] = Field(
        default="hard", description="remove deleted rows, or keep them with the time they went"
    )
    metadata: bool = Field(default=False, description="add columns for the position and time of a row's last change")
    snapshots: int = Field(default=50, ge=1, description="how many snapshots of a table stay listed")
    compact: Annotated[
        IcebergCompactOptions | None,
        BeforeValidator(none_if_off, json_schema_input_type=IcebergCompactOptions | Off | None),
    ] = Field(default_factory=IcebergCompactOptions, description="when small files are merged, or off")
    vacuum: Annotated[
        IcebergVacuumOptions | None,
        BeforeValidator(none_if_off, json_schema_input_type=IcebergVacuumOptions | Off | None),
    ] = Field(default_factory=IcebergVacuumOptions, description="when unneeded files are deleted, or off")

    @property
    def is_local(self) -> bool:
        """Whether the warehouse is a folder of this machine."""
        return "://" not in self.warehouse or self.warehouse.startswith("file://")

    @model_validator(mode="after")
    def _require_address(self) -> Self:
        if self.catalog.uri is None:
            if self.catalog.type == "rest":
                raise ValueError("catalog.uri is missing: the address of the REST catalog")
            if self.catalog.type == "hive":
                raise ValueError("catalog.uri is missing: the address of the Hive metastore, thrift://host:port")
            if self.catalog.type == "sql" and not self.is_local:
                raise ValueError("catalog.uri is missing: only a warehouse in a folder has its catalog in it")
        return self
