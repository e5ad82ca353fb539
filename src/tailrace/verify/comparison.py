"""Does the destination hold what the source holds? Keys and row digests of both sides, compared table by table.

Both sides are read once, as the same Arrow types; a key and a digest are kept of each row, and keys that differ are
listed: the keys alone, no other value. Memory does not grow with the table. Neither Spark nor a running pipeline is
needed. While the pipeline runs, changes are on their way: a table that differs is compared again, and what differs only
because of them is told apart.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
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
from tailrace.model.digest import Digests
from tailrace.model.schema import TableSchema
from tailrace.model.table_rows import Readable, RowBatches
from tailrace.verify.key_spill import DIGEST, RUN_ROWS, KeySpill, strides

KEYS_SHOWN = 20
LOOKS = 4
"""How often a table that differs is compared while the pipeline runs."""
PAUSE_SECONDS = 5.0
MOST_DIFFERENCES = 100_000
"""With more of them a table is not compared again: so many are not on their way."""


@dataclass(frozen=True)
class KeyDifference:
    """A key that differs, its values as text: `missing` or `different` at the destination, or `extra` there."""

    key: tuple[str, ...]
    kind: str


@dataclass(frozen=True)
class Verdict:
    """How one table compares. Counts are rows: only in the source, only in the destination, in both but different.

    A key that the destination holds twice is one row too many. `differences` are the first of the keys concerned.
    `in_flight` differences came or went between two looks while the pipeline ran: changes on their way, and not counted
    otherwise. A table without a key, or kept as a changelog, is not `compared`: its rows are
    changes. Nor is one that the source cannot read now, or whose columns the destination cannot keep; `reason` says
    why.
    """

    table: str
    source_rows: int
    destination_rows: int
    missing: int
    extra: int
    different: int
    differences: tuple[KeyDifference, ...] = ()
    compared: bool = True
    reason: str | None = None
    in_flight: int = 0

    @property
    def keys(self) -> tuple[tuple[str, ...], ...]:
        return tuple(one.key for one in self.differences)

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
            "differences": [{"key": one.key, "kind": one.kind} for one in self.differences],
            "in_flight": self.in_flight,
            "compared": self.compared,
            "equal": self.equal if self.compared else None,
            "reason": self.reason,
        }


def verify(
    config: PipelineConfig,
    only: str | None = None,
    *,
    shown: int = KEYS_SHOWN,
    run_rows: int = RUN_ROWS,
    looks: int = LOOKS,
    pause_seconds: float = PAUSE_SECONDS,
) -> Iterator[Verdict]:
    """One verdict for each table of the pipeline, or for the one table named, with `shown` keys at most.

    `run_rows` bounds the rows of which keys and digests are in memory; more are in files under TMPDIR for as long as
    their table is compared. A table that differs while the pipeline runs is compared up to `looks` times, some seconds
    apart. Raises ConfigError for a source or destination that cannot be read back, and for a table
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
            fix="verify a pipeline whose destination has `type: delta`, `iceberg`, `postgres`, `sqlite`, `duckdb` or"
            " `kafka`, or give a class of your own the method `read_table`: `tailrace.model.table_rows.Readable`"
            " describes it",
        )
    tables = [table for table in source.tables() if only is None or str(table.table) == only]
    if not tables:
        raise ConfigError(f"the pipeline follows no table {only or ''}".rstrip(), fix="tailrace tables FILE lists them")
    for table in tables:
        unkept = problems(destination.check_columns(table)).get(str(table.table))
        comparison = _Comparison(source, destination, table, run_rows)
        try:
            found = comparison.look() if table.key and unkept is None else None
            for _ in range(looks - 1):
                if found is None or not found.may_be_in_flight or not _is_running(config):
                    break
                time.sleep(pause_seconds)
                again = comparison.look()
                found = again.still(found) if again is not None else None
        except _UnreadableError as error:
            if only is not None:
                raise error.error from error
            yield _skipped(table, error.error.message)
            continue
        if found is not None:
            yield found.verdict(shown)
        elif only is None:
            yield _skipped(table, unkept.message if unkept else "it has no key, or is kept as a changelog")
        else:
            raise ConfigError(
                f"{table.table} has no key by which its rows could be compared, or is kept as a changelog",
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


def _is_running(config: PipelineConfig) -> bool:
    try:
        with config.store_address.open_reading() as store:
            return store.runner() is not None
    except TailraceError:
        return False


@dataclass(frozen=True)
class _Comparison:
    """Reads a table on both sides, as often as it is looked at."""

    source: Readable
    destination: Readable
    table: TableSchema
    run_rows: int

    def look(self) -> _Differences | None:
        """What differs now. None for a table that cannot be compared by its keys."""
        there = self.destination.read_table(self.table)
        here = self.source.read_table(self.table) if there is not None else None
        if here is None or there is None:
            return None
        with tempfile.TemporaryDirectory(prefix="tailrace-verify-") as folder:
            destination = _spill(Path(folder) / "destination", self.table, map(_ordered, there.rows), self.run_rows)
            shaped = map(there.shape, here.rows)
            try:
                source = _spill(Path(folder) / "source", self.table, map(_ordered, shaped), self.run_rows)
            except TableError as error:
                raise _UnreadableError(error) from error
            return _Differences.of(self.table, source, destination, self.run_rows)


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


_MISSING, _EXTRA, _DIFFERENT = range(3)
_KINDS = ("missing", "extra", "different")
_KIND, _OURS, _THEIRS = "_tailrace_kind", "_tailrace_ours", "_tailrace_theirs"


@dataclass(frozen=True)
class _Differences:
    """The rows of a table that differ: their keys, the kind, and the digests of both sides, 0 where there is no row.

    `rows` is cut after `MOST_DIFFERENCES`; the counts are of all.
    """

    table: TableSchema
    source_rows: int
    destination_rows: int
    counts: tuple[int, int, int]
    rows: pa.Table
    in_flight: int = 0

    @classmethod
    def of(cls, table: TableSchema, source: KeySpill, destination: KeySpill, run_rows: int) -> _Differences:
        counts = np.zeros(3, np.int64)
        found: list[pa.Table] = []
        room = MOST_DIFFERENCES
        for first, last in strides([source, destination], run_rows):
            rows = _Difference.of(table, source.take(first, last), destination.take(first, last)).rows()
            counts += np.bincount(rows.column(_KIND).to_numpy(), minlength=3)
            found.append(rows.slice(0, room))
            room -= found[-1].num_rows
        missing, extra, different = counts.tolist()
        rows = pa.concat_tables(found) if found else pa.table({})
        return cls(table, len(source), len(destination), (missing, extra, different), rows)

    @property
    def may_be_in_flight(self) -> bool:
        """Whether there are differences, and few enough to remember them all."""
        return bool(0 < sum(self.counts) == self.rows.num_rows)

    def still(self, before: _Differences) -> _Differences:
        """Of these, those that were the same before, on both sides. What comes and goes is in flight."""
        if sum(self.counts) != self.rows.num_rows:
            return self
        columns = [*self.table.key, _KIND, _OURS, _THEIRS]
        now, then = (keys.comparable([side.rows.column(name) for name in columns]) for side in (self, before))
        stayed = keys.positions(now, then) >= 0 if self.rows.num_rows else np.zeros(0, np.bool_)
        rows = self.rows.filter(pa.array(stayed))
        missing, extra, different = np.bincount(rows.column(_KIND).to_numpy(), minlength=3).tolist()
        passing = before.in_flight + before.rows.num_rows + self.rows.num_rows - 2 * rows.num_rows
        return replace(self, counts=(missing, extra, different), rows=rows, in_flight=passing)

    def verdict(self, shown: int) -> Verdict:
        listed = self.rows.slice(0, shown).to_pylist()
        differences = tuple(
            KeyDifference(tuple(str(row[name]) for name in self.table.key), _KINDS[row[_KIND]]) for row in listed
        )
        name, rows = str(self.table.table), (self.source_rows, self.destination_rows)
        return Verdict(name, *rows, *self.counts, differences=differences, in_flight=self.in_flight)


Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class _Difference:
    """Which rows of one part differ: `missing` and `different` of the source's, `extra` of the destination's."""

    source: pa.Table
    destination: pa.Table
    at: npt.NDArray[np.int64]
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
        return cls(source, destination, at, missing, different, extra)

    def rows(self) -> pa.Table:
        """Those rows: first what the source has, then what only the destination has."""
        ours, theirs = (side.column(DIGEST).to_numpy() for side in (self.source, self.destination))
        none_of_ours, none_of_theirs = np.zeros_like(ours), np.zeros_like(theirs)
        held = theirs[np.maximum(self.at, 0)] if len(theirs) else none_of_ours
        kinds = np.where(self.missing, _MISSING, _DIFFERENT)
        here = _chosen(
            self.source, self.missing | self.different, kinds, ours, np.where(self.missing, none_of_ours, held)
        )
        there = _chosen(self.destination, self.extra, np.full(len(theirs), _EXTRA), none_of_theirs, theirs)
        return pa.concat_tables([here, there])


def _chosen(side: pa.Table, chosen: Mask, kinds: npt.NDArray[Any], ours: Digests, theirs: Digests) -> pa.Table:
    rows = side.drop_columns([DIGEST])
    for name, values in ((_KIND, kinds.astype(np.int8)), (_OURS, ours), (_THEIRS, theirs)):
        rows = rows.append_column(name, pa.array(values))
    return rows.filter(pa.array(chosen))


def _repeated(there: keys.Comparable) -> Mask:
    """Rows whose key an earlier row has."""
    codes = keys.codes(there)
    order = np.argsort(codes, kind="stable")
    again = np.zeros(len(codes), bool)
    again[order[1:]] = codes[order][1:] == codes[order][:-1]
    return again
