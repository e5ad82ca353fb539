"""The types that `source:` and `destination:` may have, and whether both ends are ready.

Other packages add theirs with an entry point that names the class:

    [project.entry-points."tailrace.destinations"]
    mine = "my_package:MyDestination"

A destination is its own options model. A source and a store have the model of their keys as the attribute `Options`. A
source is made as `MySource(options, context)`, a store by `from_options(options, *, name, state_dir)`. Nothing is
imported before its type is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from tailrace.errors import ConfigError, Finding, suggest
from tailrace.option.value import TypedOptions

if TYPE_CHECKING:
    from tailrace.config.pipeline import PipelineConfig
    from tailrace.destination import Destination
    from tailrace.model.schema import TableSchema
    from tailrace.source.source import Source
    from tailrace.state import StoreAddress


class BuiltIn(NamedTuple):
    """Two references, `module:name`, so that reading a file does not import what it will open."""

    options: str
    opens: str


@dataclass(frozen=True)
class Registry:
    """The types of one kind of section. A built-in type cannot be replaced by an entry point of its name."""

    kind: str
    group: str
    attribute: str
    built_in: dict[str, BuiltIn]
    default: str | None = None

    def names(self) -> list[str]:
        """Every type that can be used in this installation."""
        return sorted({*self.built_in, *(point.name for point in entry_points(group=self.group))})

    def model(self, name: str) -> type[TypedOptions]:
        """The options model of a type. Raises ConfigError for a type that is not installed or has no model."""
        if name in self.built_in:
            return cast(type[TypedOptions], load(self.built_in[name].options))
        found = self.implementation(name)
        is_model = isinstance(found, type) and issubclass(found, TypedOptions)
        model = found if is_model else getattr(found, self.attribute, None)
        if not (isinstance(model, type) and issubclass(model, TypedOptions)):
            raise ConfigError(
                f"the {self.kind} type {name} does not declare its keys",
                fix=f"its class must derive from tailrace.option.value.TypedOptions, or have one as `{self.attribute}`",
            )
        return model

    def implementation(self, name: str) -> Any:
        """The class of a type. Raises ConfigError for a type that is not installed or cannot be imported."""
        if name in self.built_in:
            # What a built-in type needs and may be missing is in the extra of its name.
            return load(self.built_in[name].opens, extra=name)
        reference = next((point.value for point in entry_points(group=self.group) if point.name == name), None)
        if reference is None:
            raise ConfigError(f"names no {self.kind} type that is installed{suggest(name, self.names())}")
        return load(reference)


SOURCES = Registry(
    "source",
    "tailrace.sources",
    "Options",
    {
        "poll": BuiltIn("tailrace.source.poll.option:PollOptions", "tailrace.source.poll.source:PollSource"),
        "postgres": BuiltIn(
            "tailrace.source.postgres.option:PostgresOptions", "tailrace.source.postgres.source:PostgresSource"
        ),
        "rqlite": BuiltIn("tailrace.source.rqlite.option:RqliteOptions", "tailrace.source.rqlite.source:RqliteSource"),
        "slatedb": BuiltIn(
            "tailrace.source.slatedb.option:SlateDbOptions", "tailrace.source.slatedb.source:SlateDbSource"
        ),
        "sqlite": BuiltIn(
            "tailrace.source.sqlite.option:SqliteSourceOptions", "tailrace.source.sqlite.source:SqliteSource"
        ),
        "tape": BuiltIn("tailrace.source.tape.option:TapeOptions", "tailrace.source.tape.source:ChangelogSource"),
        "turso": BuiltIn("tailrace.source.sqlite.option:TursoOptions", "tailrace.source.sqlite.source:SqliteSource"),
    },
)
DESTINATIONS = Registry(
    "destination",
    "tailrace.destinations",
    "options",
    {
        "console": BuiltIn(
            "tailrace.destination.console.option:ConsoleOptions",
            "tailrace.destination.console.destination:ConsoleDestination",
        ),
        "delta": BuiltIn(
            "tailrace.destination.delta.option:DeltaOptions", "tailrace.destination.delta.destination:DeltaDestination"
        ),
        "duckdb": BuiltIn(
            "tailrace.destination.duckdb.option:DuckDbOptions",
            "tailrace.destination.duckdb.destination:DuckDbDestination",
        ),
        "iceberg": BuiltIn(
            "tailrace.destination.iceberg.option:IcebergOptions",
            "tailrace.destination.iceberg.destination:IcebergDestination",
        ),
        "kafka": BuiltIn(
            "tailrace.destination.kafka.option:KafkaOptions", "tailrace.destination.kafka.destination:KafkaDestination"
        ),
        "parquet": BuiltIn(
            "tailrace.destination.parquet.option:ParquetOptions",
            "tailrace.destination.parquet.destination:ParquetDestination",
        ),
        "postgres": BuiltIn(
            "tailrace.destination.postgres.option:PostgresDestinationOptions",
            "tailrace.destination.postgres.destination:PostgresDestination",
        ),
        "sqlite": BuiltIn(
            "tailrace.destination.sqlite.option:SqliteDestinationOptions",
            "tailrace.destination.sqlite.destination:SqliteDestination",
        ),
        "webhook": BuiltIn(
            "tailrace.destination.webhook.option:WebhookOptions",
            "tailrace.destination.webhook.destination:WebhookDestination",
        ),
    },
)

STORES = Registry(
    "store",
    "tailrace.stores",
    "Options",
    {
        "postgres": BuiltIn("tailrace.config.pipeline:PostgresStoreOptions", "tailrace.state.postgres:PostgresStore"),
        "sqlite": BuiltIn("tailrace.config.pipeline:SqliteStoreOptions", "tailrace.state.sqlite:SqliteStore"),
    },
    default="sqlite",
)


def open_source(config: PipelineConfig) -> Source:
    """The source a pipeline reads, as configuration: nothing is connected yet."""
    made = SOURCES.implementation(config.source.type)(config.source, config.source_context)
    return cast("Source", made)


def begin_at(config: PipelineConfig, place: str) -> PipelineConfig:
    """The pipeline from a place in its upstream, as `--from` names it. Raises ConfigError where it cannot choose."""
    from tailrace.source.option import SourceOptions

    options = config.source
    try:
        source = options.beginning(place) if isinstance(options, SourceOptions) else None
    except ValueError as error:
        raise ConfigError(f"the place to begin {error}", fix="correct it") from error
    if source is None:
        raise ConfigError(
            f"a source of type {config.source.type} cannot begin anywhere",
            fix="leave it out; a changelog that destination: {type: parquet} writes can be read from any place",
        )
    return config.model_copy(update={"source": source})


def open_destination(config: PipelineConfig) -> Destination:
    """The destination a pipeline writes, as configuration: nothing is opened yet."""
    from tailrace.destination import Destination

    options = config.destination
    if isinstance(options, Destination):
        return options
    # The class is its options model and what it does with them; its keys were checked when the file was read.
    made = DESTINATIONS.implementation(options.type)
    return cast("Destination", made.model_construct(options.model_fields_set, **dict(options)))


def require_apart(configs: Sequence[PipelineConfig]) -> None:
    """Raise ConfigError where two destinations of a file are the same place: each would overwrite the other's rows."""
    from tailrace.destination import Destination, EventDestination

    seen: dict[str, str | None] = {}
    for config in configs:
        opened = open_destination(config)
        # Events may well go to one place twice, and the name of a class without a name of its own is no place.
        if isinstance(opened, EventDestination) or type(opened).name is Destination.name:
            continue
        place = opened.name
        if place in seen:
            raise ConfigError(
                f"the destinations {seen[place]} and {config.member} both write to {place}",
                fix="give each a place of its own",
            )
        seen[place] = config.member


def store_address(config: PipelineConfig) -> StoreAddress:
    """Where a pipeline keeps its state: nothing is opened yet."""
    made = STORES.implementation(config.store.type).from_options(config.store, name=config.name, state_dir=config.state)
    return cast("StoreAddress", made)


def load(reference: str, *, extra: str | None = None) -> Any:
    """The object that `module:name` names. Raises ConfigError naming what is missing, and the `extra` that has it."""
    module, _, name = reference.partition(":")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if extra is None:
            raise _not_loaded(reference, error) from error
        raise ConfigError(
            f"the type {extra} needs the package {error.name}", fix=f"pip install 'tailrace[{extra}]'"
        ) from error
    except (ImportError, AttributeError) as error:
        raise _not_loaded(reference, error) from error


def _not_loaded(reference: str, error: Exception) -> ConfigError:
    return ConfigError(f"cannot load {reference}: {error}", fix="install the package that provides it, with its extras")


# Is everything ready for a pipeline? `tailrace check` prints these findings, and `tailrace run` begins with them.


def check(source: Source, destination: Destination) -> list[Finding]:
    """All findings of the source and the destination. Changes nothing in either."""
    findings = source.check()
    # A source that is not ready cannot list its tables; the destination itself can still be checked.
    ready = not any(finding.level == "error" and finding.table is None for finding in findings)
    if not ready:
        return findings + destination.check(None)
    tables = source.tables()
    return findings + _unused_settings(source, tables) + destination.check(tables)


def _unused_settings(source: Source, tables: Sequence[TableSchema]) -> list[Finding]:
    """Settings of tables that the pipeline does not follow: probably a typing error."""
    known = [str(table.table) for table in tables]
    return [
        Finding(
            "warning",
            "tables",
            f"settings are given for {name}, which the pipeline does not follow{suggest(name, known[:20])}",
            "correct the name under `tables.settings`, or remove it",
        )
        for name in source.context.tables.settings
        if name not in known
    ]
