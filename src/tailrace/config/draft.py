"""The text of a new pipeline file. A secret stands in it as a reference to a variable, never as its value."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tailrace.config.document import KeyPath, literal
from tailrace.config.registry import SOURCES
from tailrace.errors import ConfigError
from tailrace.option.value import OptionContext, Options, Secret
from tailrace.source.capability import SurveyedTable
from tailrace.source.option import DraftSection, SourceOptions

_LONGEST_NAME = 50
"""With `tailrace_` before it, also the name of a replication slot."""
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*")
_WORDS = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})
"""Texts that YAML reads as something else where they stand without quotes."""


@dataclass(frozen=True)
class Variable:
    """A variable that the file refers to, what it holds now, and what may be shown instead."""

    name: str
    secret: Secret

    @property
    def is_set(self) -> bool:
        """Whether the environment has it already, with this value."""
        return os.environ.get(self.name) == self.secret.reveal()


@dataclass(frozen=True)
class Draft:
    """A pipeline before it has a file: `source` holds the keys of the section, with references for secrets."""

    name: str
    source: Mapping[str, Any]
    variables: tuple[Variable, ...]

    @property
    def environment(self) -> dict[str, str]:
        """What the references stand for."""
        return {one.name: one.secret.reveal() for one in self.variables}

    def to_dict(self) -> dict[str, Any]:
        """The pipeline with every table, as `from_dict` takes it."""
        return {"name": self.name, "source": dict(self.source), **_REST}


_REST = {"destination": {"type": "delta", "path": "./lake"}}


def choose_section(address: str | None, wanted: str | None) -> tuple[str, DraftSection]:
    """The type and the section for an address; without one, for the example of the type.

    Raises ConfigError, which never shows the address, when no type or not the wanted one fits it.
    """
    if address is None:
        wanted = wanted or "postgres"
        model = _model(wanted)
        section = model.for_address(model.example_address, chosen=True) if model.example_address else None
        if section is None:
            raise ConfigError(
                f"there is no template for sources of type {wanted}",
                fix="docs/configuration.md shows what a file holds",
            )
        return wanted, section
    for type_ in [wanted] if wanted else SOURCES.names():
        if (section := _model(type_).for_address(address, chosen=wanted is not None)) is not None:
            return type_, section
    what = f"an address of a source of type {wanted}" if wanted else "an address that is known"
    raise ConfigError(
        f"this is not {what}",
        fix="write postgresql://user@host/database, the path of an SQLite file, http://host:4001 for rqlite, or name"
        f" the type with --source: {', '.join(SOURCES.names())}",
    )


def _model(type_: str) -> type[SourceOptions]:
    try:
        model = SOURCES.model(type_)
    except ConfigError as error:
        raise ConfigError(f"--source {error.message}", fix=error.fix) from None
    if not issubclass(model, SourceOptions):
        raise ConfigError(f"sources of type {type_} have no template", fix="write the file yourself")
    return model


def make_draft(type_: str, section: DraftSection, name: str | None, folder: Path, variable: str | None = None) -> Draft:
    """The pipeline for a section. `variable` is the one that the address came from.

    Raises ConfigError for a name that a pipeline may not have.
    """
    if name is None:
        name = re.sub(r"[^a-z0-9_-]+", "_", section.name.lower()).strip("_-")[:_LONGEST_NAME] or "pipeline"
    elif not re.fullmatch(r"[a-z0-9_-]{1,63}", name):
        raise ConfigError("--name may hold only a-z, 0-9, _ and -, at most 63 of them", fix="choose another --name")
    place = OptionContext(name, folder, folder / ".tailrace" / name)
    try:
        options = _model(type_).model_validate({"type": type_, **section.keys}, context=place)
    except ValidationError:
        raise ConfigError(
            f"a source of type {type_} cannot be made of this address and name",
            fix="correct the address, or set --name",
        ) from None
    variables: list[Variable] = []

    def write(value: Any, read: Any, path: KeyPath) -> Any:
        if isinstance(read, Secret):
            variables.append(Variable(variable or _variable(name, path, read), read))
            return f"${{{variables[-1].name}}}"
        if isinstance(value, dict):
            return {key: write(item, getattr(read, key, None), (*path, key)) for key, item in value.items()}
        if isinstance(read, Path):
            return _relative(read, folder)
        return literal(value) if isinstance(value, str) else value

    keys = {key: write(value, getattr(options, key), (key,)) for key, value in section.keys.items()}
    return Draft(name, {"type": type_, **keys}, tuple(variables))


def _variable(name: str, path: KeyPath, secret: Secret) -> str:
    """The variable that holds the secret already, else one named after the pipeline and the key."""
    for known, value in os.environ.items():
        if value == secret.reveal() and re.fullmatch(r"[A-Z][A-Z0-9_]*", known):
            return known
    made = re.sub(r"[^A-Z0-9]", "_", "_".join([name, *map(str, path)]).upper())
    return f"_{made}" if made[0].isdigit() else made


def _relative(path: Path, folder: Path) -> str:
    """Relative to the file's folder where it lies in there, so that both can be moved together."""
    return f"./{path.relative_to(folder)}" if path.is_relative_to(folder) else str(path)


def render(draft: Draft, tables: Sequence[SurveyedTable] | None, file: Path, schema: str) -> str:
    """The file's text. `tables` are those of the upstream, None where it was not looked at."""
    lines = [
        f"# yaml-language-server: $schema={schema}",
        "# A pipeline of tailrace, written by `tailrace init`. docs/configuration.md explains every key.",
        "#",
        *(f"#   export {one.name}=…" for one in draft.variables),
        f"#   tailrace check {_shown(file.name)}",
        f"#   tailrace run {_shown(file.name)}",
        "",
        f"name: {quote(draft.name)}",
        "",
        "source:",
        *_section(draft.source, 1),
        *_other_keys(draft),
        "",
        "tables:",
        "  # Patterns of schema.table. One such as public.* also follows tables that are created later.",
        "  include:",
        *_include(tables),
        "  # exclude: []",
        "",
        "destination:",
        *_section(_REST["destination"], 1),
        "",
        f"state: {quote(f'./.tailrace/{draft.name}')}  # progress, checkpoint and journal: keep it",
    ]
    return "\n".join(lines) + "\n"


def _include(tables: Sequence[SurveyedTable] | None) -> Iterator[str]:
    if not any(one.reason is None for one in tables or ()):
        yield '    - "*.*"'
    for one in tables or ():
        pattern = quote(literal(glob.escape(str(one.table))))
        if one.reason is None:
            about = f"key {', '.join(one.key)}" + ("" if one.rows is None else f", about {one.rows:,} rows")
            yield f"    - {pattern}  # {_shown(about)}"
        else:
            yield f"    # - {pattern}  # left out: {_shown(one.reason)}"
            if one.fix:
                yield from (f"    #     {_shown(line)}" for line in f"fix: {one.fix}".split("\n"))


def _section(keys: Mapping[str, Any], depth: int) -> Iterator[str]:
    for key, value in keys.items():
        if isinstance(value, dict):
            yield f"{'  ' * depth}{key}:"
            yield from _section(value, depth + 1)
        else:
            yield f"{'  ' * depth}{key}: {quote(value) if isinstance(value, str) else value}"


def _other_keys(draft: Draft) -> Iterator[str]:
    """The keys that keep their default, as comments."""
    for name, field in _model(draft.source["type"]).model_fields.items():
        key, default = field.alias or name, field.default
        is_section = isinstance(field.annotation, type) and issubclass(field.annotation, Options)
        if key in draft.source or is_section or not field.description:
            continue
        shown = {True: "true", False: "false", None: "…", "": "…"}.get(default, default) if _is_plain(default) else "…"
        yield f"  # {key}: {shown}  # {field.description}"


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def quote(text: str) -> str:
    """The text as a scalar of YAML that every parser reads as this text."""
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return '"' + "".join(_escaped(letter) for letter in text) + '"'


def _escaped(letter: str) -> str:
    if letter in '"\\':
        return f"\\{letter}"
    if letter.isprintable():
        return letter
    return f"\\x{ord(letter):02x}" if ord(letter) < 0x100 else f"\\U{ord(letter):08x}"


def _shown(text: str) -> str:
    """The text in a comment: on one line, whatever it holds."""
    return "".join(letter if letter.isprintable() else _escaped(letter) for letter in text)
