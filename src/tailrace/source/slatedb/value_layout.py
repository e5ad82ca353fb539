"""Values as columns: bytes, text, numbers, JSON or MessagePack with their configured fields."""

from __future__ import annotations

import base64
import datetime
import decimal
import io
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from tailrace.errors import ConfigError
from tailrace.source.slatedb.key_layout import MisfitError, as_text, fixed_width, require

NUMBERS: dict[str, tuple[pa.DataType, str]] = {
    name + suffix: (kind, order)
    for name, kind in (("int64", pa.int64()), ("uint64", pa.uint64()), ("float64", pa.float64()))
    for suffix, order in (("", ">"), ("_le", "<"))
}
"""Values of eight bytes, by format: their type and byte order."""
FORMATS = ("raw", "utf8", "json", "msgpack", *NUMBERS)

_TYPES: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "json": pa.string(),
}
_DECIMAL = re.compile(r"decimal\((\d{1,2}),\s*(\d{1,2})\)")
_EXACT_IN_JSON = {"boolean", "int32", "int64", "float64", "string"}
"""Types that Arrow's JSON reader checks as strictly as we do."""


def column_type(name: str) -> pa.DataType:
    """The Arrow type of a column's configured type. Raises ValueError for an unknown one."""
    if name in _TYPES:
        return _TYPES[name]
    if found := _DECIMAL.fullmatch(name):
        precision, scale = int(found[1]), int(found[2])
        if 1 <= precision <= 38 and scale <= precision:
            return pa.decimal128(precision, scale)
    raise ValueError(f"{name} is not a column type; it can be {', '.join(_TYPES)} or decimal(p,s)")


@dataclass(frozen=True)
class ValueLayout:
    """The format of a prefix's values and, for JSON and MessagePack, the fields that become columns.

    Without columns the value is one column: for MessagePack its JSON text.
    """

    format: str = "raw"
    columns: Mapping[str, str] = field(default_factory=dict)

    @property
    def types(self) -> dict[str, pa.DataType]:
        if self.columns:
            return {name: column_type(kind) for name, kind in self.columns.items()}
        if self.format in NUMBERS:
            return {"value": NUMBERS[self.format][0]}
        return {"value": pa.binary() if self.format == "raw" else pa.string()}

    def decode(self, values: pa.Array[Any]) -> list[pa.Array[Any]]:
        """The columns; null values (of deleted rows) give nulls. Raises MisfitError for the first that does not fit."""
        if self.format == "raw":
            return [values]
        if self.format == "utf8":
            return [as_text(values, "the value")]
        if self.format in NUMBERS:
            kind, order = NUMBERS[self.format]
            require(pc.fill_null(pc.equal(pc.binary_length(values), 8), True), "the value does not have 8 bytes")
            return [fixed_width(values, kind, order)]
        if self.format == "json":
            text = as_text(values, "the value")
            return self._read_json(text) if self.columns else [_checked(text)]
        documents = _unpacked(values)
        if not self.columns:
            return [pa.array([None if one is None else _dump(one[0]) for one in documents], pa.string())]
        return self._columns_of(documents)

    def _read_json(self, text: pa.Array[Any]) -> list[pa.Array[Any]]:
        given = text.drop_null()
        if len(given) and set(self.columns.values()) <= _EXACT_IN_JSON:
            fields = self._read_at_once(given)
            if fields is not None:
                return fields if len(given) == len(text) else [_scattered(one, text) for one in fields]
        documents: list[list[Any] | None] = []
        for index, value in enumerate(text.to_pylist()):
            try:
                documents.append(None if value is None else [json.loads(value, parse_float=decimal.Decimal)])
            except ValueError:
                raise MisfitError(index, "the value is not JSON") from None
        return self._columns_of(documents)

    def _read_at_once(self, text: pa.Array[Any]) -> list[pa.Array[Any]] | None:
        """All documents in one go by Arrow's reader; None when it rejects one of them."""
        trimmed = pc.utf8_trim_whitespace(text)
        if not pc.all(pc.and_(pc.starts_with(trimmed, "{"), pc.ends_with(trimmed, "}"))).as_py():
            return None
        joined = pc.binary_join(pa.ListArray.from_arrays(pa.array([0, len(text)], pa.int32()), trimmed), "\n")
        schema = pa.schema([(name, column_type(kind)) for name, kind in self.columns.items()])
        try:
            table = pyarrow.json.read_json(
                io.BytesIO(joined[0].as_buffer()),
                read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=max(1 << 20, joined.nbytes)),
                parse_options=pyarrow.json.ParseOptions(
                    explicit_schema=schema, newlines_in_values=True, unexpected_field_behavior="ignore"
                ),
            )
        except pa.ArrowInvalid:
            return None
        # Every text begins and ends an object, so as many rows as texts means one of each.
        if table.num_rows != len(text):
            return None
        return [table.column(name).combine_chunks() for name in self.columns]

    def _columns_of(self, documents: list[list[Any] | None]) -> list[pa.Array[Any]]:
        for index, one in enumerate(documents):
            if one is not None and not isinstance(one[0], dict):
                raise MisfitError(index, "the value is not an object with fields")
        found: list[pa.Array[Any]] = []
        for name, kind in self.columns.items():
            convert, cells = _converter(kind), []
            for index, one in enumerate(documents):
                cell = None if one is None else one[0].get(name)
                try:
                    cells.append(None if cell is None else convert(cell))
                except (ValueError, TypeError, OverflowError, decimal.DecimalException):
                    raise MisfitError(index, f"field {name} is not a {kind}") from None
            found.append(_array(cells, name, kind))
        return found


def _array(cells: list[Any], name: str, kind: str) -> pa.Array[Any]:
    try:
        return pa.array(cells, column_type(kind))
    except (pa.ArrowInvalid, OverflowError):
        for index, cell in enumerate(cells):
            try:
                pa.array([cell], column_type(kind))
            except (pa.ArrowInvalid, OverflowError):
                raise MisfitError(index, f"field {name} does not fit {kind}") from None
        raise


def _scattered(dense: pa.Array[Any], like: pa.Array[Any]) -> pa.Array[Any]:
    """Values of the rows that have one, with nulls where `like` has nulls."""
    valid = like.is_valid()
    return pc.replace_with_mask(pa.nulls(len(like), dense.type), valid, dense)


def _checked(text: pa.Array[Any]) -> pa.Array[Any]:
    for index, value in enumerate(text.to_pylist()):
        try:
            if value is not None:
                json.loads(value)
        except ValueError:
            raise MisfitError(index, "the value is not JSON") from None
    return text


def unpack(value: bytes) -> Any:
    """One MessagePack document. Raises ConfigError where the package for it is missing."""
    try:
        msgpack = import_module("msgpack")
    except ImportError as error:
        raise ConfigError(
            "values of format msgpack need the package msgpack", fix="pip install 'tailrace[slatedb]'"
        ) from error
    return msgpack.unpackb(value, timestamp=3, strict_map_key=False)


def _unpacked(values: pa.Array[Any]) -> list[list[Any] | None]:
    documents: list[list[Any] | None] = []
    for index, value in enumerate(values.to_pylist()):
        try:
            documents.append(None if value is None else [unpack(value)])
        except ConfigError:
            raise
        except Exception:  # noqa: BLE001 - the unpacker has an error class of its own for each way to be malformed
            raise MisfitError(index, "the value is not MessagePack") from None
    return documents


def _dump(document: Any) -> str:
    return json.dumps(document, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return str(value)


def _exactly(*kinds: type) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if type(value) not in kinds:
            raise TypeError(type(value).__name__)
        return value

    return convert


def _instant(value: Any) -> datetime.datetime:
    """ISO text with a zone, a number of milliseconds since 1970, or a timestamp of MessagePack."""
    if isinstance(value, datetime.datetime):
        return value
    if isinstance(value, str):
        at = datetime.datetime.fromisoformat(value)
        if at.tzinfo is None:
            raise ValueError("no time zone")
        return at
    if type(value) is not int:
        raise TypeError(type(value).__name__)
    return datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(milliseconds=value)


def _number(value: Any) -> decimal.Decimal:
    if isinstance(value, bool):
        raise TypeError("bool")
    return decimal.Decimal(str(value))


def _converter(kind: str) -> Callable[[Any], Any]:
    by_kind: dict[str, Callable[[Any], Any]] = {
        "boolean": _exactly(bool),
        "int32": _exactly(int),
        "int64": _exactly(int),
        "float64": lambda value: float(_exactly(int, float, decimal.Decimal)(value)),
        "string": _exactly(str),
        "binary": lambda value: base64.b64decode(value, validate=True) if isinstance(value, str) else bytes(value),
        "date": lambda value: datetime.date.fromisoformat(_exactly(str)(value)),
        "timestamp": _instant,
        "json": _dump,
    }
    return by_kind.get(kind, _number)
