"""The types that `source:` and `destination:` may have, and whether both ends are ready.

Other packages add theirs with an entry point that names the class; its attribute `options` is the model of its keys:

    [project.entry-points."tailrace.sources"]
    mine = "my_package:MySource"

A source is made by `from_options(options, *, name, tables, state_dir)`, a destination by
`from_options(options, *, name)`. Nothing is imported before its type is asked for.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from tailrace.errors import ConfigError, Finding
from tailrace.option.value import TypedOptions

if TYPE_CHECKING:
    from tailrace.config.pipeline import PipelineConfig
    from tailrace.destination import Destination
    from tailrace.source.source import Source


class BuiltIn(NamedTuple):
    """Two references, `module:name`, so that reading a file does not import what it will open."""

    options: str
    opens: str


@dataclass(frozen=True)
class Registry:
    """The types of one kind of section. A built-in type cannot be replaced by an entry point of its name."""

    kind: str
    group: str
    built_in: dict[str, BuiltIn]

    def names(self) -> list[str]:
        """Every type that can be used in this installation."""
        return sorted({*self.built_in, *(point.name for point in entry_points(group=self.group))})

    def model(self, name: str) -> type[TypedOptions]:
        """The options model of a type. Raises ConfigError for a type nobody provides or one without a model."""
        if name in self.built_in:
            return cast(type[TypedOptions], load(self.built_in[name].options))
        model = getattr(self.implementation(name), "options", None)
        if not (isinstance(model, type) and issubclass(model, TypedOptions)):
            raise ConfigError(
                f"the {self.kind} type {name} does not say which keys it takes",
                fix="its class needs an attribute `options`: a subclass of tailrace.option.value.TypedOptions",
            )
        return model

    def implementation(self, name: str) -> Any:
        """The class of a type. Raises ConfigError for a type nobody provides or one that cannot be imported."""
        if name in self.built_in:
            return load(self.built_in[name].opens)
        reference = next((point.value for point in entry_points(group=self.group) if point.name == name), None)
        if reference is None:
            raise ConfigError(f"names no {self.kind} type that is installed{suggest(name, self.names())}")
        return load(reference)


SOURCES = Registry(
    "source",
    "tailrace.sources",
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
        "turso": BuiltIn("tailrace.source.sqlite.option:TursoOptions", "tailrace.source.sqlite.source:SqliteSource"),
    },
)
DESTINATIONS = Registry(
    "destination",
    "tailrace.destinations",
    {
        "delta": BuiltIn(
            "tailrace.destination.delta.option:DeltaOptions", "tailrace.destination.delta.destination:DeltaDestination"
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


def open_source(config: PipelineConfig) -> Source:
    """The source a pipeline reads, as configuration: nothing is connected yet."""
    made = SOURCES.implementation(config.source.type).from_options(
        config.source, name=config.name, tables=config.tables, state_dir=config.state
    )
    return cast("Source", made)


def open_destination(config: PipelineConfig) -> Destination:
    """The destination a pipeline writes, as configuration: nothing is opened yet."""
    made = DESTINATIONS.implementation(config.destination.type).from_options(config.destination, name=config.name)
    return cast("Destination", made)


def load(reference: str) -> Any:
    """The object behind `module:name`. Raises ConfigError naming what is missing."""
    module, _, name = reference.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"cannot load {reference}: {error}", fix="install the package that provides it, with its extras"
        ) from error


def suggest(word: str, known: list[str]) -> str:
    """`; did you mean x?` for a near miss, else the words that would do."""
    if near := difflib.get_close_matches(word, known, n=1, cutoff=0.6):
        return f"; did you mean {near[0]}?"
    return f"; it can be {', '.join(known)}" if known else ""


# Is everything ready for a pipeline? What `tailrace check` prints and `tailrace run` looks at first.


def check(source: Source, destination: Destination) -> list[Finding]:
    """Everything the source and the destination find. Nothing is changed there."""
    findings = source.check()
    # The tables of a source that is not ready cannot be asked for; where they would go can be looked at all the same.
    ready = not any(finding.level == "error" for finding in findings)
    return findings + destination.check(source.tables() if ready else None)
