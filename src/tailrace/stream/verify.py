"""Does the destination hold what the source holds? Keys and row digests of both sides, compared table by table.

Both sides are read as the same Arrow types, one digest per row is kept of each, and keys that differ are listed: the
keys alone, no other value. Neither Spark nor a running pipeline is needed; changes that are on their way while both
sides are read show as differences, so a busy pipeline is verified when it has caught up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace import key as keys
from tailrace.config import PipelineConfig
from tailrace.digest import row_digests
from tailrace.errors import ConfigError
from tailrace.registry import open_destination, open_source
from tailrace.schema import TableSchema
from tailrace.stream.verify_side import kept_rows, source_rows

KEYS_SHOWN = 20


@dataclass(frozen=True)
class Verdict:
    """How one table compares. Counts are rows: only in the source, only in the destination, in both but different.

    `keys` are some of the keys concerned, each a list of its values as text.
    """

    table: str
    source_rows: int
    destination_rows: int
    missing: int
    extra: int
    different: int
    keys: tuple[tuple[str, ...], ...] = ()

    @property
    def equal(self) -> bool:
        return not (self.missing or self.extra or self.different)


def verify(config: PipelineConfig, only: str | None = None) -> Iterator[Verdict]:
    """One verdict for each table of the pipeline, or for the one table named.

    Raises ConfigError for a source or destination that cannot be read back, and for a table that is not followed.
    """
    source, destination = open_source(config), open_destination(config)
    tables = [table for table in source.tables() if only is None or str(table.table) == only]
    if not tables:
        raise ConfigError(f"the pipeline follows no table {only or ''}".rstrip(), fix="tailrace tables FILE lists them")
    for table in tables:
        if not table.key:
            raise ConfigError(
                f"{table.table} has no key by which its rows could be compared",
                fix="name another table with --table",
                table=str(table.table),
            )
        kept = kept_rows(destination, table)
        there = _Side.of(table, kept.rows)
        here = _Side.of(table, map(kept.shape, source_rows(source, table)))
        yield _compare(table, here, there)


@dataclass(frozen=True)
class _Side:
    """The keys of one side and the digest of each row."""

    key: pa.Table
    digests: npt.NDArray[np.int64]

    @classmethod
    def of(cls, table: TableSchema, batches: Iterator[pa.RecordBatch]) -> _Side:
        found: list[pa.Table] = []
        digests: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]
        for batch in batches:
            found.append(pa.table({name: batch.column(name) for name in table.key}))
            digests.append(row_digests(batch.columns))
        if not found:
            found = [pa.schema([(name, table.column(name).type) for name in table.key]).empty_table()]
        return cls(pa.concat_tables(found), np.concatenate(digests))

    def comparable(self) -> keys.Comparable:
        return keys.comparable([self.key.column(name) for name in self.key.schema.names])


def _compare(table: TableSchema, source: _Side, destination: _Side) -> Verdict:
    at = keys.positions(source.comparable(), destination.comparable())
    missing = at < 0
    different = ~missing
    if len(destination.digests):
        different &= source.digests != destination.digests[np.maximum(at, 0)]
    extra = keys.positions(destination.comparable(), source.comparable()) < 0
    concerned = pa.concat_tables(
        [source.key.filter(pa.array(missing | different)), destination.key.filter(pa.array(extra))],
        promote_options="permissive",
    )
    return Verdict(
        str(table.table),
        source.key.num_rows,
        destination.key.num_rows,
        int(missing.sum()),
        int(extra.sum()),
        int(different.sum()),
        tuple(tuple(str(value) for value in row.values()) for row in concerned.slice(0, KEYS_SHOWN).to_pylist()),
    )
