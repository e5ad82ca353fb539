"""Postgres types as the catalog describes them, and the Arrow type of each.

`docs/types.md` is the same table for people. Any type that is not listed here is kept as its exact text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import psycopg
import pyarrow as pa

from tailrace.source.postgres.pgoutput.message import RelationColumn

NUMERIC: Final = 1700
MAX_DIGITS: Final = 38

_PLAIN: Final[Mapping[int, pa.DataType]] = {
    16: pa.bool_(),  # bool
    17: pa.binary(),  # bytea
    20: pa.int64(),  # int8
    21: pa.int16(),  # int2
    23: pa.int32(),  # int4
    26: pa.int64(),  # oid
    28: pa.int64(),  # xid
    29: pa.int64(),  # cid
    700: pa.float32(),  # float4
    701: pa.float64(),  # float8
    1082: pa.date32(),  # date
    1114: pa.timestamp("us"),  # timestamp
    1184: pa.timestamp("us", "UTC"),  # timestamptz
}

# Built-in array types and their elements: fixed OIDs, so a Relation message can be read without the catalog.
# box[] is not among them: its elements are separated by semicolons.
_ARRAYS: Final[Mapping[int, int]] = {
    143: 142, 199: 114, 210: 71, 270: 75, 271: 5069, 272: 81, 273: 83, 629: 628, 651: 650, 719: 718, 775: 774,
    791: 790, 1000: 16, 1001: 17, 1002: 18, 1003: 19, 1005: 21, 1006: 22, 1007: 23, 1008: 24, 1009: 25, 1010: 27,
    1011: 28, 1012: 29, 1013: 30, 1014: 1042, 1015: 1043, 1016: 20, 1017: 600, 1018: 601, 1019: 602, 1021: 700,
    1022: 701, 1027: 604, 1028: 26, 1034: 1033, 1040: 829, 1041: 869, 1115: 1114, 1182: 1082, 1183: 1083, 1185: 1184,
    1187: 1186, 1231: 1700, 1263: 2275, 1270: 1266, 1561: 1560, 1563: 1562, 2201: 1790, 2207: 2202, 2208: 2203,
    2209: 2204, 2210: 2205, 2211: 2206, 2949: 2970, 2951: 2950, 3221: 3220, 3643: 3614, 3644: 3642, 3645: 3615,
    3735: 3734, 3770: 3769, 3807: 3802, 3905: 3904, 3907: 3906, 3909: 3908, 3911: 3910, 3913: 3912, 3927: 3926,
    4073: 4072, 4090: 4089, 4097: 4096, 4192: 4191, 5039: 5038, 6150: 4451, 6151: 4532, 6152: 4533, 6153: 4534,
    6155: 4535, 6157: 4536,
}  # fmt: skip

_ELEMENTS: Final = frozenset(_ARRAYS.values())


@dataclass(frozen=True)
class CatalogType:
    """One type. A domain has a `base` (and the modifier it puts on it), an array an `element`."""

    oid: int
    delimiter: str
    base: CatalogType | None
    base_typmod: int
    element: CatalogType | None

    def arrow(self, typmod: int) -> pa.DataType:
        """The Arrow type for a column of this type with this `pg_attribute.atttypmod`."""
        if self.base is not None:
            return self.base.arrow(self.base_typmod)
        if self.element is None:
            return _scalar(self.oid, typmod)
        # An array of domains carries no modifier of its own, a domain inside brings one.
        return pa.list_(self.element.arrow(typmod)) if self.element.is_listable(self.delimiter) else pa.string()

    def is_listable(self, delimiter: str) -> bool:
        # An array of domains over arrays would be a list of lists. Its text looks like an array of two dimensions.
        return delimiter == "," and (self.base.is_listable(delimiter) if self.base else self.element is None)


def builtin_arrow(type_oid: int, typmod: int) -> pa.DataType | None:
    """The Arrow type of a type that has the same OID on every server; None for any other, such as user-defined ones."""
    if type_oid in _ARRAYS:
        return pa.list_(_scalar(_ARRAYS[type_oid], typmod))
    return _scalar(type_oid, typmod) if type_oid in _ELEMENTS else None


def agrees(column: RelationColumn, type_: pa.DataType, upstream_type: str) -> bool:
    """Whether values of a Relation message's column may be read as `type_`.

    Of a user-defined type the message has only an OID. Any text fits a string, and a column whose declared type was
    user-defined (a domain) is assumed to have kept it.
    """
    builtin = builtin_arrow(column.type_oid, column.typmod)
    if builtin is not None:
        # Without a precision the pipeline's file may say which decimal type it is.
        is_unbounded = (column.type_oid, column.typmod, upstream_type) == (NUMERIC, -1, "numeric")
        return bool(builtin == type_) or (is_unbounded and pa.types.is_decimal128(type_))
    return bool(pa.types.is_string(type_)) or upstream_type.split("(")[0].removesuffix("[]") not in _BUILTIN_NAMES


_BUILTIN_NAMES: Final = frozenset(
    {"boolean", "bytea", "bigint", "smallint", "integer", "oid", "xid", "cid", "real", "double precision", "date"}
    | {"numeric", "timestamp without time zone", "timestamp with time zone"}
    | {"timestamp", "text", "character varying", "character", "uuid"}
)


def _scalar(oid: int, typmod: int) -> pa.DataType:
    if oid == NUMERIC and typmod >= 4:
        digits = (typmod - 4) >> 16
        # Eleven bits, signed, because scales may be negative.
        scale = (((typmod - 4) & 0x7FF) ^ 1024) - 1024
        if digits <= MAX_DIGITS and 0 <= scale <= digits:
            return pa.decimal128(digits, scale)
    return _PLAIN.get(oid, pa.string())


_TYPES = """
WITH RECURSIVE wanted AS (
    SELECT unnest(%s::oid[]) AS oid
  UNION
    SELECT next.oid FROM wanted JOIN pg_catalog.pg_type t USING (oid),
    LATERAL (VALUES (t.typbasetype), (t.typelem)) AS next (oid)
    WHERE next.oid <> 0
)
SELECT t.oid::int8, t.typdelim::text, t.typbasetype::int8, t.typtypmod,
       CASE WHEN t.typoutput = 'pg_catalog.array_out'::regproc THEN t.typelem ELSE 0 END::int8
FROM pg_catalog.pg_type t JOIN wanted USING (oid)
"""


def read_types(connection: psycopg.Connection[Any], oids: Iterable[int]) -> dict[int, CatalogType]:
    """The types with these OIDs, with everything they are made of. One query."""
    rows = {row[0]: row for row in connection.execute(_TYPES, (sorted(set(oids)),)).fetchall()}

    def build(oid: int) -> CatalogType:
        _, delimiter, base, base_typmod, element = rows[oid]
        return CatalogType(
            oid, delimiter, build(base) if base else None, base_typmod, build(element) if element else None
        )

    return {oid: build(oid) for oid in rows}
