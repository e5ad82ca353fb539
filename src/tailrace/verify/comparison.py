"""Does the destination hold what the source holds? Keys and row digests of both sides, compared table by table.

Both sides are read once, as the same Arrow types; a key and a digest are kept of each row, and keys that differ are
listed: the keys alone, no other value. Memory does not grow with the table. Neither Spark nor a running pipeline is
needed; changes that are on their way while both sides are read show as differences, so a busy pipeline is verified
when it has caught up.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.config.pipeline import PipelineConfig
from tailrace.config.registry import open_destination, open_source
from tailrace.errors import ConfigError, Finding, TableError, TailraceError, problems
from tailrace.model import key as keys
from tailrace.model.change import EXACT
from tailrace.model.schema import TableSchema
from tailrace.model.table_rows import Readable, RowBatches, TableRows
from tailrace.verify.key_spill import DIGEST, RUN_ROWS, KeySpill, strides

KEYS_SHOWN = 20


@dataclass(frozen=True)
class Verdict:
    """How one table compares. Counts are rows: only in the source, only in the destination, in both but different.

    A key that the destination holds twice is one row too many. `keys` are the first of the keys concerned, each a list
    of its values as text. A table without a key, or kept with its history, is not `compared`: its rows are changes. Nor
    is one that the source cannot read now, or whose columns the destination cannot keep; `reason` says why.
    """

    table: str
    source_rows: int
    destination_rows: int
    missing: int
    extra: int
    different: int
    keys: tuple[tuple[str, ...], ...] = ()
    compared: bool = True
    reason: str | None = None

    @property
    def equal(self) -> bool:
        return self.compared and not (self.missing or self.extra or self.different)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values. `equal` is None for a table that is not compared."""
        return {
            "table": self.table,
            "source_rows": self.source_rows,
            "destination_rows": self.destination_rows,
            "missing": self.missing,
            "extra": self.extra,
            "different": self.different,
            "keys": self.keys,
            "compared": self.compared,
            "equal": self.equal if self.compared else None,
            "reason": self.reason,
        }


def verify(
    config: PipelineConfig, only: str | None = None, *, shown: int = KEYS_SHOWN, run_rows: int = RUN_ROWS
) -> Iterator[Verdict]:
    """One verdict for each table of the pipeline, or for the one table named, with `shown` keys at most.

    `run_rows` bounds the rows of which keys and digests are in memory; more are in files under TMPDIR for as long as
    their table is compared. Raises ConfigError for a source or destination that cannot be read back, and for a table
    that is not followed.
    """
    source, destination = open_source(config), open_destination(config)
    if not isinstance(source, Readable):
        raise ConfigError(
            f"a source of `type: {config.source.type}` cannot be read as a whole, so nothing can be compared",
            fix="give its class the method `read_table`: `tailrace.model.table_rows.Readable` describes it",
        )
    if not isinstance(destination, Readable):
        raise ConfigError(
            f"a destination of `type: {config.destination.type}` cannot be read back, so nothing can be compared",
            fix="verify a pipeline whose destination has `type: delta` or `type: sqlite`, or give a class of your own"
            " the method `read_table`: `tailrace.model.table_rows.Readable` describes it",
        )
    tables = [table for table in source.tables() if only is None or str(table.table) == only]
    if not tables:
        raise ConfigError(f"the pipeline follows no table {only or ''}".rstrip(), fix="tailrace tables FILE lists them")
    for table in tables:
        unkept = problems(destination.check_columns(table)).get(str(table.table))
        there = destination.read_table(table) if table.key and unkept is None else None
        here = source.read_table(table) if there is not None else None
        if here is not None and there is not None:
            try:
                yield _compare(table, here, there, shown, run_rows)
            except _UnreadableError as error:
                if only is not None:
                    raise error.error from error
                yield _skipped(table, error.error.message)
        elif only is None:
            yield _skipped(table, unkept.message if unkept else "it has no key, or is kept with its history")
        else:
            raise ConfigError(
                f"{table.table} has no key by which its rows could be compared, or is kept with its history",
                fix="name another table with --table",
                table=str(table.table),
            )


class _UnreadableError(Exception):
    """The source cannot read a table, because of that table alone."""

    def __init__(self, error: TableError) -> None:
        super().__init__(error.message)
        self.error = error


def _skipped(table: TableSchema, reason: str) -> Verdict:
    return Verdict(str(table.table), 0, 0, 0, 0, 0, compared=False, reason=reason)


def find_omitted(config: PipelineConfig, compared: Collection[str]) -> list[Finding]:
    """What the pipeline selects and `verify` did not compare: tables that are not followed, columns that are not sent.

    Where the source cannot be asked, that is the only finding.
    """
    source = open_source(config)
    try:
        errors = problems(source.check())
        return [*source.notices(), *(finding for table, finding in errors.items() if table not in compared)]
    except TailraceError as error:
        return [Finding("warning", "source", f"what it leaves out is not known: {error.message}", error.fix)]


def _ordered(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with their unfit values in the order of names: that of the file depends on which change brought them."""
    at = rows.schema.get_field_index(EXACT)
    if rows.column(at).null_count == rows.num_rows:
        return rows
    texts = [text and json.dumps(json.loads(text), sort_keys=True) for text in rows.column(at).to_pylist()]
    return rows.set_column(at, EXACT, pa.array(texts, pa.string()))


def _compare(table: TableSchema, here: TableRows, there: TableRows, shown: int, run_rows: int) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="tailrace-verify-") as folder:
        destination = _spill(Path(folder) / "destination", table, map(_ordered, there.rows), run_rows)
        shaped = map(there.shape, here.rows)
        try:
            source = _spill(Path(folder) / "source", table, map(_ordered, shaped), run_rows)
        except TableError as error:
            raise _UnreadableError(error) from error
        return _judge(table, source, destination, shown, run_rows)


def _spill(folder: Path, table: TableSchema, rows: RowBatches, run_rows: int) -> KeySpill:
    folder.mkdir()
    spill: KeySpill | None = None
    for batch in rows:
        if spill is None:
            spill = KeySpill(folder, pa.schema([batch.schema.field(name) for name in table.key]), run_rows)
        spill.add(batch)
    if spill is None:
        spill = KeySpill(folder, pa.schema([(name, table.column(name).type) for name in table.key]), run_rows)
    spill.finish()
    return spill


def _judge(table: TableSchema, source: KeySpill, destination: KeySpill, shown: int, run_rows: int) -> Verdict:
    missing = extra = different = 0
    listed: list[tuple[str, ...]] = []
    for first, last in strides([source, destination], run_rows):
        found = _Difference.of(table, source.take(first, last), destination.take(first, last))
        missing += int(found.missing.sum())
        extra += int(found.extra.sum())
        different += int(found.different.sum())
        listed += found.keys(shown - len(listed))
    return Verdict(str(table.table), len(source), len(destination), missing, extra, different, tuple(listed))


Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class _Difference:
    """Which rows of one part differ: `missing` and `different` of the source's, `extra` of the destination's."""

    source: pa.Table
    destination: pa.Table
    missing: Mask
    different: Mask
    extra: Mask

    @classmethod
    def of(cls, table: TableSchema, source: pa.Table, destination: pa.Table) -> _Difference:
        here, there = (keys.comparable([side.column(name) for name in table.key]) for side in (source, destination))
        at = keys.positions(here, there)
        missing = at < 0
        different = ~missing
        if destination.num_rows:
            ours, theirs = (side.column(DIGEST).to_numpy() for side in (source, destination))
            different &= ours != theirs[np.maximum(at, 0)]
        extra = (keys.positions(there, here) < 0) | _repeated(there)
        return cls(source, destination, missing, different, extra)

    def keys(self, most: int) -> list[tuple[str, ...]]:
        """The first keys concerned, as text."""
        concerned = [
            self.source.filter(pa.array(self.missing | self.different)),
            self.destination.filter(pa.array(self.extra)),
        ]
        rows = [row for each in concerned for row in each.drop_columns([DIGEST]).slice(0, max(most, 0)).to_pylist()]
        return [tuple(str(value) for value in row.values()) for row in rows[: max(most, 0)]]


def _repeated(there: keys.Comparable) -> Mask:
    """Rows whose key an earlier row has."""
    codes = keys.codes(there)
    order = np.argsort(codes, kind="stable")
    again = np.zeros(len(codes), bool)
    again[order[1:]] = codes[order][1:] == codes[order][:-1]
    return again
