"""The pipeline's YAML file: reading it, checking it, and reporting what is wrong in it.

    name: shop
    source: {type: postgres, dsn: ${SHOP_DSN}, publication: shop}
    tables: {include: ["public.*"]}
    destination: {type: delta, path: ./lake}
    state: ./.tailrace/shop
    store: {type: sqlite}

The sections `source`, `destination` and `store` belong to their types (see `registry`). Neither Spark nor a
driver is imported here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    create_model,
)
from pydantic_core import ErrorDetails

from tailrace.alert.option import AlertOptions
from tailrace.config import fan_out
from tailrace.config.document import Document, KeyPath, Problem, parse, references, refuse, substitute
from tailrace.config.json_schema import with_references
from tailrace.config.registry import DESTINATIONS, SOURCES, STORES, Registry, store_address
from tailrace.errors import ConfigError, suggest
from tailrace.option.table import SOURCE_KEYS, TableOptions
from tailrace.option.value import Dsn, Duration, FilePath, OptionContext, Options, Secret, Size, TypedOptions, nearest
from tailrace.state.runner import LEASE_SECONDS
from tailrace.state.store import SCHEMA, StoreAddress
from tailrace.system.environment import hide

if TYPE_CHECKING:
    from tailrace.source.source import SourceContext


class BatchOptions(Options):
    """How much one micro-batch may hold. It ends at the first commit past either bound."""

    max_rows: int = Field(default=2_000_000, ge=1, description="rows and changes; a transaction is never split")
    max_bytes: Size = Field(
        default=256_000_000, ge=1, description="a batch of copies may hold as much for every four cores"
    )
    interval: Duration = Field(default=0.0, description="the least time from one batch to the next")


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class SparkOptions(Options):
    """Where the pipeline runs."""

    master: str = Field(default="local[*]", description="local[*], spark://…, yarn, k8s://…")
    conf: dict[str, Annotated[str, BeforeValidator(_plain, json_schema_input_type=str | float | bool)]] = Field(
        default={}, description="any spark.* setting"
    )


class StateStoreOptions(TypedOptions):
    """Where table states and progress are kept. A model of one type narrows `type` and adds the keys of its own."""

    lease: Duration = Field(
        default=LEASE_SECONDS, gt=0, description="how long a runner that does not answer keeps others out"
    )


class SqliteStoreOptions(StateStoreOptions):
    """A file in the `state` folder."""

    type: Literal["sqlite"] = "sqlite"


class PostgresStoreOptions(StateStoreOptions):
    """A database, for several machines."""

    type: Literal["postgres"]
    dsn: Dsn = Field(description="the database that keeps the state")
    schema_name: str = Field(
        default=SCHEMA, alias="schema", min_length=1, max_length=63, description="made on first use"
    )


def _state(value: object, info: ValidationInfo) -> object:
    if isinstance(value, str) and "://" in value:
        raise ValueError(
            "must be a local folder, not a URL; to keep the state on no machine's disk, write store: {type: postgres,"
            " dsn: …} and leave `state` out"
        )
    return OptionContext.of(info).state if value is None else value


def _is_folder(path: Path) -> Path:
    try:
        found = nearest(path)
    except OSError as error:
        raise ValueError(f"is out of reach: {error.strerror}; choose another path, or let this user in") from None
    if not found.is_dir():
        raise ValueError(f"needs a folder, and {found} is a file; choose another path, or move it")
    return path


class PipelineConfig(Options):
    """One pipeline. `source` and `destination` hold the options model of their type. Its repr shows no secret."""

    name: str = Field(pattern=r"^[a-z0-9_-]+$", max_length=63, description="a-z, 0-9, _ and -")
    source: SerializeAsAny[TypedOptions]
    tables: TableOptions = Field(default_factory=TableOptions)
    destination: SerializeAsAny[TypedOptions]
    state: Annotated[FilePath, BeforeValidator(_state, json_schema_input_type=str), AfterValidator(_is_folder)] = Field(
        default=None,
        validate_default=True,
        description="the folder of the pipeline's state; default: .tailrace/<name>",
    )
    store: SerializeAsAny[StateStoreOptions] = Field(default_factory=SqliteStoreOptions)
    batch: BatchOptions = Field(default_factory=BatchOptions)
    spark: SparkOptions = Field(default_factory=SparkOptions)
    alerts: AlertOptions | None = Field(default=None, description="tell people when the pipeline needs them")

    @property
    def store_address(self) -> StoreAddress:
        """Where the pipeline's state is; any process of the pipeline can open it."""
        return store_address(self)

    @property
    def source_context(self) -> SourceContext:
        """What the source is told of the pipeline that it belongs to."""
        from tailrace.source.source import SourceContext

        return SourceContext(self.name, self.tables, self.state)

    @property
    def member(self) -> str | None:
        """The name of the destination where the file has several; None where it has one."""
        return None


@dataclass(frozen=True)
class FanOutPlace:
    """The file's pipeline that a destination belongs to: its name and state, the destination's own name."""

    name: str
    state: Path
    member: str


class MemberConfig(PipelineConfig):
    """One of several destinations of a file, as a pipeline: `shop.lake`, with its state below that of `shop`.

    It reads the same source as the others, whose journal and receiver are those of the file, with a cursor of its own.
    """

    place: FanOutPlace

    @property
    def source_context(self) -> SourceContext:
        from tailrace.source.source import SourceContext, reader_of

        return SourceContext(self.place.name, self.tables, self.place.state, reader_of(self.place.member))

    @property
    def member(self) -> str:
        return self.place.member

    def alone(self) -> PipelineConfig:
        """The pipeline of the file, as if this were its only destination."""
        values = {key: value for key, value in dict(self).items() if key != "place"}
        return PipelineConfig.model_construct(**(values | {"name": self.place.name, "state": self.place.state}))


def load(
    path: str | Path,
    *,
    connects: bool = True,
    environment: Mapping[str, str] | None = None,
    destination: str | None = None,
) -> PipelineConfig:
    """The pipeline a YAML file describes, with `${NAME}` and `${NAME:-default}` taken from the environment.

    Of a file with several destinations the one that is named. A caller that connects to nothing (`connects=False`)
    needs no variable that only source, destinations or alerts use.
    Raises ConfigError that lists what is wrong, by line and key, and never shows a value.
    """
    found = load_all(path, connects=connects, environment=environment, destination=destination)
    if len(found) > 1 or (destination is None and found[0].member is not None):
        names = [str(each.member) for each in found]
        raise ConfigError(
            f"{path} has several destinations: {', '.join(names)}", fix=f"say which: --destination {names[0]}"
        )
    return found[0]


def load_all(
    path: str | Path,
    *,
    connects: bool = True,
    environment: Mapping[str, str] | None = None,
    destination: str | None = None,
) -> list[PipelineConfig]:
    """The pipelines of a file: one for each of its destinations, or for the one that is named. Raises as `load`."""
    document, folder = _read(path)
    found = _validate(document, folder, os.environ if environment is None else environment, connects)
    if destination is None:
        return found
    chosen = [each for each in found if each.member == destination]
    if not chosen:
        known = [each.member for each in found if each.member is not None]
        if not known:
            raise ConfigError(f"{path} has one destination, without a name", fix="leave out --destination")
        raise ConfigError(
            f"{path} has no destination {destination}{suggest(destination, known)}", fix="correct --destination"
        )
    return chosen


def _read(path: str | Path) -> tuple[Document, Path]:
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", fix="give the path of a pipeline's YAML file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}: it is not UTF-8 text", fix="save it as UTF-8") from error
    return parse(text, str(path)), path.resolve().parent


def from_dict(
    data: Mapping[str, Any], *, folder: str | Path = ".", environment: Mapping[str, str] | None = None
) -> PipelineConfig:
    """The same from a dictionary; relative paths start from `folder`. References are replaced here, too.

    A section may be the options themselves, of a class that no file could name.
    """
    found = all_from_dict(data, folder=folder, environment=environment)
    if found[0].member is not None:
        raise ConfigError("a Pipeline has one destination", fix="use FanOut for several")
    return found[0]


def all_from_dict(
    data: Mapping[str, Any], *, folder: str | Path = ".", environment: Mapping[str, str] | None = None
) -> list[PipelineConfig]:
    """The same for each of several destinations: `destinations` may also hold pairs of a name and a destination."""
    document = Document("the configuration", dict(data), {})
    return _validate(document, Path(folder).resolve(), os.environ if environment is None else environment, True)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a pipeline's file, with every type this installation knows. For editors."""
    source, destination, store = (
        _any_of([kinds.model(name) for name in kinds.names()]) for kinds in (SOURCES, DESTINATIONS, STORES)
    )
    model = _with_sections(source, destination, store)
    schema = model.model_json_schema()
    fan_out.named_schema(schema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | with_references(schema)


def _any_of(models: list[type[TypedOptions]]) -> Any:
    return models[0] if len(models) == 1 else Annotated[Union[tuple(models)], Field(discriminator="type")]  # noqa: UP007


def _with_sections(source: Any, destination: Any, store: Any) -> type[PipelineConfig]:
    kept = (store, Field(default_factory=SqliteStoreOptions))
    return create_model(
        "Pipeline", __base__=PipelineConfig, source=(source, ...), destination=(destination, ...), store=kept
    )


def _value_at(options: Any, path: KeyPath) -> Any:
    """The value at the place of a file's key; None if the model keeps it elsewhere."""
    for key in path:
        if isinstance(options, BaseModel):
            fields = type(options).model_fields
            key = next((name for name in fields if key in (name, fields[name].alias)), key)
            options = getattr(options, str(key), None)
        elif isinstance(options, Mapping):
            options = options.get(key)
        elif isinstance(options, list | tuple) and isinstance(key, int) and key < len(options):
            options = options[key]
        else:
            # A secret made of several values, such as a map of headers.
            return options
    return options


def _validate(document: Document, folder: Path, environment: Mapping[str, str], connects: bool) -> list[PipelineConfig]:
    """A pipeline for each destination."""
    data, missing = substitute(document.data, environment)
    needed = ("source", "destination", fan_out.KEY, "alerts")
    if any(connects or problem.path[0] not in needed for problem in missing):
        refuse(document, missing)
    if any(problem.path[0] == "alerts" for problem in missing):
        data = {key: value for key, value in data.items() if key != "alerts"}
    problems: list[Problem] = []
    entries = fan_out.entries_of(data, problems)
    if not entries and not problems:
        found = [_validate_one(document, data, folder, missing, problems)]
    else:
        data = {key: value for key, value in data.items() if key != fan_out.KEY}
        found = [_validate_one(document, data, folder, missing, problems, entry) for entry in entries]
    if problems:
        refuse(document, missing + list(dict.fromkeys(problems)))
    return [each for each in found if each is not None]


def _validate_one(
    document: Document,
    data: dict[str, Any],
    folder: Path,
    missing: Sequence[Problem],
    problems: list[Problem],
    entry: fan_out.Entry | None = None,
) -> PipelineConfig | None:
    """The pipeline, or None and what is wrong with it; of several destinations with the one of this entry."""
    found: list[Problem] = []
    unset = {path[0] for problem in missing if (path := entry.path_of(problem.path) if entry else problem.path)}
    if entry is not None:
        data = {**data, "destination": entry.section}
    source, destination, store = (
        # A reference that stays where it was may be no address, number or duration.
        _or_any(model) if kinds.kind in unset else model
        for kinds in (SOURCES, DESTINATIONS, STORES)
        for model in [_section(data, kinds, found)]
    )
    name = data["name"] if isinstance(data.get("name"), str) else "pipeline"
    state = data["state"] if isinstance(data.get("state"), str) else f".tailrace/{name}"
    place = OptionContext(name, folder, Path(os.path.normpath(folder / Path(state).expanduser())))
    model = _with_sections(source, destination, store)
    valid: PipelineConfig | None = None
    try:
        valid = model.model_validate(data, context=place)
    except ValidationError as error:
        found += [_problem(detail, model) for detail in error.errors(include_input=False, include_url=False)]
    else:
        found += _unhonoured(valid)
        for path, variable in references(document.data):
            inner = entry.path_of(path) if entry else path
            if inner is not None and isinstance(_value_at(valid, inner), Secret):
                hide([variable])
    problems += [Problem(entry.place(one.path), one.message, one.fix) if entry else one for one in found]
    if valid is None or found:
        return None
    if entry is None:
        # A class made for this one file could not be pickled or compared with another's.
        return PipelineConfig.model_construct(**dict(valid))
    return _member(valid, entry, folder)


def _member(valid: PipelineConfig, entry: fan_out.Entry, folder: Path) -> MemberConfig:
    """The pipeline of one of several destinations, whose section has its defaults below the pipeline's own state."""
    of = FanOutPlace(valid.name, valid.state, entry.name)
    name, state = fan_out.place_of(of.name, of.state, of.member)
    own = OptionContext(name, folder, state)
    section = valid.destination
    if isinstance(entry.section, dict) and not isinstance(section, _AnyOptions):
        section = type(section).model_validate(entry.section, context=own)
    values = dict(valid) | {"name": own.name, "state": own.state, "destination": section}
    return MemberConfig.model_construct(**values, place=of)


def _unhonoured(config: PipelineConfig) -> list[Problem]:
    """Keys of tables that the pipeline's source would silently ignore."""
    if isinstance(config.source, _AnyOptions):
        return []
    honoured: frozenset[str] = getattr(type(config.source), "table_keys", frozenset())
    given = {("tables", "defaults"): config.tables.defaults} | {
        ("tables", "settings", name): settings for name, settings in config.tables.settings.items()
    }
    return [
        Problem((*path, key), f"is not for a source of type {config.source.type}", f"remove `{key}`")
        for path, settings in given.items()
        for key in sorted(settings.model_fields_set & SOURCE_KEYS - honoured)
    ]


class _AnyOptions(TypedOptions, extra="allow"):
    """Stands in for a section whose type is unknown, so that the other sections are checked all the same."""

    type: Any = None


def _or_any(model: type[TypedOptions]) -> Any:
    """A model, and what stands in for it where it refuses the section."""
    models = (model, _AnyOptions)
    return Annotated[Union[models], Field(union_mode="left_to_right")]  # noqa: UP007


def _section(data: dict[str, Any], kinds: Registry, problems: list[Problem]) -> type[TypedOptions]:
    section = data.get(kinds.kind)
    if isinstance(section, TypedOptions):
        return type(section)  # made by a program, and checked when it was
    if not isinstance(section, dict):
        return kinds.model(kinds.default) if kinds.default else _AnyOptions
    type_ = section.get("type", kinds.default)
    if not isinstance(type_, str):
        known = ", ".join(kinds.names())
        problems.append(
            Problem((kinds.kind, "type"), f"is missing; it can be {known}", f"add `type:` to `{kinds.kind}`")
        )
        return _AnyOptions
    try:
        return kinds.model(type_)
    except ConfigError as error:
        problems.append(Problem((kinds.kind, "type"), error.message, error.fix))
        return _AnyOptions


def _problem(detail: ErrorDetails, model: type[Options]) -> Problem:
    path = detail["loc"]
    key = str(path[-1]) if path else ""
    match detail["type"]:
        case "extra_forbidden":
            hint = suggest(key, _keys_at(model, path[:-1]))
            near = hint.removeprefix("; did you mean ").removesuffix("?") if "did you mean" in hint else None
            return Problem(
                path, f"is not a key here{hint}", f"rename `{key}` to `{near}`" if near else f"remove `{key}`"
            )
        case "missing":
            return Problem(
                path, "is missing", f"add `{key}:` " + (f"to `{path[-2]}`" if len(path) > 1 else "to the file")
            )
        case "string_pattern_mismatch":
            return Problem(path, "may hold only a-z, 0-9, _ and -")
        case "model_type" | "model_attributes_type" | "dict_type":
            return Problem(path, "must be a section of keys", f"write `{key}: {{…}}`")
        case "path_type":
            return Problem(path, "must be a path, as text")
        case "value_error":
            return Problem(path, detail["msg"].removeprefix("Value error, "))
        case _:
            return Problem(path, detail["msg"].replace("Input should", "should"))


def _keys_at(model: type[Options], path: tuple[str | int, ...]) -> list[str]:
    """The keys that the options model at a path of the file knows."""
    for part in path:
        field = next((f for name, f in model.model_fields.items() if (f.alias or name) == part), None)
        inner = _models_in(field.annotation) if field else []
        if inner:
            model = inner[0]
    return [field.alias or name for name, field in model.model_fields.items()]


def _models_in(annotation: Any) -> list[type[Options]]:
    if isinstance(annotation, type) and issubclass(annotation, Options):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models_in(part)]


__all__ = [
    "BatchOptions",
    "FanOutPlace",
    "MemberConfig",
    "PipelineConfig",
    "PostgresStoreOptions",
    "SparkOptions",
    "SqliteStoreOptions",
    "StateStoreOptions",
    "TableOptions",
    "all_from_dict",
    "from_dict",
    "json_schema",
    "load",
    "load_all",
]
