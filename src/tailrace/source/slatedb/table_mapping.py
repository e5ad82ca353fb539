"""Tables over keys and values: which prefix is which table, and what its columns are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import pyarrow as pa
from pydantic import Field, ValidationError

from tailrace.errors import ConfigError
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.option.table import TableOptions
from tailrace.option.value import Options
from tailrace.source.slatedb import merge_operator
from tailrace.source.slatedb.key_layout import KeyLayout
from tailrace.source.slatedb.value_layout import FORMATS, ValueLayout, column_type

Metadata = Literal["seq", "create_ts", "expire_ts"]
_METADATA: dict[Metadata, pa.DataType] = {
    "seq": pa.int64(),
    "create_ts": pa.timestamp("us", "UTC"),
    "expire_ts": pa.timestamp("us", "UTC"),
}


class MappingOptions(Options):
    """`mapping` of a table in `tables.settings`: which keys are its rows, and how they are read."""

    prefix: str = Field(default="", description="the keys of the table begin with it: text, or 0x and hex digits")
    key: Literal["raw", "utf8"] | dict[str, str] = Field(
        default="raw", description="one column `key`, or fields by name: {tenant: utf8, id: uint64}"
    )
    separator: str | None = Field(default=None, min_length=1, description="between the fields of the key")
    value: str = Field(default="raw", description=", ".join(FORMATS))
    columns: dict[str, str] = Field(default={}, description="fields of json and msgpack values, with their types")
    metadata: list[Metadata] = Field(
        default=["seq", "create_ts", "expire_ts"], description="what SlateDB knows of a row, as columns"
    )
    keep: Literal["current", "changelog"] = Field(
        default="current", description="one row per key, or every write as a row, operands included"
    )
    merge: str | None = Field(
        default=None,
        description=f"{', '.join(merge_operator.BUILT_IN)}, or package.module:function: folds merge operands",
    )
    ttl: Literal["apply", "ignore"] = Field(default="apply", description="rows leave when they expire, or stay")


@dataclass(frozen=True)
class TableMapping:
    """One table. Rows of `keep` current are identified by their key; a changelog has no key, and is appended to."""

    table: TableName
    key: KeyLayout = field(default_factory=KeyLayout)
    value: ValueLayout = field(default_factory=ValueLayout)
    metadata: tuple[Metadata, ...] = ("seq", "create_ts", "expire_ts")
    changelog: bool = False
    merge: str | None = None
    expires: bool = True

    @property
    def name(self) -> str:
        return str(self.table)

    @property
    def prefix(self) -> bytes:
        return self.key.prefix

    @property
    def folds(self) -> bool:
        return self.merge is not None and not self.changelog

    @cached_property
    def schema(self) -> TableSchema:
        """The columns: those of the key, of the value, and SlateDB's own."""
        kinds: dict[str, pa.DataType] = {**self.key.types, **self.value.types, **dict(self._metadata())}
        return TableSchema(
            self.table,
            tuple(Column(name, kind, name not in self.key.fields) for name, kind in kinds.items()),
            () if self.changelog else tuple(self.key.fields),
            upstream_id=self.name,
        )

    def _metadata(self) -> Iterator[tuple[str, pa.DataType]]:
        return ((name, _METADATA[name]) for name in self.metadata)


def read_mappings(path: str, tables: TableOptions) -> tuple[TableMapping, ...]:
    """The tables of a database, longest prefix first; keys of no prefix belong to `slatedb.<path>`.

    Raises ConfigError for a mapping that cannot be read.
    """
    rules: list[TableMapping] = []
    for name, settings in tables.settings.items():
        if settings.mapping is not None:
            rules.append(_mapping(name, settings.mapping))
    default = TableName("slatedb", path)
    if not any(rule.prefix == b"" for rule in rules):
        rules.append(TableMapping(default))
    prefixes = [rule.prefix for rule in rules]
    if len(set(prefixes)) != len(prefixes):
        raise ConfigError("two tables have the same prefix", fix="give each mapping in tables.settings its own prefix")
    return tuple(sorted(rules, key=lambda rule: (-len(rule.prefix), rule.prefix)))


def _mapping(name: str, given: dict[str, Any]) -> TableMapping:
    where = f"tables.settings.{name}.mapping"
    try:
        options = MappingOptions.model_validate(given)
        table = TableName.parse(name)
        prefix = _octets(options.prefix)
        for kind in options.columns.values():
            column_type(kind)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_input=False)
        )
        raise ConfigError(f"{where} is wrong: {problems}", fix="see docs/slatedb.md for its keys") from error
    except ValueError as error:
        raise ConfigError(f"{where} is wrong: {error}", fix="see docs/slatedb.md for its keys") from error
    fields = {"key": options.key} if isinstance(options.key, str) else options.key
    separator = options.separator.encode() if options.separator is not None else None
    rule = TableMapping(
        table,
        KeyLayout(prefix, fields, separator),
        ValueLayout(options.value, options.columns),
        tuple(options.metadata),
        options.keep == "changelog",
        options.merge,
        options.ttl == "apply" and options.keep == "current",
    )
    if problem := rule.key.problem() or _problem(rule, options):
        raise ConfigError(f"{where} {problem}", fix="see docs/slatedb.md for its keys")
    if rule.folds and options.merge is not None:
        merge_operator.make(options.merge, options.value)
    return rule


def _problem(rule: TableMapping, options: MappingOptions) -> str | None:
    if options.value not in FORMATS:
        return f"has a value of format {options.value}; it can be {', '.join(FORMATS)}"
    if options.columns and options.value not in ("json", "msgpack"):
        return f"names columns, which values of format {options.value} do not have"
    names = [*rule.key.types, *rule.value.types, *rule.metadata]
    if len(set(names)) != len(names):
        return "gives two columns the same name; rename a key field, or leave it out of `metadata`"
    if rule.changelog and rule.merge is not None:
        return "has an operator, but a changelog keeps operands as they are"
    return None


def _octets(prefix: str) -> bytes:
    return bytes.fromhex(prefix[2:]) if prefix.startswith("0x") else prefix.encode()


def folds_of(rules: Sequence[TableMapping]) -> dict[bytes, merge_operator.Fold]:
    """The merge operators by prefix."""
    return {
        rule.prefix: merge_operator.make(rule.merge, rule.value.format) for rule in rules if rule.folds and rule.merge
    }
