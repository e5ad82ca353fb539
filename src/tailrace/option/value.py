"""What the options of sources, destinations and pipelines are made of.

An options model is a pydantic model that subclasses `Options`: unknown keys are refused, the result is frozen,
sizes and durations are read from human strings, paths are relative to the file they are in, and secrets are never
shown. Import-light: neither pyarrow nor a driver is loaded here.
"""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, core_schema

from tailrace.errors import ConfigError


class Options(BaseModel):
    """A section of the pipeline's file."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, arbitrary_types_allowed=True)


Model = TypeVar("Model", bound=Options)


class TypedOptions(Options):
    """The section of a source or destination. A model of one type narrows `type` to a Literal of its name."""

    type: str

    def needed_extra(self) -> str | None:
        """The extra of tailrace that this section needs, if any. `tailrace doctor` says whether it is installed."""
        return None


@dataclass(frozen=True)
class OptionContext:
    """The pipeline an option belongs to, and the folder its relative paths start from."""

    name: str
    folder: Path
    state: Path

    @classmethod
    def find(cls, info: ValidationInfo) -> OptionContext | None:
        """The place given as validation context; None outside a pipeline, where its defaults cannot be made yet."""
        return info.context if isinstance(info.context, OptionContext) else None

    @classmethod
    def of(cls, info: ValidationInfo) -> OptionContext:
        """The same where there is no way without. Raises ValueError outside a pipeline."""
        if (place := cls.find(info)) is not None:
            return place
        raise ValueError("has a default only inside a pipeline's file; give a value")


def placed(options: Model, place: OptionContext) -> Model:
    """Options that were made outside a pipeline, with the defaults that they have inside this one."""
    return type(options).model_validate(_given(options), context=place)


def _given(options: Options) -> dict[str, Any]:
    fields = type(options).model_fields
    values = {fields[name].alias or name: getattr(options, name) for name in fields if name in options.model_fields_set}
    return {key: _given(value) if isinstance(value, Options) else value for key, value in values.items()}


def require_header_text(token: str, name: str) -> None:
    """Raise ConfigError for a token that no HTTP header can carry."""
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(f"{name} has characters that HTTP cannot send", fix="use printable ASCII characters only")


class Secret:
    """A text that never shows in repr, str, JSON or errors. `reveal()` is the only way to it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    @property
    def masked(self) -> str:
        """What may be shown instead."""
        return "***"

    def __str__(self) -> str:
        return self.masked

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.masked!r})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)

    @classmethod
    def read(cls, value: object) -> Secret:
        """A secret from a string. Raises ValueError, without the value, for anything else or an empty text."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, str) or not value.strip():
            raise ValueError("must be a text that is not empty")
        return cls(value)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.read,
            json_schema_input_schema=core_schema.str_schema(min_length=1),
            serialization=core_schema.to_string_ser_schema(),
        )


class Dsn(Secret):
    """A connection string. Its password and parameters are secret; server, user and database may be shown."""

    __slots__ = ()

    @property
    def masked(self) -> str:
        # Only what a strict reading proves to be harmless is shown: a password with stray @ or / must not slip out.
        if url := _URL.fullmatch(self._text):
            scheme, user, host, database = url.group("scheme", "user", "host", "database")
            return f"{scheme}://{user + ':***@' if user else ''}{host}/{database or ''}"
        if _PAIRS.fullmatch(self._text):
            pairs = _PAIR.findall(self._text)
            return " ".join(f"{key}={value if key in _SHOWN else '***'}" for key, value in pairs)
        return "***"


_URL = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+]*)://(?:(?P<user>[\w.%-]+)(?::[^@/?#]*)?@)?"
    r"(?P<host>[\w.-]*(?::\d+)?)(?:/(?P<database>[\w.%-]*))?(?:\?[^@]*)?"
)
_PAIR = re.compile(r"(\w+)\s*=\s*('(?:\\.|[^'\\])*'|(?:\\.|[^\s'\\=])*)")
_PAIRS = re.compile(rf"\s*(?:{_PAIR.pattern}\s*)+")
_SHOWN = frozenset({"host", "hostaddr", "port", "dbname", "user", "sslmode", "application_name"})

_SIZE_UNITS: dict[str, int] = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("", 1000), ("B", 1000), ("IB", 1024))
}
_SECOND_UNITS = {"us": 1e-6, "ms": 1e-3, "": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"(\d[\d_]*(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_size(value: object) -> int:
    """Bytes from `20GB`, `64MiB`, `1_000` or a number. Raises ValueError for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and value == int(value):
        return int(value)
    if isinstance(value, str) and (found := _QUANTITY.fullmatch(value.strip())):
        number, unit = found.groups()
        if unit.upper() in _SIZE_UNITS:
            return int(float(number.replace("_", "")) * _SIZE_UNITS[unit.upper()])
    raise ValueError("is not a size; write bytes with a unit such as 32MB, 20GB or 1GiB")


def parse_duration(value: object) -> float:
    """Seconds from `500ms`, `5s`, `2m`, `1h`, `7d` or a number of seconds. Raises ValueError for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf"):
        return float(value)
    if isinstance(value, str) and (found := _QUANTITY.fullmatch(value.strip())):
        number, unit = found.groups()
        if unit.lower() in _SECOND_UNITS:
            return float(number.replace("_", "")) * _SECOND_UNITS[unit.lower()]
    raise ValueError("is not a duration; write a number with a unit such as 500ms, 10s, 5m or 7d")


Off = Literal["off", False]
"""How `off` may stand in a file, for schemas of keys that take it: YAML 1.1 reads it as false, YAML 1.2 as text."""


def none_if_off(value: object) -> object:
    """None for `off`, which YAML reads as false; anything else as it is."""
    return None if value is False or value == "off" else value


def _parse_duration_or_off(value: object) -> float | None:
    return None if none_if_off(value) is None else parse_duration(value)


def resolve_path(path: Path, info: ValidationInfo) -> Path:
    """A path relative to the pipeline's file (outside one: to the working directory) as an absolute one."""
    path = path.expanduser()
    return path if path.is_absolute() else Path(os.path.normpath(_folder(info) / path))


def refuse_url(value: object) -> object:
    """A URL is no local path: as one, it would silently become a folder such as `./s3:/bucket`."""
    if isinstance(value, str) and "://" in value:
        raise ValueError("must be a local path, not a URL")
    return value


def nearest(path: Path) -> Path:
    """The path itself if it is there, else the first of the folders above it that is."""
    return next(place for place in (path, *path.parents) if place.exists())


def _resolve_location(location: str, info: ValidationInfo) -> str:
    if not location.strip():
        raise ValueError("must not be empty")
    return location if "://" in location else str(resolve_path(Path(location), info))


def _folder(info: ValidationInfo) -> Path:
    return info.context.folder if isinstance(info.context, OptionContext) else Path.cwd()


_QUANTITY_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "number", "minimum": 0}]}

Size = Annotated[int, BeforeValidator(parse_size), WithJsonSchema(_QUANTITY_SCHEMA | {"examples": ["256MB"]})]
"""A number of bytes, written `32MB`."""

Duration = Annotated[float, BeforeValidator(parse_duration), WithJsonSchema(_QUANTITY_SCHEMA | {"examples": ["10s"]})]
"""A number of seconds, written `500ms`."""

DurationOrOff = Annotated[
    float | None,
    BeforeValidator(_parse_duration_or_off),
    WithJsonSchema({"anyOf": [*_QUANTITY_SCHEMA["anyOf"], {"const": False}], "examples": ["10s", "off"]}),
]
"""A number of seconds, or None for `off`."""

FilePath = Annotated[Path, BeforeValidator(refuse_url, json_schema_input_type=str), AfterValidator(resolve_path)]
"""A local path, relative to the pipeline's file."""

OBJECT_SCHEMES = ("s3", "gs", "az", "abfss")
"""How the URLs of object stores begin."""

Location = Annotated[str, AfterValidator(_resolve_location)]
"""A local path, relative to the pipeline's file, or a URL such as s3://bucket/folder."""


def split_listen(value: str) -> tuple[str, int]:
    """Host and port of an address; an IPv6 host is in brackets. Raises ValueError for anything else."""
    host, colon, port = value.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("has an IPv6 address without brackets; write [::1]:8099")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ValueError("must be host:port, such as 127.0.0.1:8099")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener at this address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
